//! `tandem serve`: the engine behind its gRPC port.

use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::{Context, Result};
use grpc_server::{Port, Security, Services};
use serving::{Frontend, FrontendConfig, InferenceEngine, ModelInfo};
use settings::{
    CompatSettings, DraftingArg, EngineSettings, LogFormatArg, ServeSettings, TelemetrySettings,
};
use telemetry::{Collector, Export, LogFormat, TelemetryError};
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::signal::unix::{SignalKind, signal};

use crate::loading::{self, LoadedEngine};
use crate::{http, output, port, program};

/// How requests are drafted for where nothing says it.
pub(crate) const DEFAULT_DRAFTING: DraftingArg = DraftingArg::Adaptive;

pub(crate) fn run(settings: &ServeSettings) -> Result<()> {
    let runtime = Runtime::new()?;
    let export = {
        let _inside = runtime.enter();
        start_telemetry(&settings.telemetry)?
    };
    let result = runtime.block_on(serve(settings));
    if let Some(export) = export {
        export.shut_down();
    }
    // A model that is still being read would keep a stopped program.
    runtime.shutdown_background();
    result
}

async fn serve(settings: &ServeSettings) -> Result<()> {
    let listen = &settings.listen;
    let address = SocketAddr::new(listen.host, listen.port);
    let security = port::security(settings)?;
    // Bound first: a port that is taken is known before the model is read.
    let listener = bind(address, "--port").await?;
    let address = listener.local_addr()?;
    let max_request_bytes = listen.max_request_bytes as usize;
    let metrics = Arc::new(http::metrics(&settings.http));
    let frontend = Arc::new(Frontend::loading(FrontendConfig {
        max_request_bytes,
        max_buffered_steps: listen.max_buffered_steps as usize,
        link_span: Some(telemetry::link_span),
        observer: metrics.clone(),
        ..FrontendConfig::default()
    }));
    let engine: Arc<dyn InferenceEngine> = frontend.clone();
    let http = http::start(settings, &engine, metrics).await?;
    let mut ports = vec![port::own(listener, listen, &engine, security)];
    ports.extend(compat_ports(&settings.compat, &engine, max_request_bytes).await?);
    let stop = stop_signal()?;
    let mut serving = tokio::spawn(grpc_server::serve(ports, port::config(listen), engine, stop));
    let engine_settings = settings.engine.clone();
    let loading = tokio::task::spawn_blocking(move || {
        loading::start_engine(&engine_settings, DEFAULT_DRAFTING)
    });
    let loaded = tokio::select! {
        loaded = loading => loaded??,
        served = &mut serving => return Ok(served??),
    };
    let info = model_info(listen.served_model_name.clone(), &loaded, &settings.engine);
    let LoadedEngine { model, handle, thread, .. } = loaded;
    frontend.serve(handle, model.tokenizer.clone(), info);
    output::text(&format!("listening on {address}\n"))?;
    serving.await??;
    thread.drain();
    if let Some(http) = http {
        http.stop().await;
    }
    tracing::info!("stopped");
    Ok(())
}

pub(crate) async fn bind(address: SocketAddr, flag: &str) -> Result<TcpListener> {
    let listener = TcpListener::bind(address).await;
    listener.with_context(|| format!("cannot listen on {address}: choose another {flag}"))
}

/// Ports that speak the protocols of other engines.
async fn compat_ports(
    compat: &CompatSettings,
    engine: &Arc<dyn InferenceEngine>,
    max_request_bytes: usize,
) -> Result<Vec<Port>> {
    let mut ports = vec![];
    if let Some(port) = compat.smg_port {
        let listener = bind(SocketAddr::new(compat.compat_host, port), "--smg-port").await?;
        output::text(&format!("SMG's API on {}\n", listener.local_addr()?))?;
        let service = compat_smg::service(Arc::clone(engine), max_request_bytes);
        ports.push(Port {
            listener,
            services: Services::default().with(service),
            security: Security::default(),
        });
    }
    if let Some(port) = compat.vllm_port {
        let listener = bind(SocketAddr::new(compat.compat_host, port), "--vllm-port").await?;
        output::text(&format!("vLLM's API on {}\n", listener.local_addr()?))?;
        let (inference, control) = compat_vllm::services(engine, max_request_bytes);
        let services = Services::default().with(inference).with(control);
        ports.push(Port { listener, services, security: Security::default() });
    }
    Ok(ports)
}

/// A server tells how it started.
fn start_telemetry(settings: &TelemetrySettings) -> Result<Option<Export>, TelemetryError> {
    const LEVEL: &str = "info";
    let format = match settings.log_format {
        LogFormatArg::Text => LogFormat::Text,
        LogFormatArg::Json => LogFormat::Json,
    };
    let Some(endpoint) = settings.otlp_endpoint.clone() else {
        telemetry::log(LEVEL, format)?;
        return Ok(None);
    };
    let collector = Collector { endpoint, service_name: settings.service_name.clone() };
    telemetry::log_and_export(LEVEL, format, &collector).map(Some)
}

/// Resolves at the first signal to stop; the second one ends the program at once.
fn stop_signal() -> Result<impl Future<Output = ()> + Send> {
    let mut terminate = signal(SignalKind::terminate()).context("watch for SIGTERM")?;
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = tokio::signal::ctrl_c() => {}
        }
        tracing::info!("stopping; interrupt again to stop at once");
        tokio::spawn(async {
            if tokio::signal::ctrl_c().await.is_ok() {
                tracing::warn!("stopped at once");
                std::process::exit(130);
            }
        });
    })
}

/// What clients are told of an engine; without a name, the model has that of its folder.
pub(crate) fn model_info(
    name: Option<String>,
    LoadedEngine { model, index_share, device, .. }: &LoadedEngine,
    settings: &EngineSettings,
) -> ModelInfo {
    let folder = || {
        let name = model.dir.canonicalize().unwrap_or_else(|_| model.dir.clone());
        name.file_name().unwrap_or_default().to_string_lossy().into_owned()
    };
    ModelInfo {
        served_model_name: name.unwrap_or_else(folder),
        architecture: model.architecture.clone(),
        eos_token_ids: model.config.eos_token_ids.clone(),
        dtype: loading::dtype_name(model.dtype).to_owned(),
        index_topk: model.config.dsa.as_ref().map_or(0, |dsa| dsa.index_topk as u32),
        index_share: *index_share,
        synthetic_acceptance: settings.is_synthetic(),
        checkpoint_dir: Some(model.dir.clone()),
        program: program::info(device),
    }
}

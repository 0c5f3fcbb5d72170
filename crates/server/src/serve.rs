//! `tandem serve`: the engine behind its gRPC port.

use std::time::Duration;

use anyhow::{Context, Result};
use grpc_server::{ModelInfo, ServeConfig, Service};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};

use crate::cli::{DraftingArg, ServeArgs};
use crate::loading::{self, LoadedEngine, Model};
use crate::output;

pub(crate) fn run(args: &ServeArgs) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    // Bound first: a port that is taken is known before the model is read.
    let listener = runtime
        .block_on(TcpListener::bind(args.address()))
        .with_context(|| format!("cannot listen on {}: choose another --port", args.address()))?;
    let address = listener.local_addr()?;
    let LoadedEngine { model, handle, thread, index_share } =
        loading::start_engine(&args.engine, DraftingArg::Adaptive)?;
    let service = Service {
        engine: handle,
        tokenizer: model.tokenizer.clone(),
        model: ModelInfo {
            index_share,
            synthetic_acceptance: args.engine.is_synthetic(),
            ..model_info(args, &model)
        },
    };
    let drain_timeout = Duration::from_secs(args.drain_timeout);
    let config = ServeConfig { drain_timeout, ..ServeConfig::default() };
    runtime.block_on(async {
        let mut terminate = signal(SignalKind::terminate()).context("watch for SIGTERM")?;
        let stop = async move {
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
        };
        output::text(&format!("listening on {address}\n"))?;
        grpc_server::serve(listener, config, service, stop).await?;
        anyhow::Ok(())
    })?;
    thread.drain();
    tracing::info!("stopped");
    Ok(())
}

fn model_info(args: &ServeArgs, model: &Model) -> ModelInfo {
    let folder = || {
        let name = model.dir.canonicalize().unwrap_or_else(|_| model.dir.clone());
        name.file_name().unwrap_or_default().to_string_lossy().into_owned()
    };
    ModelInfo {
        served_model_name: args.served_model_name.clone().unwrap_or_else(folder),
        architecture: model.architecture.clone(),
        eos_token_ids: model.config.eos_token_ids.clone(),
        dtype: loading::dtype_name(model.dtype).to_owned(),
        index_topk: model.config.dsa.as_ref().map_or(0, |dsa| dsa.index_topk as u32),
        ..ModelInfo::default()
    }
}

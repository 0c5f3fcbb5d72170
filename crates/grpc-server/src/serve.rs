//! Building the server, its health, and its orderly end.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use engine::EngineHandle;
use grpc_api::control::v1::control_service_server::ControlServiceServer;
use grpc_api::inference::v1::inference_service_server::InferenceServiceServer;
use tokenization::Tokenizer;
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep, timeout};
use tonic::service::RoutesBuilder;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;

use crate::control::Control;
use crate::inference::Inference;

/// How often the engine's state is looked at: bounds how late health shows a death.
const HEALTH_INTERVAL: Duration = Duration::from_millis(100);
/// How long connections may take to close once no request is left.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);
/// Every service name under which health is reported; the empty one is the server as a whole.
const HEALTH_NAMES: [&str; 3] =
    ["", "tandem.inference.v1.InferenceService", "tandem.control.v1.ControlService"];

/// What clients are told about the model; the engine knows the rest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelInfo {
    /// Name under which the server offers the model.
    pub served_model_name: String,
    /// Architecture, as the checkpoint names it.
    pub architecture: String,
    /// Ids that end an output.
    pub eos_token_ids: Vec<u32>,
    /// Compute and KV cache type, such as `bfloat16`.
    pub dtype: String,
    /// Keys that a token attends at most; 0 where attention is dense.
    pub index_topk: u32,
    /// Whether draft steps after the first reuse its selection of keys.
    pub index_share: bool,
    /// Whether drafts are accepted by a schedule instead of by the model.
    pub synthetic_acceptance: bool,
}

/// What is served.
#[derive(Debug)]
pub struct Service {
    /// The engine; the server drains it when it stops.
    pub engine: EngineHandle,
    /// Without one, prompts are ids and outputs have no text.
    pub tokenizer: Option<Arc<Tokenizer>>,
    /// What clients are told about the model.
    pub model: ModelInfo,
}

/// How the server behaves.
#[derive(Clone, Debug)]
pub struct ServeConfig {
    /// Largest size of a request message in bytes; a larger one is refused with both sizes.
    pub max_request_bytes: usize,
    /// Steps of a stream that may wait for its reader before its request is aborted.
    pub max_buffered_steps: usize,
    /// Events of the prefix cache that may wait for the reader of a subscription, at least 1; one
    /// that falls further behind gets a new snapshot.
    pub max_buffered_kv_events: usize,
    /// How long running requests may take after the shutdown signal.
    pub drain_timeout: Duration,
    /// How often an idle connection is probed.
    pub keepalive_interval: Duration,
    /// How long a probe may stay without an answer before the connection is closed.
    pub keepalive_timeout: Duration,
}

impl Default for ServeConfig {
    fn default() -> Self {
        Self {
            max_request_bytes: 16 << 20,
            max_buffered_steps: 1024,
            max_buffered_kv_events: 4096,
            drain_timeout: Duration::from_secs(30),
            keepalive_interval: Duration::from_secs(30),
            keepalive_timeout: Duration::from_secs(10),
        }
    }
}

/// Why serving ended early.
#[derive(Debug)]
#[non_exhaustive]
pub enum ServeError {
    /// The transport failed.
    Transport(tonic::transport::Error),
}

impl fmt::Display for ServeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Transport(error) => write!(f, "the gRPC server failed: {error}"),
        }
    }
}

impl std::error::Error for ServeError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Transport(error) => Some(error),
        }
    }
}

/// Serves on `listener` until `shutdown` resolves, then drains.
///
/// Draining: health says NOT_SERVING, new requests are UNAVAILABLE, running ones may take
/// `drain_timeout` and are then aborted; each gets its last message. Health also turns
/// NOT_SERVING if the engine dies; the server then goes on and refuses requests.
///
/// # Errors
///
/// If the transport fails.
pub async fn serve(
    listener: TcpListener,
    config: ServeConfig,
    service: Service,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> Result<(), ServeError> {
    let engine = service.engine.clone();
    let (reporter, health) = tonic_health::server::health_reporter();
    let mut routes = RoutesBuilder::default();
    routes.add_service(health);
    routes.add_service(
        InferenceServiceServer::new(Inference::new(
            engine.clone(),
            service.tokenizer.clone(),
            &service.model.eos_token_ids,
            config.max_buffered_steps,
        ))
        .max_decoding_message_size(config.max_request_bytes),
    );
    routes.add_service(ControlServiceServer::new(Control {
        engine: engine.clone(),
        model: service.model,
        has_tokenizer: service.tokenizer.is_some(),
        max_request_bytes: config.max_request_bytes,
        max_buffered_kv_events: config.max_buffered_kv_events,
    }));
    report(&reporter, ServingStatus::Serving).await;

    let (drained_sender, drained) = oneshot::channel::<()>();
    let (closing_sender, closing) = oneshot::channel::<()>();
    let server = Server::builder()
        .http2_keepalive_interval(Some(config.keepalive_interval))
        .http2_keepalive_timeout(Some(config.keepalive_timeout))
        .add_routes(routes.routes())
        .serve_with_incoming_shutdown(
            TcpIncoming::from(listener).with_nodelay(Some(true)),
            async move {
                // An error means that the supervisor below is gone, which ends serving as well.
                let _ = drained.await;
                let _ = closing_sender.send(());
            },
        );
    let supervisor = async {
        supervise(&engine, &reporter, shutdown).await;
        drain(&engine, &reporter, config.drain_timeout).await;
        let _ = drained_sender.send(());
        let _ = closing.await;
        // A watcher of health, or an idle client, may keep its connection open for ever.
        sleep(CLOSE_TIMEOUT).await;
    };
    tokio::select! {
        served = server => served.map_err(ServeError::Transport),
        () = supervisor => Ok(()),
    }
}

async fn report(reporter: &HealthReporter, status: ServingStatus) {
    for name in HEALTH_NAMES {
        reporter.set_service_status(name, status).await;
    }
}

/// Waits for `shutdown`; shows the engine's death meanwhile.
async fn supervise(
    engine: &EngineHandle,
    reporter: &HealthReporter,
    shutdown: impl Future<Output = ()>,
) {
    let watch = async {
        while engine.is_alive() {
            sleep(HEALTH_INTERVAL).await;
        }
        let fault = engine.fault().unwrap_or_else(|| "it was stopped".to_owned());
        tracing::error!(%fault, "the engine has ended; requests are refused");
        report(reporter, ServingStatus::NotServing).await;
        std::future::pending::<()>().await;
    };
    tokio::select! {
        () = shutdown => {}
        () = watch => {}
    }
}

/// Lets the engine finish what it has, for a while.
async fn drain(engine: &EngineHandle, reporter: &HealthReporter, limit: Duration) {
    report(reporter, ServingStatus::NotServing).await;
    engine.drain();
    let idle = async {
        while engine.is_alive() && engine.stats().n_unfinished > 0 {
            sleep(Duration::from_millis(10)).await;
        }
    };
    let started = Instant::now();
    if timeout(limit, idle).await.is_err() {
        let n_unfinished = engine.stats().n_unfinished;
        tracing::warn!(n_unfinished, elapsed = ?started.elapsed(), "aborting unfinished requests");
        engine.shutdown();
    }
}

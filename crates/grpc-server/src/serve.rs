//! Building the server, its health, and its orderly end.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use serving::{EngineState, InferenceEngine};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;
use tonic_health::pb::health_server::HealthServer;

use crate::guard::Guard;
use crate::health::Health;
use crate::incoming::incoming;
use crate::port::{Port, Security, Services};

/// How often the engine is looked at, to tell of its death.
const DEATH_INTERVAL: Duration = Duration::from_millis(100);
/// How long connections may take to close once no request is left.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// Streams that a client may reset faster than they are looked at; at one more the connection is
/// closed, so that opening and resetting streams cannot keep the server busy.
const RESET_STREAMS_MAX: usize = 128;

/// How the server behaves.
#[derive(Clone, Debug)]
pub struct ServeConfig {
    /// How long running requests may take after the shutdown signal.
    pub drain_timeout: Duration,
    /// How long a new connection may take to send what HTTP/2 or TLS begin with.
    pub opening_timeout: Duration,
    /// How often an idle connection is probed.
    pub keepalive_interval: Duration,
    /// How long a probe may stay without an answer before the connection is closed.
    pub keepalive_timeout: Duration,
    /// After which time a connection takes no new calls; those that run go on. Without it,
    /// connections last.
    pub max_connection_age: Option<Duration>,
    /// Calls of a connection at a time, streams included; further ones wait in the client.
    pub max_concurrent_streams: u32,
    /// Largest size of a call's headers in bytes, as HTTP/2 counts them.
    pub max_header_list_bytes: u32,
}

impl Default for ServeConfig {
    fn default() -> Self {
        Self {
            drain_timeout: Duration::from_secs(30),
            opening_timeout: Duration::from_secs(10),
            keepalive_interval: Duration::from_secs(30),
            keepalive_timeout: Duration::from_secs(10),
            max_connection_age: None,
            max_concurrent_streams: 1024,
            max_header_list_bytes: 16 << 10,
        }
    }
}

impl ServeConfig {
    fn builder(&self) -> Server {
        let server = Server::builder()
            .http2_keepalive_interval(Some(self.keepalive_interval))
            .http2_keepalive_timeout(Some(self.keepalive_timeout))
            .max_concurrent_streams(self.max_concurrent_streams)
            .http2_max_header_list_size(self.max_header_list_bytes)
            .http2_max_pending_accept_reset_streams(Some(RESET_STREAMS_MAX))
            .http2_max_local_error_reset_streams(Some(RESET_STREAMS_MAX));
        match self.max_connection_age {
            // Without a grace: tonic closes a connection after one at once, without a GOAWAY.
            Some(age) => server.max_connection_age(age),
            None => server,
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

/// Serves on all `ports` until `shutdown` resolves, then drains.
///
/// Health says SERVING while the engine serves; NOT_SERVING while it loads or drains, and once it
/// is dead, when the server goes on and refuses requests. Draining: new requests are UNAVAILABLE,
/// running ones may take `drain_timeout` and are then aborted; each gets its last message.
///
/// # Errors
///
/// If the transport of a port fails.
pub async fn serve(
    ports: Vec<Port>,
    config: ServeConfig,
    engine: Arc<dyn InferenceEngine>,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> Result<(), ServeError> {
    let drained = CancellationToken::new();
    let stopping = CancellationToken::new();
    let mut servers = JoinSet::new();
    for Port { listener, services, security } in ports {
        let Services { mut routes, names, .. } = services;
        let (engine, names) = (Arc::clone(&engine), names.into());
        let health = Health { engine, names, stopping: stopping.clone() };
        routes.add_service(HealthServer::new(health));
        let Security { tls, access } = security;
        let mut server = config.builder();
        if let Some(tls) = tls {
            server = server.tls_config(tls.config).map_err(ServeError::Transport)?;
        }
        let guard = Guard { routes: routes.routes().prepare(), access: Arc::new(access) };
        servers.spawn(server.serve_with_incoming_shutdown(
            guard,
            incoming(listener, config.opening_timeout),
            drained.clone().cancelled_owned(),
        ));
    }
    let supervisor = async {
        tokio::select! {
            () = shutdown => {}
            () = tell_death(&*engine) => {}
        }
        stopping.cancel();
        drain(&*engine, config.drain_timeout).await;
        drained.cancel();
        // A watcher of health, or an idle client, may keep its connection open for ever.
        sleep(CLOSE_TIMEOUT).await;
    };
    let all = async {
        while let Some(served) = servers.join_next().await {
            served.expect("a server does not panic").map_err(ServeError::Transport)?;
        }
        Ok(())
    };
    tokio::select! {
        served = all => served,
        () = supervisor => Ok(()),
    }
}

/// Logs the engine's death, if it dies; never ends.
async fn tell_death(engine: &dyn InferenceEngine) {
    loop {
        if let EngineState::Dead(fault) = engine.state() {
            tracing::error!(%fault, "the engine has ended; requests are refused");
            return std::future::pending().await;
        }
        sleep(DEATH_INTERVAL).await;
    }
}

/// Lets the engine finish what it has, for a while.
async fn drain(engine: &dyn InferenceEngine, limit: Duration) {
    engine.drain();
    let idle = async {
        while !matches!(engine.state(), EngineState::Dead(_)) && engine.n_unfinished() > 0 {
            sleep(Duration::from_millis(10)).await;
        }
    };
    let started = Instant::now();
    if timeout(limit, idle).await.is_err() {
        let n_unfinished = engine.n_unfinished();
        tracing::warn!(n_unfinished, elapsed = ?started.elapsed(), "aborting unfinished requests");
        engine.shutdown();
    }
}

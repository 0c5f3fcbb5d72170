//! The listener: its connections and their limits.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use serving::InferenceEngine;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::metrics::Metrics;
use crate::routes;

/// Connections at once; further ones wait to be accepted.
const MAX_CONNECTIONS: usize = 256;
/// How long a request's head may take, and how long a connection may idle.
const HEAD_TIMEOUT: Duration = Duration::from_secs(5);
/// How long requests may take after the shutdown.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// What the listener offers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpConfig {
    /// Whether `/api/generate` takes prompts, from anyone who can reach the listener.
    pub prompts: bool,
    /// Largest size of a request's body in bytes.
    pub max_body_bytes: usize,
}

impl Default for HttpConfig {
    fn default() -> Self {
        Self { prompts: true, max_body_bytes: 1 << 20 }
    }
}

/// Serves HTTP/1.1 until `shutdown` resolves, and then what has begun for at most 2 s.
pub async fn serve(
    listener: TcpListener,
    config: HttpConfig,
    engine: Arc<dyn InferenceEngine>,
    metrics: Arc<Metrics>,
    shutdown: impl Future<Output = ()> + Send,
) {
    let router = routes::router(config, engine, metrics);
    let slots = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let graceful = GracefulShutdown::new();
    // Dropped at the end, which closes what is still open.
    let mut connections = JoinSet::new();
    let mut shutdown = pin!(shutdown);
    loop {
        let next = tokio::select! {
            next = accept(&listener, &slots) => next,
            () = &mut shutdown => break,
        };
        let Some((stream, slot)) = next else { continue };
        connections.spawn(connection(stream, slot, router.clone(), &graceful));
        while connections.try_join_next().is_some() {}
    }
    drop(listener);
    if timeout(CLOSE_TIMEOUT, graceful.shutdown()).await.is_err() {
        tracing::debug!("closing HTTP connections with unfinished requests");
    }
}

/// The next connection, once there is room for it; `None` where the system had none to give.
async fn accept(
    listener: &TcpListener,
    slots: &Arc<Semaphore>,
) -> Option<(TcpStream, OwnedSemaphorePermit)> {
    let slot = Arc::clone(slots).acquire_owned().await.expect("nobody closes it");
    match listener.accept().await {
        Ok((stream, _)) => Some((stream, slot)),
        Err(error) => {
            tracing::warn!(%error, "cannot accept an HTTP connection");
            // Out of files, most likely: the next attempt would fail as well.
            sleep(Duration::from_millis(100)).await;
            None
        }
    }
}

/// Serves one connection until it ends.
fn connection(
    stream: TcpStream,
    slot: OwnedSemaphorePermit,
    router: Router,
    graceful: &GracefulShutdown,
) -> impl Future<Output = ()> + use<> {
    // Tokens are small and shall not wait for more of them.
    let _ = stream.set_nodelay(true);
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(HEAD_TIMEOUT);
    let service = TowerToHyperService::new(router);
    let connection = graceful.watch(http.serve_connection(TokioIo::new(stream), service));
    async move {
        if let Err(error) = connection.await {
            tracing::debug!(%error, "an HTTP connection failed");
        }
        drop(slot);
    }
}

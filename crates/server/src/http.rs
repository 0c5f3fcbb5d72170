//! The HTTP listener of `tandem serve`: metrics, health and the page.

use std::net::SocketAddr;
use std::sync::Arc;

use admin_http::{HttpConfig, Metrics, Names};
use anyhow::Result;
use serving::InferenceEngine;
use settings::{HttpSettings, MetricsCompatArg, ServeSettings};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::output;
use crate::serve::bind;

/// A running listener.
pub(crate) struct Http {
    stop: oneshot::Sender<()>,
    serving: JoinHandle<()>,
}

impl Http {
    /// Ends it. Called last, so that probes and scrapes see a server drain.
    pub(crate) async fn stop(self) {
        // A listener that has gone needs no word.
        let _ = self.stop.send(());
        let _ = self.serving.await;
    }
}

/// Metrics of calls to come, under the names that are asked for.
pub(crate) fn metrics(settings: &HttpSettings) -> Metrics {
    Metrics::new(match settings.metrics_compat {
        MetricsCompatArg::None => Names::Own,
        MetricsCompatArg::Vllm => Names::Vllm,
    })
}

/// Listens, if there is a port for it.
pub(crate) async fn start(
    settings: &ServeSettings,
    engine: &Arc<dyn InferenceEngine>,
    metrics: Arc<Metrics>,
) -> Result<Option<Http>> {
    let Some(port) = settings.http.http_port else { return Ok(None) };
    let listener = bind(SocketAddr::new(settings.http.http_host, port), "--http-port").await?;
    output::text(&format!("metrics and page on http://{}\n", listener.local_addr()?))?;
    let config = HttpConfig {
        prompts: settings.http.takes_prompts(&settings.auth),
        max_body_bytes: settings.listen.max_request_bytes as usize,
    };
    let (stop, stopped) = oneshot::channel();
    // Dropped unsent where the model cannot be read, which ends the listener as well.
    let stopped = async { stopped.await.unwrap_or_default() };
    let serving =
        tokio::spawn(admin_http::serve(listener, config, Arc::clone(engine), metrics, stopped));
    Ok(Some(Http { stop, serving }))
}

//! What probes are told in each state of an engine.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use admin_http::{HttpConfig, Metrics, Names};
use serving::{EngineState, Frontend, FrontendConfig, InferenceEngine as _};
use tokio_stream::StreamExt as _;

use crate::harness::*;

async fn expect(listener: &Listener, healthz: (u16, &str), readyz: (u16, &str)) {
    for (path, (status, text)) in [("/healthz", healthz), ("/readyz", readyz)] {
        let answer = listener.get(path).await;
        assert_eq!((answer.status, answer.body.as_str()), (status, text), "{path}");
    }
}

#[tokio::test]
async fn loading_is_well_and_not_ready() {
    let frontend = Arc::new(Frontend::loading(FrontendConfig::default()));
    let metrics = Arc::new(Metrics::new(Names::Own));
    let listener = Listener::start(frontend, HttpConfig::default(), metrics).await;
    expect(&listener, (200, "ok\n"), (503, "the model is being read\n")).await;
    let stats = listener.get("/api/stats").await.json();
    assert_eq!((&stats["state"], stats["stats"].is_null()), (&"loading".into(), true));
}

#[tokio::test]
async fn serving_is_ready_and_draining_is_not() {
    let step_time = Duration::from_millis(50);
    let server = Server::start(Setup { step_time, ..Setup::default() }).await;
    expect(&server, (200, "ok\n"), (200, "ok\n")).await;
    // What has nothing left to do would end instead.
    let _running = server.call(streaming(&[1], 4000)).await;
    server.of.frontend.drain();
    expect(&server, (200, "ok\n"), (503, "the server drains\n")).await;
}

#[tokio::test]
async fn a_dead_engine_is_neither() {
    let server = Server::start(Setup::default()).await;
    server.of.fault.store(FAIL_FOR_GOOD, Ordering::SeqCst);
    let mut messages = server.call(streaming(&[1], 5)).await;
    assert!(messages.next().await.unwrap().is_err());
    let started = Instant::now();
    while !matches!(server.of.frontend.state(), EngineState::Dead(_)) {
        assert!(started.elapsed() < PATIENCE);
        tokio::task::yield_now().await;
    }
    for path in ["/healthz", "/readyz"] {
        let answer = server.get(path).await;
        assert_eq!(answer.status, 503);
        assert!(answer.body.starts_with("the engine is dead: "), "{}", answer.body);
        assert!(answer.body.contains("burnt out"), "{}", answer.body);
    }
    assert_eq!(server.scrape().await.get("tandem_engine_state{state=\"dead\"}"), 1.0);
    let stats = server.get("/api/stats").await.json();
    assert_eq!(stats["state"], "dead");
    assert!(stats["reason"].as_str().unwrap().contains("burnt out"));
}

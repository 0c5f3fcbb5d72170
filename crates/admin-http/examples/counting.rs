//! The listener around an engine that counts up, for work on the page without a model.
#![expect(clippy::print_stdout, reason = "its result goes to standard output")]

use std::sync::Arc;
use std::time::Duration;

use admin_http::{HttpConfig, Metrics, Names, serve};
use serving::FrontendConfig;
use test_engine::{Setup, TestEngine};
use tokio::net::TcpListener;

#[tokio::main]
async fn main() -> std::io::Result<()> {
    let metrics = Arc::new(Metrics::new(Names::Vllm));
    let engine = TestEngine::start(Setup {
        tokenizer: true,
        index_topk: 64,
        step_time: Duration::from_millis(30),
        frontend: FrontendConfig { observer: metrics.clone(), ..FrontendConfig::default() },
        ..Setup::default()
    });
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    println!("http://{}", listener.local_addr()?);
    let stop = async { tokio::signal::ctrl_c().await.unwrap_or_default() };
    serve(listener, HttpConfig::default(), engine.frontend.clone(), metrics, stop).await;
    Ok(())
}

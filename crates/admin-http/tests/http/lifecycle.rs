//! Clients that leave, and the end of the listener.

use std::sync::atomic::Ordering;

use serde_json::json;
use serving::InferenceEngine as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::harness::*;

/// A completion that nothing but its client ends while a test lasts, past its first bytes.
async fn endless(server: &Server) -> TcpStream {
    let body = json!({ "prompt": "a", "max_tokens": 4000, "ignore_eos": true });
    let mut stream = server.send(&server.prompt(&body)).await;
    let mut first = [0; 1];
    timeout(PATIENCE, stream.read_exact(&mut first)).await.unwrap().unwrap();
    server.of.wait_until_unfinished(1).await;
    stream
}

fn texted() -> Setup {
    Setup { tokenizer: true, ..Setup::default() }
}

#[tokio::test]
async fn a_client_that_leaves_frees_its_request() {
    let server = Server::start(texted()).await;
    let stream = endless(&server).await;
    drop(stream);
    server.of.wait_until_empty().await;
    let scraped = server.scrape().await;
    assert_eq!(scraped.get("tandem_outputs_finished_total{reason=\"cancelled\"}"), 1.0);
}

#[tokio::test]
async fn a_client_that_leaves_a_silent_stream_frees_its_request() {
    let server = Server::start(texted()).await;
    server.of.fault.store(HOLD, Ordering::SeqCst);
    let body = json!({ "prompt": "a", "max_tokens": 4000, "ignore_eos": true });
    let stream = server.send(&server.prompt(&body)).await;
    server.of.wait_until_unfinished(1).await;
    drop(stream);
    let is_freed = async {
        let freed = "tandem_outputs_finished_total{reason=\"cancelled\"} 1\n";
        while !server.get("/metrics").await.body.contains(freed) {}
    };
    let is_freed = timeout(PATIENCE, is_freed).await.is_ok();
    // An engine that is held would not end with the test.
    server.of.fault.store(OK, Ordering::SeqCst);
    assert!(is_freed);
    server.of.wait_until_empty().await;
}

#[tokio::test]
async fn the_listener_ends_with_clients_that_do_not() {
    let server = Server::start(texted()).await;
    let mut running = endless(&server).await;
    let mut idle = TcpStream::connect(server.address).await.unwrap();
    idle.write_all(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n").await.unwrap();
    let mut buffer = vec![0; 12];
    timeout(PATIENCE, idle.read_exact(&mut buffer)).await.unwrap().unwrap();
    assert_eq!(buffer, b"HTTP/1.1 200");
    let Server { of, listener, .. } = server;
    let address = listener.address;
    listener.stop().await;
    assert!(TcpStream::connect(address).await.is_err());
    for stream in [&mut idle, &mut running] {
        // Ended or reset, but not kept.
        let _ = timeout(PATIENCE, stream.read_to_end(&mut buffer)).await.unwrap();
    }
    of.wait_until_empty().await;
    assert!(of.frontend.stats().unwrap().alive);
}

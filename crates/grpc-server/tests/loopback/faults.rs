//! Failed steps, a dead engine, and readers that do not read.

use std::sync::atomic::Ordering;
use std::time::Duration;

use serving::FrontendConfig;
use tonic::Code;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use crate::harness::{FAIL_FOR_GOOD, FAIL_STEP, PANIC, PATIENCE, Server, Setup, streaming, unary};

async fn health(server: &Server) -> ServingStatus {
    let mut client = HealthClient::new(server.channel.clone());
    let service = "tandem.inference.v1.InferenceService".to_owned();
    client.check(HealthCheckRequest { service }).await.unwrap().into_inner().status()
}

#[tokio::test]
async fn a_failed_step_fails_its_requests_only() {
    let server = Server::start(Setup::default()).await;
    server.fault.store(FAIL_STEP, Ordering::SeqCst);
    let status = server.client().generate(unary(&[1], 4)).await.unwrap_err();
    assert_eq!(status.code(), Code::Internal);
    assert!(status.message().contains("no luck"), "{}", status.message());
    server.check_serves().await;
    server.wait_until_empty().await;
    assert_eq!(health(&server).await, ServingStatus::Serving);
}

#[tokio::test]
async fn a_dead_engine_answers_everyone_and_shows() {
    for fault in [FAIL_FOR_GOOD, PANIC] {
        let setup = Setup { step_time: Duration::from_millis(10), ..Setup::default() };
        let server = Server::start(setup).await;
        let mut stream =
            server.client().generate_stream(streaming(&[1], 4000)).await.unwrap().into_inner();
        stream.message().await.unwrap();
        server.fault.store(fault, Ordering::SeqCst);
        let ended = async {
            loop {
                if let Err(status) = stream.message().await {
                    return status;
                }
            }
        };
        let status = tokio::time::timeout(PATIENCE, ended).await.unwrap();
        assert_eq!(status.code(), Code::Unavailable, "{status:?}");
        let status = server.client().generate(unary(&[1], 4)).await.unwrap_err();
        assert_eq!(status.code(), Code::Unavailable);
        assert!(status.message().contains("dead"), "{}", status.message());
        let shown = async {
            while health(&server).await != ServingStatus::NotServing {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(PATIENCE, shown).await.unwrap();
    }
}

#[tokio::test]
async fn a_slow_reader_loses_its_request_and_delays_nobody() {
    let frontend = FrontendConfig { max_buffered_steps: 4, ..FrontendConfig::default() };
    let mut setup = Setup { frontend, step_time: Duration::ZERO, ..Setup::default() };
    setup.limits.max_model_len = 400_000;
    setup.limits.num_blocks = 40_000;
    let server = Server::start(setup).await;
    let mut stream =
        server.client().generate_stream(streaming(&[1], 399_000)).await.unwrap().into_inner();
    // Unread, the stream fills the connection's window and then its buffer of four steps.
    let gone = async {
        while server.engine.stats().n_unfinished > 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, gone).await.unwrap();
    server.check_serves().await;
    let status = loop {
        match stream.message().await {
            Ok(Some(_)) => {}
            Ok(None) => panic!("the stream ended as if nothing had happened"),
            Err(status) => break status,
        }
    };
    assert_eq!(status.code(), Code::ResourceExhausted);
    assert!(status.message().contains("too slowly"), "{}", status.message());
}

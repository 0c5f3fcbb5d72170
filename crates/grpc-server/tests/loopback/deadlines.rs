//! Deadlines by `grpc-timeout`, on the wire: a client's library would look at the clock, too.

use std::sync::atomic::Ordering;

use grpc_api::inference::v1::GenerateStreamRequest;
use tonic::Code;
use tonic_types::StatusExt;

use crate::harness::{HOLD, OK, Raw, Server, Setup, streaming};

const METHODS: [&str; 2] = ["GenerateStream", "Generate"];

/// Both kinds of call, which have the same fields, end with DEADLINE_EXCEEDED.
async fn check(server: &Server, request: &GenerateStreamRequest, timeout: &str) {
    let raw = Raw::connect(server.address).await;
    for method in METHODS {
        let status = raw.call(method, &[("grpc-timeout", timeout)], request).await;
        assert_eq!(status.code(), Code::DeadlineExceeded, "{method}: {status:?}");
        assert_eq!(status.get_details_error_info().unwrap().reason, "DEADLINE_EXCEEDED");
    }
}

fn slow(max_num_seqs: u32) -> Setup {
    let mut setup = Setup { step_time: std::time::Duration::from_millis(10), ..Setup::default() };
    setup.limits.max_num_seqs = max_num_seqs;
    setup
}

#[tokio::test]
async fn hold_in_the_queue() {
    let server = Server::start(slow(1)).await;
    let running = server.client().generate_stream(streaming(&[1], 4000)).await.unwrap();
    server.wait_until_unfinished(1).await;
    check(&server, &streaming(&[2], 4000), "100m").await;
    server.wait_until_unfinished(1).await;
    drop(running);
    server.wait_until_empty().await;
}

#[tokio::test]
async fn hold_while_the_prompt_is_computed_and_while_tokens_are_generated() {
    let server = Server::start(slow(8)).await;
    check(&server, &streaming(&vec![7; 3000], 900), "100m").await;
    check(&server, &streaming(&[1], 4000), "200m").await;
    server.wait_until_empty().await;
    server.check_serves().await;
}

#[tokio::test]
async fn hold_while_a_step_does_not_end() {
    let server = Server::start(Setup::default()).await;
    server.fault.store(HOLD, Ordering::SeqCst);
    check(&server, &streaming(&[1], 4000), "100000u").await;
    server.fault.store(OK, Ordering::SeqCst);
    server.wait_until_empty().await;
    server.check_serves().await;
}

#[tokio::test]
async fn that_are_malformed_are_none() {
    let server = Server::start(Setup::default()).await;
    let raw = Raw::connect(server.address).await;
    for timeout in ["", "1", "S", "-1S", "1.5S", "123456789S", "1X"] {
        let headers = [("grpc-timeout", timeout)];
        let status = raw.call("Generate", &headers, &streaming(&[1], 4)).await;
        assert_eq!(status.code(), Code::Ok, "{timeout}: {status:?}");
    }
}

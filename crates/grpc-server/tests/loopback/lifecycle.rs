//! Fault case L22 and other ways a call ends early: the request is gone within 500 ms.

use std::time::Duration;

use engine_types::ExecutorLimits;
use grpc_api::inference::v1::generate_stream_response::Event;
use grpc_api::inference::v1::{AbortRequestRequest, FinishReason};
use tonic::{Code, Request};

use crate::harness::{Server, Setup, streaming, unary};

/// One request at a time, long steps, small chunks.
fn slow(max_num_seqs: u32) -> Setup {
    let setup = Setup { step_time: Duration::from_millis(10), ..Setup::default() };
    let limits = ExecutorLimits { max_num_seqs, ..setup.limits };
    Setup { limits, ..setup }
}

#[tokio::test]
async fn a_dropped_stream_is_gone_and_others_go_on() {
    let server = Server::start(slow(8)).await;
    let mut other = server.client();
    let other = tokio::spawn(async move { other.generate(unary(&[500], 150)).await });
    let mut stream =
        server.client().generate_stream(streaming(&[1], 4000)).await.unwrap().into_inner();
    let mut n_tokens = 0;
    while n_tokens < 3 {
        if let Some(Event::Delta(delta)) = stream.message().await.unwrap().unwrap().event {
            n_tokens += delta.token_ids.len();
        }
    }
    drop(stream);
    server.check_within_500_ms(1).await;
    let reply = other.await.unwrap().unwrap().into_inner();
    assert_eq!(reply.token_ids, (501..651).collect::<Vec<u32>>());
    server.check_empty_within_500_ms().await;
}

#[tokio::test]
async fn a_stream_dropped_while_queued_is_gone() {
    let server = Server::start(slow(1)).await;
    let mut running =
        server.client().generate_stream(streaming(&[1], 4000)).await.unwrap().into_inner();
    running.message().await.unwrap().unwrap();
    let queued = server.client().generate_stream(streaming(&[2], 4000)).await.unwrap().into_inner();
    server.check_within_500_ms(2).await;
    drop(queued);
    server.check_within_500_ms(1).await;
    assert!(running.message().await.unwrap().is_some());
    drop(running);
    server.check_empty_within_500_ms().await;
}

#[tokio::test]
async fn a_stream_dropped_during_its_prefill_is_gone() {
    let server = Server::start(slow(8)).await;
    // 3,000 tokens in chunks of 64 and 10 ms: half a second of prefill.
    let prompt = vec![7; 3000];
    let stream =
        server.client().generate_stream(streaming(&prompt, 900)).await.unwrap().into_inner();
    while server.engine.stats().scheduler.blocks.n_used < 8 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    drop(stream);
    server.check_empty_within_500_ms().await;
    assert_eq!(server.engine.stats().scheduler.n_generated_tokens, 0);
}

#[tokio::test]
async fn a_dropped_unary_call_is_gone() {
    let server = Server::start(slow(1)).await;
    for n_calls in [1, 2] {
        let calls: Vec<_> = (0..n_calls)
            .map(|_| {
                let mut client = server.client();
                tokio::spawn(async move { client.generate(unary(&[1], 4000)).await })
            })
            .collect();
        server.check_within_500_ms(n_calls).await;
        calls.iter().for_each(tokio::task::JoinHandle::abort);
        server.check_empty_within_500_ms().await;
    }
}

#[tokio::test]
async fn abort_ends_a_stream_in_order_and_knows_no_strangers() {
    let server = Server::start(slow(8)).await;
    let mut client = server.client();
    let mut stream = client.generate_stream(streaming(&[1], 4000)).await.unwrap().into_inner();
    let request_id = stream.message().await.unwrap().unwrap().request_id;
    client.abort_request(AbortRequestRequest { request_id }).await.unwrap();
    let mut reason = None;
    while let Some(message) = stream.message().await.unwrap() {
        if let Some(Event::Finished(finished)) = message.event {
            reason = Some(finished.finish_reason());
        }
    }
    assert_eq!(reason, Some(FinishReason::Aborted));
    for request_id in [request_id, 999_999] {
        let status = client.abort_request(AbortRequestRequest { request_id }).await.unwrap_err();
        assert_eq!(status.code(), Code::NotFound);
    }
    server.check_serves().await;
    server.check_empty_within_500_ms().await;
}

#[tokio::test]
async fn deadlines_hold_in_the_middle_of_a_stream_and_of_a_call() {
    let server = Server::start(slow(8)).await;
    let with_timeout = |metadata: &mut tonic::metadata::MetadataMap| {
        metadata.insert("grpc-timeout", "200m".parse().unwrap());
    };
    let mut request = Request::new(streaming(&[1], 4000));
    with_timeout(request.metadata_mut());
    let mut stream = server.client().generate_stream(request).await.unwrap().into_inner();
    let mut n_messages = 0;
    let status = loop {
        match stream.message().await {
            Ok(message) => n_messages += usize::from(message.is_some()),
            Err(status) => break status,
        }
    };
    assert!(n_messages > 3);
    assert_eq!(status.code(), Code::DeadlineExceeded);
    server.check_empty_within_500_ms().await;

    let mut request = Request::new(unary(&[1], 4000));
    with_timeout(request.metadata_mut());
    let status = server.client().generate(request).await.unwrap_err();
    assert_eq!(status.code(), Code::DeadlineExceeded, "{status:?}");
    server.check_empty_within_500_ms().await;
}

#[tokio::test]
async fn draining_finishes_what_runs_and_refuses_the_rest() {
    let mut server = Server::start(slow(8)).await;
    let mut client = server.client();
    let mut stream = client.generate_stream(streaming(&[1], 60)).await.unwrap().into_inner();
    stream.message().await.unwrap().unwrap();
    server.stop.take().unwrap().send(()).unwrap();
    tokio::time::sleep(Duration::from_millis(50)).await;
    let status = client.generate(unary(&[1], 4)).await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable, "{status:?}");
    let mut reason = None;
    while let Some(message) = stream.message().await.unwrap() {
        if let Some(Event::Finished(finished)) = message.event {
            reason = Some(finished.finish_reason());
        }
    }
    assert_eq!(reason, Some(FinishReason::MaxTokens));
    drop((stream, client));
    tokio::time::timeout(Duration::from_secs(5), server.serving).await.unwrap().unwrap();
}

//! Fault case L22 and other ways a call ends early: the request is gone, and soon.

use std::time::Duration;

use engine_types::ExecutorLimits;
use grpc_api::inference::v1::generate_stream_response::Event;
use grpc_api::inference::v1::{AbortRequestRequest, FinishReason, GenerateStreamResponse};
use tonic::{Code, Request, Streaming};

use crate::harness::{PATIENCE, Server, Setup, streaming, unary};

/// Long steps: a request of 4,000 tokens runs for more than ten seconds.
fn slow(max_num_seqs: u32) -> Setup {
    let setup = Setup { step_time: Duration::from_millis(10), ..Setup::default() };
    let limits = ExecutorLimits { max_num_seqs, ..setup.limits };
    Setup { limits, ..setup }
}

#[tokio::test]
async fn a_dropped_stream_is_gone_and_others_go_on() {
    let server = Server::start(slow(8)).await;
    let start = |prompt| {
        let mut client = server.client();
        async move { client.generate_stream(streaming(&[prompt], 4000)).await }
    };
    let mut other = start(500).await.unwrap().into_inner();
    let mut other_tokens = vec![];
    let mut times = vec![];
    for round in 1..=5 {
        let mut stream = start(round).await.unwrap().into_inner();
        read_tokens(&mut stream, 3).await;
        drop(stream);
        times.push(server.wait_until_unfinished(1).await);
        other_tokens.extend(read_tokens(&mut other, 20).await);
    }
    // A machine under load may be slow once, but not five times.
    let fastest = times.iter().min().unwrap();
    assert!(*fastest < Duration::from_millis(500), "{times:?}");
    let n_tokens = u32::try_from(other_tokens.len()).unwrap();
    assert_eq!(other_tokens, (501..501 + n_tokens).collect::<Vec<u32>>());
    drop(other);
    server.wait_until_empty().await;
}

/// At least the next `n_tokens` of a stream that goes on.
async fn read_tokens(stream: &mut Streaming<GenerateStreamResponse>, n_tokens: usize) -> Vec<u32> {
    let mut tokens = vec![];
    while tokens.len() < n_tokens {
        match stream.message().await.unwrap().unwrap().event.unwrap() {
            Event::Delta(delta) => tokens.extend(delta.token_ids),
            other => panic!("{other:?}"),
        }
    }
    tokens
}

#[tokio::test]
async fn a_stream_dropped_while_queued_is_gone() {
    let server = Server::start(slow(1)).await;
    let mut running =
        server.client().generate_stream(streaming(&[1], 4000)).await.unwrap().into_inner();
    running.message().await.unwrap().unwrap();
    let queued = server.client().generate_stream(streaming(&[2], 4000)).await.unwrap().into_inner();
    server.wait_until_unfinished(2).await;
    drop(queued);
    server.wait_until_unfinished(1).await;
    assert!(running.message().await.unwrap().is_some());
    drop(running);
    server.wait_until_empty().await;
}

#[tokio::test]
async fn a_stream_dropped_during_its_prefill_is_gone() {
    // 3,000 tokens in chunks of 64 and 50 ms: more than two seconds of prefill.
    let step_time = Duration::from_millis(50);
    let server = Server::start(Setup { step_time, ..Setup::default() }).await;
    let prompt = vec![7; 3000];
    let stream =
        server.client().generate_stream(streaming(&prompt, 900)).await.unwrap().into_inner();
    while server.engine.stats().scheduler.blocks.n_used < 8 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    drop(stream);
    server.wait_until_empty().await;
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
        server.wait_until_unfinished(n_calls).await;
        calls.iter().for_each(tokio::task::JoinHandle::abort);
        server.wait_until_empty().await;
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
    server.wait_until_empty().await;
}

#[tokio::test]
async fn deadlines_hold_in_the_middle_of_a_stream_and_of_a_call() {
    let server = Server::start(slow(8)).await;
    let with_timeout = |metadata: &mut tonic::metadata::MetadataMap| {
        metadata.insert("grpc-timeout", "1S".parse().unwrap());
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
    server.wait_until_empty().await;

    let mut request = Request::new(unary(&[1], 4000));
    with_timeout(request.metadata_mut());
    let status = server.client().generate(request).await.unwrap_err();
    // The client's library looks at the clock, too; where it is first, it says `Cancelled`.
    let is_over = matches!(status.code(), Code::DeadlineExceeded | Code::Cancelled);
    assert!(is_over, "{status:?}");
    server.wait_until_empty().await;
}

#[tokio::test]
async fn draining_finishes_what_runs_and_refuses_the_rest() {
    let mut server = Server::start(slow(8)).await;
    let mut client = server.client();
    let mut stream = client.generate_stream(streaming(&[1], 600)).await.unwrap().into_inner();
    stream.message().await.unwrap().unwrap();
    server.stop.take().unwrap().send(()).unwrap();
    while !server.engine.stats().is_draining {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
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
    tokio::time::timeout(PATIENCE, server.serving).await.unwrap().unwrap();
}

//! Requests that end early, by `Abort` or because their caller leaves.

use std::time::Duration;

use test_engine::Setup;
use tonic::{Code, Streaming};
use vllm_proto::finish_info::FinishReason;
use vllm_proto::{AbortRequest, GenerateResponse, StoppingCriteria};

use crate::harness::{Server, end_of, named, request};

/// A model that runs one request at a time, 4,000 tokens for seconds.
async fn slow() -> Server {
    let mut setup = Setup { step_time: Duration::from_millis(10), ..Setup::default() };
    setup.limits.max_num_seqs = 1;
    Server::start(setup).await
}

async fn abort(server: &Server, names: &[&str]) {
    let request_ids = names.iter().map(|name| (*name).to_owned()).collect();
    server.control().abort(AbortRequest { request_ids }).await.unwrap();
}

async fn start(server: &Server, name: &str) -> Streaming<GenerateResponse> {
    let request = named(name, request(&[1], 4000));
    server.inference().generate_stream(request).await.unwrap().into_inner()
}

/// Reads a stream to its end, which must say that it was aborted, and returns its tokens.
async fn aborted(mut stream: Streaming<GenerateResponse>) -> u32 {
    let mut n_tokens = 0;
    while let Some(message) = stream.message().await.unwrap() {
        let output = message.outputs.unwrap();
        n_tokens += output.num_tokens;
        if output.finish_info.is_some() {
            assert_eq!(end_of(&output).finish_reason(), FinishReason::Aborted);
            assert_eq!(end_of(&output).num_output_tokens, n_tokens);
            assert!(stream.message().await.unwrap().is_none());
            return n_tokens;
        }
    }
    panic!("it ended without an end");
}

#[tokio::test]
async fn an_abort_ends_running_and_queued_requests() {
    let server = slow().await;
    let mut running = start(&server, "running").await;
    let first = running.message().await.unwrap().unwrap();
    assert!(first.prompt_info.is_some());
    let queued = start(&server, "queued").await;
    let other = start(&server, "other").await;
    server.of.wait_until_unfinished(3).await;
    abort(&server, &["queued", "unknown"]).await;
    assert_eq!(aborted(queued).await, 0);
    server.of.wait_until_unfinished(2).await;
    abort(&server, &["other", "running"]).await;
    assert_eq!(aborted(other).await, 0);
    // Its first tokens were read above.
    let mut n_tokens = first.outputs.unwrap().num_tokens;
    while let Some(message) = running.message().await.unwrap() {
        let output = message.outputs.unwrap();
        n_tokens += output.num_tokens;
        if output.finish_info.is_some() {
            assert_eq!(end_of(&output).num_output_tokens, n_tokens);
        }
    }
    server.of.wait_until_empty().await;
    abort(&server, &[]).await;
}

#[tokio::test]
async fn an_abort_ends_all_outputs_and_unary_calls() {
    let server = slow().await;
    let mut several = named("several", request(&[1], 4000));
    several.sampling.get_or_insert_default().num_sequences = 3;
    let mut stream = server.inference().generate_stream(several).await.unwrap().into_inner();
    server.of.wait_until_unfinished(3).await;
    abort(&server, &["several"]).await;
    let mut ended = vec![];
    while let Some(message) = stream.message().await.unwrap() {
        let output = message.outputs.unwrap();
        ended.extend(output.finish_info.map(|_| output.index));
    }
    assert_eq!(ended, [0, 1, 2]);

    let mut client = server.inference();
    let request = named("unary", request(&[1], 4000));
    let unary = tokio::spawn(async move { client.generate(request).await });
    server.of.wait_until_unfinished(1).await;
    abort(&server, &["unary"]).await;
    let output = unary.await.unwrap().unwrap().into_inner().outputs.unwrap();
    assert_eq!(end_of(&output).finish_reason(), FinishReason::Aborted);
    assert_eq!(end_of(&output).num_output_tokens, output.num_tokens);
    server.of.wait_until_empty().await;
}

#[tokio::test]
async fn a_caller_that_leaves_frees_its_request_and_its_name() {
    let server = slow().await;
    let mut running = start(&server, "running").await;
    running.message().await.unwrap().unwrap();
    let queued = start(&server, "queued").await;
    server.of.wait_until_unfinished(2).await;
    let duplicate = server.stream(named("queued", request(&[1], 1))).await.unwrap_err();
    assert_eq!(duplicate.code(), Code::AlreadyExists);
    drop(queued);
    server.of.wait_until_unfinished(1).await;
    drop(running);
    server.of.wait_until_empty().await;
    let mut client = server.inference();
    let unary = tokio::spawn(async move { client.generate(request(&[1], 4000)).await });
    server.of.wait_until_unfinished(1).await;
    unary.abort();
    server.of.wait_until_empty().await;
    // What gateways do behind a reset.
    abort(&server, &["running", "queued"]).await;
    let output = server.stream(named("running", request(&[1], 1))).await.unwrap();
    assert_eq!(output.last().unwrap().outputs.as_ref().unwrap().num_tokens, 0);
}

#[tokio::test]
async fn a_name_is_free_as_soon_as_its_answer_is_there() {
    let server = Server::start(Setup::default()).await;
    for _ in 0..50 {
        let unary = server.inference().generate(named("a", request(&[1], 2))).await;
        assert_eq!(unary.unwrap().into_inner().outputs.unwrap().token_ids, [2, 3]);
        assert!(server.stream(named("a", request(&[1], 2))).await.is_ok());
        let mut wrong = named("a", request(&[1], 2));
        wrong.stopping =
            Some(StoppingCriteria { stop_token_ids: vec![u32::MAX], ..Default::default() });
        assert_eq!(server.stream(wrong).await.unwrap_err().code(), Code::InvalidArgument);
    }
}

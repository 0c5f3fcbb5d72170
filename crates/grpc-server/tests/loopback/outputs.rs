//! Several outputs of one request.

use std::collections::HashSet;
use std::sync::atomic::Ordering;
use std::time::Duration;

use engine_types::ExecutorLimits;
use grpc_api::inference::v1::generate_stream_response::Event;
use grpc_api::inference::v1::{
    AbortRequestRequest, FinishReason, GenerateRequest, GenerateStreamRequest, GeneratedOutput,
    SamplingParams,
};
use tonic::{Code, Streaming};

use crate::harness::{HOLD, OK, Server, Setup, streaming, unary};
use test_engine::Script;

const N_VOCAB: u32 = 16;

/// Every token is as likely as any other; id 15 ends an output.
async fn server(max_num_seqs: u32, step_time: Duration) -> Server {
    let script = Script::new(|_| vec![0.0; N_VOCAB as usize], |_| 3);
    let setup = Setup { script: Some(script), step_time, ..Setup::default() };
    let limits = ExecutorLimits { vocab_size: N_VOCAB, max_num_seqs, ..setup.limits };
    Server::start(Setup { limits, ..setup }).await
}

fn sampling(n: u32, seed: Option<u64>) -> Option<SamplingParams> {
    Some(SamplingParams { n: Some(n), temperature: Some(1.0), seed, ..SamplingParams::default() })
}

fn unary_n(n: u32, seed: Option<u64>, max_tokens: u32) -> GenerateRequest {
    let mut request = unary(&[1, 2, 3], max_tokens);
    request.sampling = sampling(n, seed);
    request.stopping.as_mut().unwrap().stop_token_ids = vec![15];
    request
}

fn streaming_n(n: u32, seed: Option<u64>, max_tokens: u32) -> GenerateStreamRequest {
    let mut request = streaming(&[1, 2, 3], max_tokens);
    request.sampling = sampling(n, seed);
    request.stopping.as_mut().unwrap().stop_token_ids = vec![15];
    request
}

async fn outputs(server: &Server, request: GenerateRequest) -> Vec<GeneratedOutput> {
    server.client().generate(request).await.unwrap().into_inner().outputs
}

fn token_ids(outputs: &[GeneratedOutput]) -> Vec<Vec<u32>> {
    outputs.iter().map(|output| output.token_ids.clone()).collect()
}

/// Case L24: copies with a seed differ from each other and not from run to run.
#[tokio::test]
async fn outputs_differ_end_by_themselves_and_are_reproducible() {
    let server = server(8, Duration::ZERO).await;
    let two = outputs(&server, unary_n(2, Some(7), 100)).await;
    assert_eq!(two.len(), 2);
    assert_ne!(two[0].token_ids, two[1].token_ids);
    let again = outputs(&server, unary_n(2, Some(7), 100)).await;
    assert_eq!(token_ids(&again), token_ids(&two));
    let three = outputs(&server, unary_n(3, Some(7), 100)).await;
    assert_eq!(token_ids(&three)[..2], token_ids(&two));
    let other_seed = outputs(&server, unary_n(2, Some(8), 100)).await;
    assert_ne!(token_ids(&other_seed), token_ids(&two));
    let lengths: HashSet<usize> = three.iter().map(|output| output.token_ids.len()).collect();
    assert!(lengths.len() > 1, "each ends by itself");
    for output in &three {
        let usage = output.usage.unwrap();
        assert_eq!(usage.prompt_tokens, 3);
        assert_eq!(usage.completion_tokens as usize, output.token_ids.len());
        assert_eq!(output.finish_reason(), FinishReason::StopToken);
        assert_eq!(output.token_ids.last(), Some(&15));
    }
    let unseeded = outputs(&server, unary_n(2, None, 100)).await;
    assert_ne!(unseeded[0].token_ids, unseeded[1].token_ids);
    // Greedy copies are the same.
    let mut greedy = unary_n(2, None, 5);
    greedy.sampling.as_mut().unwrap().temperature = None;
    let greedy = outputs(&server, greedy).await;
    assert_eq!(token_ids(&greedy), [[0; 5], [0; 5]]);
    server.wait_until_empty().await;
}

#[tokio::test]
async fn a_stream_tells_outputs_apart_and_says_what_a_reply_says() {
    let server = server(8, Duration::ZERO).await;
    let reply = outputs(&server, unary_n(3, Some(7), 100)).await;
    let request = streaming_n(3, Some(7), 100);
    let mut stream = server.client().generate_stream(request).await.unwrap().into_inner();
    let mut streamed = vec![vec![]; 3];
    let mut ids = [None; 3];
    let mut ends = [None; 3];
    while let Some(message) = stream.message().await.unwrap() {
        let index = message.index as usize;
        assert_eq!(*ids[index].get_or_insert(message.request_id), message.request_id);
        assert!(ends[index].is_none(), "nothing follows the end of an output");
        match message.event.unwrap() {
            Event::Delta(delta) => streamed[index].extend(delta.token_ids),
            Event::Finished(finished) => ends[index] = finished.usage,
            other @ Event::PromptLogprobs(_) => panic!("{other:?}"),
        }
    }
    assert_eq!(streamed, token_ids(&reply));
    assert_eq!(ends.to_vec(), reply.iter().map(|output| output.usage).collect::<Vec<_>>());
    assert_eq!(ids.iter().flatten().collect::<HashSet<_>>().len(), 3, "each has its own id");
}

/// Reads until each of the `n` outputs has said something; returns their ids.
async fn first_ids<M>(
    stream: &mut Streaming<M>,
    n: usize,
    of: impl Fn(M) -> (u32, u64),
) -> Vec<u64> {
    let mut ids = vec![None; n];
    while ids.iter().any(Option::is_none) {
        let (index, id) = of(stream.message().await.unwrap().unwrap());
        ids[index as usize] = Some(id);
    }
    ids.into_iter().flatten().collect()
}

#[tokio::test]
async fn all_outputs_end_when_the_client_leaves() {
    // With room for one, two outputs wait.
    for max_num_seqs in [8, 1] {
        let server = server(max_num_seqs, Duration::from_millis(10)).await;
        let mut request = streaming_n(3, Some(7), 4000);
        request.stopping.as_mut().unwrap().stop_token_ids.clear();
        let mut stream = server.client().generate_stream(request).await.unwrap().into_inner();
        stream.message().await.unwrap().unwrap();
        server.wait_until_unfinished(3).await;
        drop(stream);
        server.wait_until_empty().await;

        let mut request = unary_n(3, Some(7), 4000);
        request.stopping.as_mut().unwrap().stop_token_ids.clear();
        let mut client = server.client();
        let call = tokio::spawn(async move { client.generate(request).await });
        server.wait_until_unfinished(3).await;
        call.abort();
        server.wait_until_empty().await;
    }
}

#[tokio::test]
async fn one_output_can_be_ended_alone() {
    let server = server(8, Duration::from_millis(10)).await;
    let mut request = streaming_n(2, Some(7), 200);
    request.stopping.as_mut().unwrap().stop_token_ids.clear();
    let mut client = server.client();
    let mut stream = client.generate_stream(request).await.unwrap().into_inner();
    let ids = first_ids(&mut stream, 2, |message| (message.index, message.request_id)).await;
    client.abort_request(AbortRequestRequest { request_id: ids[0] }).await.unwrap();
    let mut ends = vec![];
    while let Some(message) = stream.message().await.unwrap() {
        if let Some(Event::Finished(finished)) = message.event {
            ends.push((message.index, finished.finish_reason()));
        }
    }
    assert_eq!(ends, [(0, FinishReason::Aborted), (1, FinishReason::MaxTokens)]);
}

#[tokio::test]
async fn each_output_counts_in_the_queue() {
    // One may run and 16 may wait.
    let server = server(1, Duration::ZERO).await;
    server.fault.store(HOLD, Ordering::SeqCst);
    let mut client = server.client();
    // These never fit, however long one waits.
    let status = client.generate(unary_n(18, Some(1), 4)).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument, "{status:?}");
    assert!(status.message().contains("sampling.n: 18 outputs"), "{status:?}");
    let all = tokio::spawn(async move { client.generate(unary_n(17, Some(1), 4)).await });
    while server.engine.stats().n_unfinished < 17 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let status = server.client().generate(unary(&[1], 4)).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted, "{status:?}");
    server.fault.store(OK, Ordering::SeqCst);
    assert_eq!(all.await.unwrap().unwrap().into_inner().outputs.len(), 17);
    server.wait_until_empty().await;
}

#[tokio::test]
async fn a_request_that_waits_too_long_says_so() {
    let setup = Setup {
        max_queue_wait: Some(Duration::from_millis(100)),
        step_time: Duration::from_millis(10),
        ..Setup::default()
    };
    let limits = ExecutorLimits { max_num_seqs: 1, ..setup.limits };
    let server = Server::start(Setup { limits, ..setup }).await;
    let running = server.client().generate_stream(streaming(&[1], 4000)).await.unwrap();
    let status = server.client().generate(unary(&[1], 4)).await.unwrap_err();
    assert_eq!(status.code(), Code::DeadlineExceeded, "{status:?}");
    assert!(status.message().contains("waited longer"), "{}", status.message());
    drop(running);
    server.wait_until_empty().await;
    server.check_serves().await;
}

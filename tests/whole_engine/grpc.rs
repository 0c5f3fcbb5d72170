//! Each bundled checkpoint behind the real gRPC port on loopback.

use std::time::{Duration, Instant};

use grpc_api::control::v1::GetStatsResponse;
use grpc_api::inference::v1::generate_stream_request::Prompt;
use grpc_api::inference::v1::generate_stream_response::Event;
use grpc_api::inference::v1::{
    FinishReason, GenerateStreamRequest, GenerateStreamResponse, GenerationFinished,
    SpeculationParams, StoppingParams, TokenDelta, TokenIds,
};
use integration_tests::oracle::{Case, Checkpoint};
use integration_tests::server::Server;
use model_runner::RunnerOptions;
use models::ComputeDtype;
use spec_decode::IndexShare;
use tonic::Streaming;

async fn start(checkpoint: Checkpoint) -> Server {
    let options = RunnerOptions { num_speculative_tokens: 3, ..RunnerOptions::default() };
    Server::start(checkpoint, ComputeDtype::Float32, &options).await.unwrap()
}

/// Asks until `is_met`; a machine under load may take long.
async fn wait_for(server: &Server, is_met: impl Fn(&GetStatsResponse) -> bool) -> GetStatsResponse {
    let started = Instant::now();
    loop {
        let stats = server.stats().await.unwrap();
        if is_met(&stats) {
            return stats;
        }
        assert!(started.elapsed() < Duration::from_secs(30), "{stats:?}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

fn is_empty(stats: &GetStatsResponse) -> bool {
    (stats.running_requests, stats.waiting_requests, stats.used_blocks) == (0, 0, 0)
}

fn ids(case: &Case) -> Prompt {
    Prompt::TokenIds(TokenIds { ids: case.prompt_ids.clone() })
}

fn request(prompt: Prompt, max_tokens: u32, k: u32) -> GenerateStreamRequest {
    GenerateStreamRequest {
        prompt: Some(prompt),
        stopping: Some(StoppingParams {
            max_tokens: Some(max_tokens),
            ..StoppingParams::default()
        }),
        speculation: Some(SpeculationParams { num_speculative_tokens: Some(k) }),
        ..GenerateStreamRequest::default()
    }
}

/// Reads a stream to its end: deltas, then exactly one last message.
async fn read(
    mut stream: Streaming<GenerateStreamResponse>,
) -> (Vec<TokenDelta>, GenerationFinished) {
    let mut deltas = vec![];
    while let Some(message) = stream.message().await.unwrap() {
        match message.event.unwrap() {
            Event::Delta(delta) => deltas.push(delta),
            Event::Finished(finished) => {
                assert_eq!(stream.message().await.unwrap(), None);
                return (deltas, finished);
            }
            Event::PromptLogprobs(_) => panic!("nobody asked for them"),
        }
    }
    panic!("the stream ends without its last message")
}

/// Compares a stream with the reference, and its last message with its deltas.
fn check(case: &Case, deltas: &[TokenDelta], finished: &GenerationFinished) {
    let name = &case.name;
    let token_ids: Vec<u32> = deltas.iter().flat_map(|delta| delta.token_ids.clone()).collect();
    let text: String = deltas.iter().flat_map(|delta| delta.text_pieces.clone()).collect();
    assert_eq!(token_ids, case.greedy_ids, "{name}");
    assert_eq!(text + &finished.tail_text, case.greedy_text, "{name}");

    let usage = finished.usage.unwrap();
    assert_eq!(usage.prompt_tokens as usize, case.prompt_ids.len(), "{name}");
    assert_eq!(usage.completion_tokens as usize, token_ids.len(), "{name}");
    let verified = || deltas.iter().filter(|delta| !delta.draft_token_ids.is_empty());
    let n_accepted: u32 = verified().map(|delta| delta.n_accepted).sum();
    let n_drafts: usize = verified().map(|delta| delta.draft_token_ids.len()).sum();
    let stats = finished.speculation.clone().unwrap();
    assert_eq!(stats.verify_steps, verified().count() as u64, "{name}");
    assert_eq!(stats.accepted_tokens, u64::from(n_accepted), "{name}");
    assert_eq!(stats.draft_tokens, n_drafts as u64, "{name}");
    assert_eq!(stats.accepted_per_position.iter().sum::<u64>(), stats.accepted_tokens, "{name}");
    assert_eq!(stats.accepted_histogram.iter().sum::<u64>(), stats.verify_steps, "{name}");
}

on_both!(async a_stream_is_the_reference_text_step_by_step);

async fn a_stream_is_the_reference_text_step_by_step(checkpoint: Checkpoint) {
    let server = start(checkpoint).await;
    for case in checkpoint.cases().unwrap() {
        let stream = server.stream(request(ids(&case), case.max_tokens(), 3)).await.unwrap();
        let (deltas, finished) = read(stream).await;
        check(&case, &deltas, &finished);
        for delta in &deltas {
            let n_accepted = delta.n_accepted as usize;
            assert_eq!(delta.token_ids.len(), n_accepted + 1, "one step: {delta:?}");
            assert_eq!(delta.token_ids[..n_accepted], delta.draft_token_ids[..n_accepted]);
            assert_eq!(delta.text_pieces.len(), delta.token_ids.len());
        }
        // One step reads the prompt; each other one verifies the drafts of the step before.
        let n_verify_steps = case.speculation(3, IndexShare::Auto).unwrap().accepted_per_step.len();
        assert_eq!(deltas.len(), 1 + n_verify_steps, "{}", case.name);
        assert_eq!(deltas[0].draft_token_ids, [0; 0]);
        assert_eq!(deltas[1].draft_token_ids, case.first_drafts(IndexShare::Auto), "{}", case.name);
        let reason = match case.greedy_ids.len() < case.max_tokens() as usize {
            true => FinishReason::Eos,
            false => FinishReason::MaxTokens,
        };
        assert_eq!(finished.finish_reason(), reason, "{}", case.name);
    }
    let stats = wait_for(&server, is_empty).await;
    check_indexer(checkpoint, &stats);
}

/// The first draft step ran an indexer after each step but the last of each request; the later
/// ones shared its selection.
fn check_indexer(checkpoint: Checkpoint, stats: &GetStatsResponse) {
    if checkpoint == Checkpoint::TinyDsv3 {
        assert_eq!(stats.indexer, None, "attention is dense");
        return;
    }
    let indexer = stats.indexer.clone().unwrap();
    let n_launches: Vec<u64> = indexer.draft_steps.iter().map(|step| step.launches).collect();
    let n_steps = stats.steps;
    assert!((n_steps - 14..=n_steps).contains(&n_launches[0]), "{n_launches:?}, {n_steps} steps");
    assert_eq!(n_launches[1..], [0, 0]);
}

on_both!(async text_and_ids_get_the_same_stream_at_the_same_time);

async fn text_and_ids_get_the_same_stream_at_the_same_time(checkpoint: Checkpoint) {
    let server = start(checkpoint).await;
    let cases = checkpoint.cases().unwrap();
    for case in &cases[..6] {
        let text = server.stream(request(Prompt::Text(case.prompt.clone()), 48, 3)).await.unwrap();
        let by_ids = server.stream(request(ids(case), 48, 3)).await.unwrap();
        let (by_text, by_ids) = tokio::join!(read(text), read(by_ids));
        check(case, &by_text.0, &by_text.1);
        assert_eq!(by_text, by_ids, "{}", case.name);
    }
    let without_drafts = read(server.stream(request(ids(&cases[0]), 48, 0)).await.unwrap()).await;
    check(&cases[0], &without_drafts.0, &without_drafts.1);
    assert_eq!(without_drafts.0.len(), 48, "one token a step");
}

on_both!(async a_client_that_leaves_frees_its_request_and_its_blocks);

async fn a_client_that_leaves_frees_its_request_and_its_blocks(checkpoint: Checkpoint) {
    let server = start(checkpoint).await;
    let cases = checkpoint.cases().unwrap();
    let mut endless = request(ids(&cases[0]), 4000, 3);
    endless.stopping.as_mut().unwrap().ignore_eos = Some(true);
    let mut stream = server.stream(endless).await.unwrap();
    for _ in 0..3 {
        stream.message().await.unwrap().unwrap();
    }
    let stats = server.stats().await.unwrap();
    assert!(stats.running_requests == 1 && stats.used_blocks > 0, "{stats:?}");
    drop(stream);
    let stats = wait_for(&server, is_empty).await;
    // `tiny-glm52` would end it at 2048 tokens with the prompt.
    assert!(stats.alive && stats.completion_tokens < 2000, "{stats:?}");

    let (deltas, finished) =
        read(server.stream(request(ids(&cases[1]), 48, 3)).await.unwrap()).await;
    check(&cases[1], &deltas, &finished);
}

//! What a request asks of the choice of its tokens: it reaches the executor as asked, and one entry
//! for each token comes back. Fault cases L03 and L05.

use std::collections::HashMap;

use engine_types::{ExecutorLimits, Sampler, SamplingParams};
use grpc_api::inference::v1 as pb;
use grpc_api::inference::v1::generate_stream_response::Event;
use grpc_api::inference::v1::{FinishReason, GenerateRequest, SpeculationParams, StoppingParams};

use crate::harness::{Server, Setup, streaming, unary};
use test_engine::Script;

/// A server around a script for a small vocabulary, whose prompts are computed in chunks of 4.
async fn server(vocab_size: u32, script: Script) -> Server {
    let setup = Setup { script: Some(script), ..Setup::default() };
    let limits = ExecutorLimits { vocab_size, max_num_batched_tokens: 4, ..setup.limits };
    Server::start(Setup { limits, ..setup }).await
}

fn request(prompt: &[u32], sampling: pb::SamplingParams, max_tokens: u32) -> GenerateRequest {
    GenerateRequest { sampling: Some(sampling), ..unary(prompt, max_tokens) }
}

fn without_drafts(request: GenerateRequest) -> GenerateRequest {
    let speculation = Some(SpeculationParams { num_speculative_tokens: Some(0) });
    GenerateRequest { speculation, ..request }
}

#[tokio::test]
async fn every_parameter_reaches_the_executor() {
    let script = Script::fixed(40, 2, &[3]);
    let seen = std::sync::Arc::clone(&script.seen);
    let server = server(40, script).await;
    let sampling = pb::SamplingParams {
        temperature: Some(0.75),
        top_p: Some(0.5),
        top_k: Some(11),
        seed: Some(u64::MAX),
        n: Some(1),
        logit_bias: HashMap::from([(9, -1.5), (3, 50.0)]),
        min_p: Some(0.125),
        presence_penalty: Some(-1.0),
        frequency_penalty: Some(0.25),
        repetition_penalty: Some(1.25),
        bad_words: vec![pb::TokenIds { ids: vec![5, 6] }],
        allowed_token_ids: Some(pb::TokenIds { ids: vec![3, 9] }),
        logprobs: Some(4),
        prompt_logprobs: Some(0),
    };
    let stopping = StoppingParams {
        max_tokens: Some(3),
        ignore_eos: Some(true),
        stop_token_ids: vec![39],
        stop_sequences: vec![pb::TokenIds { ids: vec![1, 2] }],
        min_tokens: Some(2),
        ..StoppingParams::default()
    };
    let request = GenerateRequest {
        sampling: Some(sampling),
        stopping: Some(stopping),
        speculation: Some(SpeculationParams { num_speculative_tokens: Some(2) }),
        ..unary(&[1, 2], 1)
    };
    server.generate(request).await;
    let params = SamplingParams {
        max_tokens: 3,
        min_tokens: 2,
        ignore_eos: true,
        stop_token_ids: vec![39],
        stop_sequences: vec![vec![1, 2]],
        num_speculative_tokens: Some(2),
        temperature: 0.75,
        top_k: 11,
        top_p: 0.5,
        min_p: 0.125,
        presence_penalty: -1.0,
        frequency_penalty: 0.25,
        repetition_penalty: 1.25,
        logit_bias: vec![(3, 50.0), (9, -1.5)],
        allowed_token_ids: Some(vec![3, 9]),
        bad_words: vec![vec![5, 6]],
        seed: Some(u64::MAX),
        logprobs: Some(4),
        prompt_logprobs: Some(0),
    };
    let sampler = Sampler { params, seed: u64::MAX, n_prompt: 2, end_token_ids: vec![39] };
    assert_eq!(*seen.lock().unwrap(), [sampler]);
}

#[tokio::test]
async fn sampled_requests_without_a_seed_get_another_one_each() {
    let script = Script::fixed(8, 1, &[3]);
    let seen = std::sync::Arc::clone(&script.seen);
    let server = server(8, script).await;
    let sampled = pb::SamplingParams { temperature: Some(1.0), ..Default::default() };
    for _ in 0..3 {
        server.generate(request(&[1], sampled.clone(), 2)).await;
    }
    let mut seeds: Vec<u64> = seen.lock().unwrap().iter().map(|sampler| sampler.seed).collect();
    seeds.sort_unstable();
    seeds.dedup();
    assert_eq!(seeds.len(), 3);
}

/// L03 (i): each row of a verify window is penalised for the drafts before it.
#[tokio::test]
async fn penalties_count_every_token_of_a_step() {
    let logits = |_| [vec![0.0; 7], vec![3.0, 2.4]].concat();
    let server = server(9, Script::new(logits, |_| 7)).await;
    let sampling = pb::SamplingParams { frequency_penalty: Some(0.5), ..Default::default() };
    let request = request(&[1], sampling, 8);
    let output = server.generate(request.clone()).await;
    assert_eq!(output.token_ids, [7, 7, 8, 7, 8, 7, 8, 7]);
    assert_eq!(server.generate(without_drafts(request)).await.token_ids, output.token_ids);
}

/// L03 (ii): tokens are counted, not steps.
#[tokio::test]
async fn nothing_ends_an_output_before_min_tokens() {
    let mut logits = vec![0.0; 12];
    (logits[11], logits[9]) = (5.0, 4.0);
    let server = server(12, Script::new(move |_| logits.clone(), |_| 9)).await;
    let stopping = StoppingParams {
        max_tokens: Some(20),
        min_tokens: Some(5),
        stop_token_ids: vec![11],
        stop_sequences: vec![pb::TokenIds { ids: vec![9, 9] }],
        ..StoppingParams::default()
    };
    let mut request = GenerateRequest { stopping: Some(stopping), ..unary(&[1], 1) };
    let output = server.generate(request.clone()).await;
    // The fifth token is the first one that may end it, and does.
    assert_eq!(output.token_ids, [9; 5]);
    assert_eq!(output.finish_reason(), FinishReason::StopSequence);
    request.stopping.as_mut().unwrap().stop_sequences.clear();
    let output = server.generate(request).await;
    assert_eq!(output.token_ids, [9, 9, 9, 9, 9, 11]);
    assert_eq!(
        (output.finish_reason(), output.matched_token_id),
        (FinishReason::StopToken, Some(11))
    );
}

/// L05: one entry for each token, from its own row.
#[tokio::test]
async fn each_token_of_a_step_has_its_log_probabilities() {
    let logits = |_| vec![0.0, 0.0, 3.0_f32.ln(), 0.0];
    // Once with all drafts right, once with the second one of each step wrong.
    let drafts: [fn((usize, u32)) -> u32; 2] = [|_| 2, |(at, _)| if at % 4 == 0 { 1 } else { 2 }];
    for draft in drafts {
        let server = server(4, Script::new(logits, draft)).await;
        let sampling = pb::SamplingParams { logprobs: Some(2), ..Default::default() };
        let request = request(&[1], sampling.clone(), 6);
        let output = server.generate(request.clone()).await;
        assert_eq!(output.token_ids, [2; 6]);
        assert!(output.speculation.as_ref().unwrap().accepted_tokens > 0);
        assert_eq!(output.logprobs.len(), 6);
        for entry in &output.logprobs {
            assert_eq!(entry.token_id, 2);
            assert!((entry.logprob - 0.5_f32.ln()).abs() < 1e-4, "{entry:?}");
            let ids: Vec<u32> = entry.top.iter().map(|top| top.token_id).collect();
            assert_eq!(ids, [2, 0]);
            assert!((entry.top[1].logprob - (1.0_f32 / 6.0).ln()).abs() < 1e-4, "{entry:?}");
        }
        let plain = server.generate(without_drafts(request)).await;
        assert_eq!(plain.logprobs, output.logprobs);

        let mut request = streaming(&[1], 6);
        request.sampling = Some(sampling);
        let mut stream = server.client().generate_stream(request).await.unwrap().into_inner();
        let mut streamed = vec![];
        while let Some(message) = stream.message().await.unwrap() {
            if let Some(Event::Delta(delta)) = message.event {
                assert_eq!(delta.logprobs.len(), delta.token_ids.len());
                streamed.extend(delta.logprobs);
            }
        }
        assert_eq!(streamed, output.logprobs);
    }
}

/// L05: prompt log probabilities do not depend on chunks, drafts or what is cached.
#[tokio::test]
async fn each_token_of_the_prompt_but_the_first_has_its_log_probability() {
    let logits = |(at, last): (usize, u32)| -> Vec<f32> {
        (0..16_u8)
            .map(|id| f32::from((usize::from(id) * 7 + at * 3 + last as usize) as u8 % 13))
            .collect()
    };
    let prompt: Vec<u32> = (0..10).map(|at| (at * 5 + 1) % 16).collect();
    let sampling = pb::SamplingParams { prompt_logprobs: Some(1), ..Default::default() };
    let request = request(&prompt, sampling.clone(), 1);
    let chunked = server(16, Script::new(logits, |_| 2)).await;
    let setup = Setup { script: Some(Script::new(logits, |_| 2)), ..Setup::default() };
    let limits = ExecutorLimits { vocab_size: 16, ..setup.limits };
    let whole = Server::start(Setup { limits, ..setup }).await;
    let mut replies = vec![];
    for (server, request) in [
        (&chunked, request.clone()),
        (&chunked, request.clone()),
        (&whole, without_drafts(request)),
    ] {
        let reply = server.client().generate(request).await.unwrap().into_inner();
        assert!(reply.outputs[0].logprobs.is_empty(), "not asked for");
        replies.push(reply.prompt_logprobs);
    }
    assert_eq!(replies[0], replies[2]);
    assert_eq!(replies[1], replies[2]);
    assert_eq!(replies[0].len(), 9);
    for (at, entry) in (1..).zip(&replies[0]) {
        let raw = logits((at, prompt[at - 1]));
        let log_sum = raw.iter().map(|logit| logit.exp()).sum::<f32>().ln();
        assert_eq!(entry.token_id, prompt[at]);
        let expected = raw[prompt[at] as usize] - log_sum;
        assert!((entry.logprob - expected).abs() < 1e-4, "{at}: {entry:?}");
        assert_eq!(entry.top.len(), 1);
    }

    let mut streamed = streaming(&prompt, 1);
    streamed.sampling = Some(sampling);
    let mut stream = chunked.client().generate_stream(streamed).await.unwrap().into_inner();
    let (mut logprobs, mut n_messages) = (vec![], 0);
    while let Some(message) = stream.message().await.unwrap() {
        if let Some(Event::PromptLogprobs(prompt)) = message.event {
            assert_eq!(message.index, 0);
            logprobs.extend(prompt.logprobs);
            n_messages += 1;
        }
    }
    assert_eq!((logprobs, n_messages), (replies.remove(0), 3));
}

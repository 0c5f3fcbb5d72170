//! Bad requests are refused by field, and the engine serves on (fault case L24).

use engine_types::{FinishReason, SamplingParams, TokenId};
use integration_tests::harness;
use integration_tests::oracle::Checkpoint;
use model_runner::RunnerOptions;
use models::ComputeDtype;

/// A prompt and parameters that no engine serves, with the start of the refusal.
type BadRequest = (Vec<TokenId>, SamplingParams, &'static str);

fn bad_requests(max_model_len: u32, vocab_size: u32) -> Vec<BadRequest> {
    let params = harness::params(4);
    let prompt = vec![5, 6, 7];
    vec![
        (vec![], params.clone(), "prompt: it is empty"),
        (vec![vocab_size], params.clone(), "prompt: token id 4096"),
        (vec![5, u32::MAX], params.clone(), "prompt: token id 4294967295"),
        (vec![5; max_model_len as usize], params.clone(), "prompt: 512 tokens leave no room"),
        (vec![5; 400], params.clone(), "prompt: 400 tokens and an output never fit"),
        (vec![5; 1_500_000], params.clone(), "prompt: 1500000 tokens leave no room"),
        (prompt.clone(), SamplingParams { max_tokens: 0, ..params.clone() }, "max_tokens: it is 0"),
        (
            prompt.clone(),
            SamplingParams { stop_token_ids: vec![2, vocab_size], ..params.clone() },
            "stop_token_ids: token id 4096",
        ),
        (
            prompt.clone(),
            SamplingParams { stop_sequences: vec![vec![2], vec![]], ..params.clone() },
            "stop_sequences: number 1 is empty",
        ),
        (
            prompt.clone(),
            SamplingParams { stop_sequences: vec![vec![2, vocab_size]], ..params.clone() },
            "stop_sequences: token id 4096",
        ),
        (
            prompt,
            SamplingParams { num_speculative_tokens: Some(4), ..params },
            "num_speculative_tokens: 4 is above the engine's 3",
        ),
    ]
}

on_both!(each_bad_request_is_refused_by_field_and_the_next_good_one_succeeds);

fn each_bad_request_is_refused_by_field_and_the_next_good_one_succeeds(checkpoint: Checkpoint) {
    let options = RunnerOptions {
        num_blocks: Some(24),
        max_model_len: Some(512),
        num_speculative_tokens: 3,
        ..RunnerOptions::default()
    };
    let (engine, thread) = harness::start(checkpoint, ComputeDtype::Float32, &options).unwrap();
    let case = &checkpoint.cases().unwrap()[0];
    let limits = engine.limits();
    for (prompt, params, expected) in bad_requests(limits.max_model_len, limits.vocab_size) {
        let error = harness::submit(&engine, &prompt, params).unwrap_err();
        let engine::SubmitError::Invalid(error) = error else { panic!("{expected}: {error}") };
        assert!(error.to_string().starts_with(expected), "{error}, not {expected}");

        let good = (&case.prompt_ids[..], harness::params(case.max_tokens()));
        let found = harness::generate(&engine, [good]).unwrap().remove(0);
        assert_eq!(found.token_ids, case.greedy_ids, "after {expected}");
        assert_eq!(found.finish_reason, FinishReason::MaxTokens);
    }
    assert!(engine.is_alive());
    thread.drain();
    let stats = engine.stats();
    assert_eq!((stats.scheduler.blocks.n_used, stats.n_failed_steps), (0, 0));
}

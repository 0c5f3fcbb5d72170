//! The same cases in bfloat16, the checkpoint's own type.

use integration_tests::harness::{self, Generation};
use integration_tests::oracle::{self, Case};
use model_runner::RunnerOptions;
use models::ComputeDtype;

fn run(cases: &[Case], dtype: ComputeDtype, num_speculative_tokens: u32) -> Vec<Generation> {
    let options = RunnerOptions { num_speculative_tokens, ..RunnerOptions::default() };
    let (engine, _thread) = harness::start(dtype, &options).unwrap();
    let requests =
        cases.iter().map(|case| (&case.prompt_ids[..], harness::params(case.max_tokens())));
    harness::generate(&engine, requests).unwrap()
}

/// Mean tokens a verify step adds, over all cases.
fn acceptance_length(done: &[Generation]) -> f64 {
    let n_steps: u64 = done.iter().map(|found| found.spec_decode.n_verify_steps).sum();
    let n_accepted: u64 = done.iter().map(|found| found.spec_decode.n_accepted_tokens).sum();
    1.0 + n_accepted as f64 / n_steps as f64
}

#[test]
fn most_tokens_are_those_of_float32() {
    let cases = oracle::cases().unwrap();
    let done = run(&cases, ComputeDtype::Bfloat16, 3);
    let n_tokens: usize = cases.iter().map(|case| case.greedy_ids.len()).sum();
    let n_equal: usize = cases
        .iter()
        .zip(&done)
        .map(|(case, found)| {
            case.greedy_ids.iter().zip(&found.token_ids).filter(|(a, b)| a == b).count()
        })
        .sum();
    let share = n_equal as f64 / n_tokens as f64;
    assert!(share >= 0.95, "{n_equal} of {n_tokens} tokens");
}

#[test]
fn drafts_are_accepted_as_in_float32() {
    let cases = oracle::cases().unwrap();
    let [float32, bfloat16] = [ComputeDtype::Float32, ComputeDtype::Bfloat16]
        .map(|dtype| acceptance_length(&run(&cases, dtype, 3)));
    let difference = (bfloat16 / float32 - 1.0).abs();
    assert!(difference <= 0.02, "bfloat16 {bfloat16}, float32 {float32}");
}

#[test]
fn drafting_changes_no_token() {
    let cases = oracle::cases().unwrap();
    let plain = run(&cases, ComputeDtype::Bfloat16, 0);
    for k in [1, 2, 3, 5, 8] {
        let drafted = run(&cases, ComputeDtype::Bfloat16, k);
        for ((case, plain), drafted) in cases.iter().zip(&plain).zip(&drafted) {
            assert_eq!(drafted.token_ids, plain.token_ids, "{}, k={k}", case.name);
            assert_eq!(drafted.finish_reason, plain.finish_reason, "{}, k={k}", case.name);
        }
    }
}

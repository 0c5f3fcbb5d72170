//! The same cases in bfloat16, the checkpoints' own type.

use integration_tests::harness::{self, Generation, acceptance_length};
use integration_tests::oracle::Checkpoint;
use model_runner::RunnerOptions;
use models::ComputeDtype;

fn run(
    checkpoint: Checkpoint,
    dtype: ComputeDtype,
    num_speculative_tokens: u32,
) -> Vec<Generation> {
    let options = RunnerOptions { num_speculative_tokens, ..RunnerOptions::default() };
    harness::generate_cases(checkpoint, dtype, &options).unwrap()
}

on_both!(most_tokens_are_those_of_float32);

fn most_tokens_are_those_of_float32(checkpoint: Checkpoint) {
    let cases = checkpoint.cases().unwrap();
    let done = run(checkpoint, ComputeDtype::Bfloat16, 3);
    let n_tokens: usize = cases.iter().map(|case| case.greedy_ids.len()).sum();
    let n_equal: usize =
        cases.iter().zip(&done).map(|(case, found)| case.n_equal_tokens(&found.token_ids)).sum();
    let share = n_equal as f64 / n_tokens as f64;
    assert!(share >= 0.95, "{n_equal} of {n_tokens} tokens");
}

on_both!(drafts_are_accepted_as_in_float32);

fn drafts_are_accepted_as_in_float32(checkpoint: Checkpoint) {
    let [float32, bfloat16] = [ComputeDtype::Float32, ComputeDtype::Bfloat16]
        .map(|dtype| acceptance_length(&run(checkpoint, dtype, 3)));
    let difference = (bfloat16 / float32 - 1.0).abs();
    assert!(difference <= 0.02, "bfloat16 {bfloat16}, float32 {float32}");
}

on_both!(drafting_changes_no_token);

fn drafting_changes_no_token(checkpoint: Checkpoint) {
    let plain = run(checkpoint, ComputeDtype::Bfloat16, 0);
    for k in [1, 2, 3, 5, 8] {
        let drafted = run(checkpoint, ComputeDtype::Bfloat16, k);
        assert_eq!(drafted.len(), plain.len());
        for (idx, (plain, drafted)) in plain.iter().zip(&drafted).enumerate() {
            assert_eq!(drafted.token_ids, plain.token_ids, "case {idx}, k={k}");
            assert_eq!(drafted.finish_reason, plain.finish_reason, "case {idx}, k={k}");
        }
    }
}

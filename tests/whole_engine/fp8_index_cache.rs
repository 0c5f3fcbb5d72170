//! Index keys stored as 8-bit floats: text and acceptance stay close to the reference.

use integration_tests::harness::{self, acceptance_length};
use integration_tests::oracle::Checkpoint;
use model_runner::{IndexCacheDtype, RunnerOptions};
use models::ComputeDtype;

#[test]
fn text_and_acceptance_stay_close() {
    let cases = Checkpoint::TinyGlm52.cases().unwrap();
    let [exact, coarse] = [IndexCacheDtype::Auto, IndexCacheDtype::Fp8].map(|index_cache_dtype| {
        let options = RunnerOptions {
            num_speculative_tokens: 3,
            index_cache_dtype,
            ..RunnerOptions::default()
        };
        harness::generate_cases(Checkpoint::TinyGlm52, ComputeDtype::Float32, &options).unwrap()
    });
    for (case, found) in cases.iter().zip(&coarse) {
        let n_equal = case.n_equal_tokens(&found.token_ids);
        eprintln!("{}: {n_equal} of {}", case.name, case.greedy_ids.len());
    }
    eprintln!("{} {}", acceptance_length(&exact), acceptance_length(&coarse));
}

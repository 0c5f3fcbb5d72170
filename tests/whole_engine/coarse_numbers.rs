//! The same cases in bfloat16, the checkpoints' own type, and with index keys in 8 bits.

use integration_tests::harness::{self, Generation, acceptance_length};
use integration_tests::oracle::{Case, Checkpoint};
use model_runner::{IndexCacheDtype, RunnerOptions};
use models::ComputeDtype;

/// A text may part from the reference where the likeliest logit is above the next one by less
/// than this; the largest such margin that was seen is 0.041.
const NEAR_TIE: f64 = 0.08;

/// What is computed in fewer bits.
type Coarse = (ComputeDtype, IndexCacheDtype);

const EXACT: Coarse = (ComputeDtype::Float32, IndexCacheDtype::Auto);
const BFLOAT16: Coarse = (ComputeDtype::Bfloat16, IndexCacheDtype::Auto);
const FP8_KEYS: Coarse = (ComputeDtype::Float32, IndexCacheDtype::Fp8);
const BOTH: Coarse = (ComputeDtype::Bfloat16, IndexCacheDtype::Fp8);

fn settings(checkpoint: Checkpoint) -> &'static [Coarse] {
    match checkpoint {
        Checkpoint::TinyDsv3 => &[BFLOAT16],
        Checkpoint::TinyGlm52 => &[BFLOAT16, FP8_KEYS, BOTH],
    }
}

fn run(checkpoint: Checkpoint, (dtype, keys): Coarse, k: u32) -> Vec<Generation> {
    let options = RunnerOptions {
        num_speculative_tokens: k,
        index_cache_dtype: keys,
        ..RunnerOptions::default()
    };
    harness::generate_cases(checkpoint, dtype, &options).unwrap()
}

fn has_reference_text((case, found): &(&Case, &Generation)) -> bool {
    found.token_ids == case.greedy_ids
}

on_both!(texts_part_from_the_reference_only_at_near_ties);

fn texts_part_from_the_reference_only_at_near_ties(checkpoint: Checkpoint) {
    let cases = checkpoint.cases().unwrap();
    for &setting in settings(checkpoint) {
        let done = run(checkpoint, setting, 3);
        for (case, found) in cases.iter().zip(&done) {
            let mut pairs = case.greedy_ids.iter().zip(&found.token_ids);
            if let Some(first) = pairs.position(|(expected, found)| expected != found) {
                let margin = case.top2_margins[first];
                assert!(margin < NEAR_TIE, "{} at {first}, {setting:?}: {margin}", case.name);
            } else {
                assert_eq!(found.token_ids.len(), case.greedy_ids.len(), "{}", case.name);
            }
        }
        let n_equal = cases.iter().zip(&done).filter(has_reference_text).count();
        assert!(n_equal >= 10, "{setting:?}: {n_equal} of {} texts", cases.len());
    }
}

on_both!(drafts_are_accepted_as_in_float32);

/// Over the texts that are equal: drafts of different texts cannot be compared.
fn drafts_are_accepted_as_in_float32(checkpoint: Checkpoint) {
    let cases = checkpoint.cases().unwrap();
    let exact = run(checkpoint, EXACT, 3);
    for &setting in settings(checkpoint) {
        let coarse = run(checkpoint, setting, 3);
        let has_equal_text: Vec<bool> =
            cases.iter().zip(&coarse).map(|pair| has_reference_text(&pair)).collect();
        let acceptance = |done: &[Generation]| {
            let kept = done.iter().zip(&has_equal_text).filter(|(_, equal)| **equal);
            acceptance_length(kept.map(|(found, _)| found))
        };
        let (exact, coarse) = (acceptance(&exact), acceptance(&coarse));
        let difference = (coarse / exact - 1.0).abs();
        assert!(difference <= 0.02, "{setting:?}: {coarse}, float32 {exact}");
    }
}

on_both!(drafting_changes_no_token);

fn drafting_changes_no_token(checkpoint: Checkpoint) {
    for &setting in settings(checkpoint) {
        let plain = run(checkpoint, setting, 0);
        let widths: &[u32] = if setting == BFLOAT16 { &[1, 2, 3, 5, 8] } else { &[3, 8] };
        for &k in widths {
            let drafted = run(checkpoint, setting, k);
            assert_eq!(drafted.len(), plain.len());
            for (idx, (plain, drafted)) in plain.iter().zip(&drafted).enumerate() {
                assert_eq!(drafted.token_ids, plain.token_ids, "case {idx}, {setting:?}, k={k}");
                assert_eq!(drafted.finish_reason, plain.finish_reason, "case {idx}, k={k}");
            }
        }
    }
}

/// A few keys beyond `index_topk` do not make keys in 8 bits change a text; hundreds may.
#[test]
fn keys_in_8_bits_keep_the_short_texts_and_are_not_ignored() {
    let cases = Checkpoint::TinyGlm52.cases().unwrap();
    let coarse = run(Checkpoint::TinyGlm52, FP8_KEYS, 3);
    for (case, found) in cases.iter().zip(&coarse).filter(|(case, _)| !case.is_long()) {
        assert_eq!(found.token_ids, case.greedy_ids, "{}", case.name);
    }
    assert_ne!(coarse, run(Checkpoint::TinyGlm52, EXACT, 3), "something differs somewhere");
}

//! Where runs end.

use engine_types::FinishReason::{Eos, MaxTokens, ModelLength, StopSequence, StopToken};
use engine_types::{FinishReason, SamplingParams};

use super::support::params;
use crate::{Commit, EndRules, commit};

fn check(
    params: &SamplingParams,
    generated: &[u32],
    run: &[u32],
    n_kept: usize,
    reason: Option<FinishReason>,
) {
    let rules = EndRules { params, eos_token_ids: &[2], n_prompt: 3, max_model_len: 20 };
    assert_eq!(commit(&rules, generated, run), Commit { n_kept, reason }, "{generated:?} {run:?}");
}

#[test]
fn the_earliest_end_wins() {
    let mut stops = params(16);
    stops.stop_sequences = vec![vec![10, 11]];
    stops.stop_token_ids = vec![99];
    check(&stops, &[], &[10, 11, 10, 11], 2, Some(StopSequence(0)));
    check(&stops, &[], &[2, 9, 10, 11], 1, Some(Eos(2)));
    check(&stops, &[], &[9, 99, 2, 98], 2, Some(StopToken(99)));
    check(&stops, &[], &[50, 2, 51, 52], 2, Some(Eos(2)));
    check(&stops, &[], &[50, 51], 2, None);
}

#[test]
fn stop_sequences_straddle_runs_but_not_the_prompt() {
    let mut stops = params(16);
    stops.stop_sequences = vec![vec![7, 8, 9, 10], vec![9]];
    check(&stops, &[5, 7, 8], &[9, 10], 1, Some(StopSequence(1)));
    stops.stop_sequences.pop();
    check(&stops, &[5, 7, 8], &[9, 10, 11], 2, Some(StopSequence(0)));
    check(&stops, &[8], &[9, 10], 2, None);
    check(&stops, &[6, 8], &[9, 10], 2, None);
}

#[test]
fn lengths_end_inside_a_run() {
    check(&params(4), &[5, 5], &[6, 6, 6, 6], 2, Some(MaxTokens));
    check(&params(40), &[5; 15], &[6, 6, 6, 6], 2, Some(ModelLength));
    check(&params(17), &[5; 15], &[6, 6, 6, 6], 2, Some(MaxTokens));
}

#[test]
fn one_token_may_be_several_ends() {
    let mut all = params(1);
    all.stop_token_ids = vec![2];
    all.stop_sequences = vec![vec![3], vec![2]];
    check(&all, &[], &[2], 1, Some(Eos(2)));
    all.ignore_eos = true;
    check(&all, &[], &[2], 1, Some(StopToken(2)));
    all.stop_token_ids.clear();
    check(&all, &[], &[2], 1, Some(StopSequence(1)));
    all.stop_sequences.clear();
    check(&all, &[], &[2], 1, Some(MaxTokens));
}

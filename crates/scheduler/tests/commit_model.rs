//! `commit` beside a plain definition of it, on random runs.
//!
//! Tokens are few, so that ends meet at one token and stop sequences straddle runs.
//! `PROPTEST_CASES` times 16 is the number of runs, and `PROPTEST_RNG_SEED` their seed.

use std::collections::BTreeMap;

use engine_types::{FinishReason, SamplingParams, TokenId};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{Config, RngSeed, TestRunner};
use scheduler::{Commit, EndRules, commit};

/// A request that has not ended, and a run.
#[derive(Clone, Debug)]
struct Case {
    prompt: Vec<TokenId>,
    generated: Vec<TokenId>,
    run: Vec<TokenId>,
    params: SamplingParams,
    eos_token_ids: Vec<TokenId>,
    max_model_len: usize,
}

impl Case {
    fn commit(&self, generated: &[TokenId], run: &[TokenId]) -> Commit {
        let rules = EndRules {
            params: &self.params,
            eos_token_ids: &self.eos_token_ids,
            n_prompt: self.prompt.len(),
            max_model_len: self.max_model_len,
        };
        commit(&rules, generated, run)
    }

    /// All ends of the text that are reached with its last token, in the order in which one is
    /// told where several meet.
    fn ends(&self, text: &[TokenId]) -> Vec<FinishReason> {
        let last = text[text.len() - 1];
        let output: Vec<TokenId> = text.iter().copied().skip(self.prompt.len()).collect();
        let mut ends = vec![];
        for eos in &self.eos_token_ids {
            if *eos == last && !self.params.ignore_eos {
                ends.push(FinishReason::Eos(last));
            }
        }
        for id in &self.params.stop_token_ids {
            if *id == last {
                ends.push(FinishReason::StopToken(last));
            }
        }
        for (idx, stop) in self.params.stop_sequences.iter().enumerate() {
            let n_equal =
                stop.iter().rev().zip(output.iter().rev()).filter(|(a, b)| a == b).count();
            if n_equal == stop.len() {
                ends.push(FinishReason::StopSequence(idx));
            }
        }
        if output.len() as u64 >= u64::from(self.params.max_tokens) {
            ends.push(FinishReason::MaxTokens);
        }
        if text.len() >= self.max_model_len {
            ends.push(FinishReason::ModelLength);
        }
        ends
    }

    /// Appends the run token by token to the whole text until an end is reached; how many tokens
    /// that were, and all ends that were reached with the last one.
    fn expected(&self) -> (usize, Vec<FinishReason>) {
        let mut text = [&self.prompt[..], &self.generated].concat();
        for (idx, token) in self.run.iter().enumerate() {
            text.push(*token);
            let ends = self.ends(&text);
            if !ends.is_empty() {
                return (idx + 1, ends);
            }
        }
        (self.run.len(), vec![])
    }
}

fn tokens(n: impl Into<proptest::collection::SizeRange>) -> impl Strategy<Value = Vec<TokenId>> {
    vec(0..6_u32, n)
}

/// Stop sequences of any tokens, or cut out of the text in front of a place in the run.
fn stop_sequences(text: Vec<TokenId>, n_run: usize) -> impl Strategy<Value = Vec<Vec<TokenId>>> {
    let n_text = text.len();
    let cut = (n_text - n_run..=n_text, 1..8_usize).prop_map(move |(end, n)| {
        let stop = text[end.saturating_sub(n)..end].to_vec();
        if stop.is_empty() { vec![0] } else { stop }
    });
    vec(prop_oneof![tokens(1..5), cut], 0..3)
}

fn cases() -> impl Strategy<Value = Case> {
    let text = (tokens(1..5), tokens(0..12), tokens(0..10));
    text.prop_flat_map(|(prompt, generated, run)| {
        let whole = [&prompt[..], &generated, &run].concat();
        let ids = (vec(0..12_u32, 0..2), vec(0..12_u32, 0..2), any::<bool>());
        // How many tokens are left when the run begins; a request without any has ended.
        let room = (1..14_usize, 1..14_usize);
        (stop_sequences(whole, run.len()), ids, room).prop_map(
            move |(stop_sequences, (eos_token_ids, stop_token_ids, ignore_eos), room)| Case {
                params: SamplingParams {
                    max_tokens: u32::try_from(generated.len() + room.0).expect("a few"),
                    ignore_eos,
                    stop_token_ids,
                    stop_sequences,
                    ..SamplingParams::default()
                },
                eos_token_ids,
                max_model_len: prompt.len() + generated.len() + room.1,
                prompt: prompt.clone(),
                generated: generated.clone(),
                run: run.clone(),
            },
        )
    })
}

fn config() -> Config {
    let default = Config { failure_persistence: None, ..Config::default() };
    match default.rng_seed {
        RngSeed::Random => Config { rng_seed: RngSeed::Fixed(1), ..default },
        RngSeed::Fixed(_) => default,
    }
}

proptest! {
    #![proptest_config(Config { cases: config().cases * 16, ..config() })]

    #[test]
    fn a_run_is_cut_where_the_definition_cuts_it(case in cases()) {
        let (n_kept, ends) = case.expected();
        let found = case.commit(&case.generated, &case.run);
        prop_assert_eq!(found, Commit { n_kept, reason: ends.first().cloned() });
    }

    /// What is kept is a prefix of the run: all of it where the request goes on, never more than
    /// the limits allow.
    #[test]
    fn limits_hold_and_only_an_end_cuts(case in cases()) {
        let Commit { n_kept, reason } = case.commit(&case.generated, &case.run);
        prop_assert!(n_kept <= case.run.len());
        prop_assert!(n_kept == case.run.len() || reason.is_some());
        prop_assert!(n_kept > 0 || reason.is_none());
        let n_generated = case.generated.len() + n_kept;
        prop_assert!(n_generated <= case.params.max_tokens as usize);
        prop_assert!(case.prompt.len() + n_generated <= case.max_model_len);
    }

    /// So that drafting, which makes runs longer, moves no end.
    #[test]
    fn a_run_in_two_parts_ends_as_the_whole(case in cases()) {
        let whole = case.commit(&case.generated, &case.run);
        for cut in 0..=case.run.len() {
            let (head, tail) = case.run.split_at(cut);
            let mut parts = case.commit(&case.generated, head);
            if parts.reason.is_none() {
                let rest = case.commit(&[&case.generated[..], head].concat(), tail);
                parts = Commit { n_kept: cut + rest.n_kept, reason: rest.reason };
            }
            prop_assert_eq!(&parts, &whole, "cut at {}", cut);
        }
    }
}

/// Otherwise the properties above could hold of runs without ends alone.
#[test]
fn the_random_cases_reach_every_end_and_let_ends_meet() {
    let mut runner = TestRunner::new(config());
    let mut counts: BTreeMap<&str, u32> = BTreeMap::new();
    for _ in 0..4000 {
        let case = cases().new_tree(&mut runner).expect("no case is rejected").current();
        let (n_kept, ends) = case.expected();
        let name = match ends.first() {
            None => "none",
            Some(FinishReason::Eos(_)) => "eos",
            Some(FinishReason::StopToken(_)) => "stop id",
            Some(FinishReason::StopSequence(idx)) => {
                let is_straddling = case.params.stop_sequences[*idx].len() > n_kept;
                if is_straddling { "straddling sequence" } else { "sequence" }
            }
            Some(FinishReason::MaxTokens) => "max_tokens",
            Some(reason) => {
                if *reason == FinishReason::ModelLength {
                    "length"
                } else {
                    "other"
                }
            }
        };
        *counts.entry(name).or_default() += 1;
        *counts.entry("several").or_default() += u32::from(ends.len() > 1);
        *counts.entry("empty run").or_default() += u32::from(case.run.is_empty());
        *counts.entry("longest run").or_default() += u32::from(case.run.len() == 9);
        *counts.entry("cut").or_default() += u32::from(n_kept < case.run.len());
    }
    let names = ["cut", "empty run", "eos", "length", "longest run", "max_tokens", "none"];
    let names = [&names[..], &["sequence", "several", "stop id", "straddling sequence"]].concat();
    assert_eq!(counts.keys().copied().collect::<Vec<_>>(), names);
    assert!(counts.values().all(|count| *count > 100), "{counts:?}");
}

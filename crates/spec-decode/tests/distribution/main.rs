//! Sequences generated with drafts have the distribution of sequences sampled token by token.
//!
//! Each setting draws at least 200,000 tokens with drafts, as many without, and compares whole
//! sequences: with each other by a two-sample chi-square test, and both with the exact
//! probabilities of the scalar definition. The first `k + 1` tokens make a sequence, so every row
//! of a window takes part, the bonus row included. Seeds are fixed. A test passes if no
//! probability value is below 1e-4: among 100 sound values, the chance that one is, is 1 %. Biased
//! samplers must fall below 1e-9.
#![expect(clippy::unwrap_used, reason = "a failure in a test's helper is a failure of the test")]

mod biased;
mod chi_square;
mod generation;

use biased::Bias;
use generation::{Drafter, Setting, Step, Table, verify};
use sampler::SamplingParams;
use sampler::noise::{self, Purpose};

const N_DRAWS: usize = 200_000;
const SOUND: f64 = 1e-4;
const BIASED: f64 = 1e-9;

/// Logits between -1.5 and 1.5, and drafting tables that are near them and far from them.
struct Models {
    target: Table,
    right: Table,
    wrong: Table,
}

impl Models {
    fn new(vocab: usize) -> Self {
        let random = |row: usize, id: usize, key: u64| {
            let at = (row * vocab + id) as u64;
            (3.0 * noise::uniform(key, at, Purpose::Sample) - 1.5) as f32
        };
        let table = |logit: &dyn Fn(usize, usize) -> f32| {
            let row = |row: usize| (0..vocab).map(|id| logit(row, id)).collect();
            Table::new((0..vocab).map(row).collect())
        };
        Self {
            target: table(&|row, id| random(row, id, 1)),
            right: table(&|row, id| random(row, id, 1) + 0.1 * random(row, id, 2)),
            wrong: table(&|row, id| -random(row, id, 1)),
        }
    }

    fn drafters(&self) -> [Drafter<'_>; 4] {
        let Self { right, wrong, .. } = self;
        [
            Drafter::Chosen(right),
            Drafter::Chosen(wrong),
            Drafter::Drawn(right),
            Drafter::Drawn(wrong),
        ]
    }
}

/// How often each sequence came, numbered as in [`Setting::joint`].
fn counts(sequences: &[Vec<u32>], vocab: usize) -> Vec<u32> {
    let n_tokens = sequences[0].len();
    let mut counts = vec![0; vocab.pow(n_tokens as u32)];
    for sequence in sequences {
        counts[sequence.iter().fold(0, |at, &id| at * vocab + id as usize)] += 1;
    }
    counts
}

/// A vocabulary for which sequences of `k + 1` tokens fall into at most 4096 cells.
fn vocab_for(k: usize) -> usize {
    [64, 16, 8, 4][k - 1]
}

/// All four drafters, each with another `k`.
fn check(params: &SamplingParams, first_k: usize) {
    for kind in 0..4 {
        let k = 1 + (first_k + kind) % 4;
        let models = Models::new(vocab_for(k));
        let (vocab, n_tokens) = (models.target.vocab(), k + 1);
        params.check(vocab as u32).unwrap();
        let setting = Setting { target: &models.target, params, n_tokens };
        let n = N_DRAWS.div_ceil(n_tokens);
        let drafter = models.drafters()[kind];
        let speculative = setting.generate(n, 1 << 32, (drafter, k), &verify);
        let direct = setting.generate(n, 1 << 33, (Drafter::None, 0), &verify);
        let (speculative, direct) = (counts(&speculative, vocab), counts(&direct, vocab));
        let exact: Vec<f64> = setting.joint().iter().map(|p| p * n as f64).collect();
        let p_values = [
            chi_square::two_samples(&speculative, &direct),
            chi_square::fit(&speculative, &exact),
            chi_square::fit(&direct, &exact),
        ];
        assert!(p_values.iter().all(|&p| p > SOUND), "{p_values:?} k = {k} {drafter:?} {params:?}");
    }
}

fn sampled(temperature: f32) -> SamplingParams {
    SamplingParams { temperature, ..SamplingParams::default() }
}

fn penalised() -> SamplingParams {
    SamplingParams {
        repetition_penalty: 1.3,
        presence_penalty: 0.4,
        frequency_penalty: 0.6,
        ..sampled(1.0)
    }
}

fn mixed() -> SamplingParams {
    SamplingParams {
        top_k: 6,
        top_p: 0.9,
        min_p: 0.05,
        repetition_penalty: 1.2,
        frequency_penalty: 0.5,
        logit_bias: vec![(1, 0.7), (3, -0.4)],
        bad_words: vec![vec![1, 3], vec![2, 1, 2]],
        min_tokens: 2,
        end_ids: vec![3],
        ..sampled(1.4)
    }
}

#[test]
fn temperature() {
    check(&sampled(0.7), 0);
}

#[test]
fn top_k() {
    check(&SamplingParams { top_k: 3, ..sampled(1.0) }, 1);
}

#[test]
fn top_p() {
    check(&SamplingParams { top_p: 0.8, ..sampled(1.0) }, 2);
}

#[test]
fn min_p() {
    check(&SamplingParams { min_p: 0.3, ..sampled(1.2) }, 3);
}

#[test]
fn penalties() {
    check(&penalised(), 1);
}

#[test]
fn mixtures() {
    check(&mixed(), 2);
}

#[test]
fn truncations_together() {
    check(&SamplingParams { top_k: 12, top_p: 0.85, min_p: 0.1, ..sampled(1.5) }, 0);
}

/// Too many tokens for whole sequences: each position by itself.
#[test]
fn larger_vocabularies() {
    let wide = SamplingParams { top_p: 0.8, ..penalised() };
    let settings = [(500, sampled(0.7), 1, 2), (200, wide, 2, 2), (500, mixed(), 3, 1)];
    for (vocab, params, kind, k) in settings {
        let models = Models::new(vocab);
        params.check(vocab as u32).unwrap();
        let setting = Setting { target: &models.target, params: &params, n_tokens: k + 1 };
        let n = N_DRAWS.div_ceil(k + 1);
        let drafter = models.drafters()[kind];
        let speculative = setting.generate(n, 1 << 34, (drafter, k), &verify);
        let direct = setting.generate(n, 1 << 35, (Drafter::None, 0), &verify);
        for at in 0..=k {
            let of_position = |sequences: &[Vec<u32>]| {
                let tokens: Vec<Vec<u32>> = sequences.iter().map(|ids| vec![ids[at]]).collect();
                counts(&tokens, vocab)
            };
            let p = chi_square::two_samples(&of_position(&speculative), &of_position(&direct));
            assert!(p > SOUND, "{p} at position {at}, {drafter:?}, {params:?}");
        }
    }
}

/// The value of the fit test for a biased sampler in three settings, the least of them.
fn least_p_value(bias: Bias) -> f64 {
    let models = Models::new(4);
    let [_, wrong, _, drawn_wrong] = models.drafters();
    let truncated = SamplingParams { top_k: 3, ..sampled(1.0) };
    let settings = [(&truncated, wrong), (&penalised(), wrong), (&truncated, drawn_wrong)];
    let p_values = settings.map(|(params, drafter)| {
        let setting = Setting { target: &models.target, params, n_tokens: 3 };
        let verify = |step: &Step<'_>| bias.verify(step);
        let sequences = setting.generate(N_DRAWS / 3, 1 << 36, (drafter, 2), &verify);
        let exact: Vec<f64> = setting.joint().iter().map(|p| p * sequences.len() as f64).collect();
        let counts = counts(&sequences, 4);
        let is_possible = counts.iter().zip(&exact).all(|(&n, &p)| n == 0 || p > 0.0);
        if is_possible { chi_square::fit(&counts, &exact) } else { 0.0 }
    });
    p_values.into_iter().fold(1.0, f64::min)
}

/// The test itself: it finds every bias, and none in the scalar definition.
#[test]
fn biased_samplers_are_found() {
    assert!(least_p_value(Bias::None) > SOUND);
    let biases = [
        Bias::KeepsRejected,
        Bias::Greedy,
        Bias::SkipsTruncation,
        Bias::ForgetsDrafts,
        Bias::ReusesNoise,
        Bias::WrongResidual,
        Bias::Relaxed,
    ];
    for bias in biases {
        let p = least_p_value(bias);
        assert!(p < BIASED, "{bias:?} passes with {p}");
    }
}

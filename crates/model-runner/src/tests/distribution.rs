//! The distribution of sampled tokens with drafts against that without.

use std::collections::HashMap;

use engine_types::{SamplingParams, StepExecutor, TokenId};

use super::driver::{Job, run};
use super::sampling::WHOLE;
use super::{options, runner_of};
use crate::limits::{DraftSampling, RunnerOptions};

/// Requests of a step.
const N_ROWS: u32 = 256;
/// Requests of a sample.
const N_DRAWS: u64 = 4096;

/// How often each run of the first two tokens is generated behind a short prompt, by requests with
/// other seeds than those of any other `sample`; and the accepted drafts a verify step.
fn draw(
    model: &str,
    n_drafts: u32,
    draft_sampling: DraftSampling,
    (sample, temperature): (u64, f32),
) -> (HashMap<Vec<TokenId>, u32>, f64) {
    let options = RunnerOptions {
        max_num_seqs: N_ROWS,
        num_blocks: Some(2 * N_ROWS),
        draft_sampling,
        ..options(n_drafts)
    };
    let mut runner = runner_of(model, &options);
    let (mut counts, mut n_accepted) = (HashMap::new(), 0);
    let seeds: Vec<u64> = (0..N_DRAWS).map(|idx| sample << 32 | idx).collect();
    assert_eq!(runner.limits().max_num_seqs, N_ROWS);
    for seeds in seeds.chunks(N_ROWS as usize) {
        let job = |&seed: &u64| {
            let params = SamplingParams { temperature, seed: Some(seed), ..Default::default() };
            Job::new(&[0, 856, 1168, 596], 2, n_drafts as usize).sampled(params, &[])
        };
        for job in run(&mut runner, seeds.iter().map(job).collect(), WHOLE) {
            *counts.entry(job.generated().to_vec()).or_insert(0) += 1;
            n_accepted += job.accepted.iter().sum::<u32>();
        }
    }
    (counts, f64::from(n_accepted) / N_DRAWS as f64)
}

/// Chi-square of two samples of one size and its degrees of freedom; runs that both have fewer than
/// 16 times together are one bin.
fn chi_square(
    one: &HashMap<Vec<TokenId>, u32>,
    other: &HashMap<Vec<TokenId>, u32>,
) -> (f64, usize) {
    let count = |of: &HashMap<Vec<TokenId>, u32>, run| f64::from(of.get(run).copied().unwrap_or(0));
    let (mut rest, mut sum, mut n_bins) = ((0.0, 0.0), 0.0, 0);
    let mut add = |a: f64, b: f64| {
        sum += (a - b).powi(2) / (a + b);
        n_bins += 1;
    };
    let only_other = other.keys().filter(|run| !one.contains_key(*run));
    for run in one.keys().chain(only_other) {
        let (a, b) = (count(one, run), count(other, run));
        if a + b < 16.0 {
            rest = (rest.0 + a, rest.1 + b);
        } else {
            add(a, b);
        }
    }
    if rest.0 + rest.1 > 0.0 {
        add(rest.0, rest.1);
    }
    (sum, n_bins - 1)
}

/// The value that chi-square exceeds by chance once in 10,000 times (Wilson and Hilferty, 1931).
fn bound(n_degrees: usize) -> f64 {
    let n = n_degrees as f64;
    let scale = 2.0 / (9.0 * n);
    n * (1.0 - scale + 3.719 * scale.sqrt()).powi(3)
}

/// Fault case L04 in whole steps: of 4,096 requests each.
#[test]
fn drafts_do_not_change_how_often_tokens_come() {
    for (model, sample) in [("tiny-dsv3", 10), ("tiny-glm52", 20)] {
        let (direct, _) = draw(model, 0, DraftSampling::Greedy, (sample, 0.8));
        for (sampling, sample) in
            [(DraftSampling::Greedy, sample + 1), (DraftSampling::Sampled, sample + 2)]
        {
            let (drafted, n_accepted) = draw(model, 3, sampling, (sample, 0.8));
            let (found, n_degrees) = chi_square(&direct, &drafted);
            let what = format!("{model}, {sampling:?}: {found} of {n_degrees} degrees");
            assert!(n_degrees >= 10 && n_accepted > 0.1, "{what}: {n_accepted} shows something");
            assert!(found < bound(n_degrees), "{what}");
        }
        if model == "tiny-glm52" {
            continue;
        }
        // As sharp as to tell a little less heat.
        let (cooler, _) = draw(model, 0, DraftSampling::Greedy, (sample + 3, 0.7));
        let (found, n_degrees) = chi_square(&direct, &cooler);
        assert!(found > bound(n_degrees), "{model}: {found} of {n_degrees} degrees");
    }
}

#[test]
fn the_bound_is_that_of_tables() {
    // The 99.99th percentiles of 10 and 63 degrees of freedom are 35.56 and 113.5.
    assert!((bound(10) - 35.56).abs() < 0.5 && (bound(63) - 113.5).abs() < 0.5);
}

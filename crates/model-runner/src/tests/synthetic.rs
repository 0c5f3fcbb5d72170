//! Acceptance by a schedule.

use engine_types::SamplingParams;
use spec_decode::SyntheticAcceptance;

use super::driver::{Feed, Job, run};
use super::{load, options, oracle, runner_of};
use crate::limits::{DraftSampling, RunnerOptions};
use crate::runner::Runner;

const WHOLE: Feed = Feed { chunk: 4096, poison: false, deferred: false };

fn synthetic(length: f64) -> RunnerOptions {
    let synthetic_acceptance = Some(SyntheticAcceptance::from_length(length, 3).unwrap());
    RunnerOptions { synthetic_acceptance, ..options(3) }
}

/// One draft of each window is accepted for sure and the second half the time: of about 320 steps
/// the mean is within four standard errors, 0.112. The first verify step comes at once, so that the
/// drafts are those of the drafter.
#[test]
fn accepted_drafts_follow_the_schedule() {
    for deferred in [false, true] {
        let cases = oracle::cases("tiny-glm52");
        let jobs = cases.iter().map(|(prompt, _)| Job::new(prompt, 60, 3)).collect();
        let mut runner = runner_of("tiny-glm52", &synthetic(2.5));
        let done = run(&mut runner, jobs, Feed { deferred, ..WHOLE });
        let accepted: Vec<u32> = done.iter().flat_map(|job| job.accepted.clone()).collect();
        assert!(
            accepted.len() > 300 && accepted.iter().all(|n| [1, 2].contains(n)),
            "{accepted:?}"
        );
        let mean = f64::from(accepted.iter().sum::<u32>()) / accepted.len() as f64;
        assert!((mean - 1.5).abs() < 0.112, "{mean}");
        for job in &done {
            let first = job.accepted[0] as usize;
            assert_eq!(job.generated()[1..=first], job.proposed[0][..first]);
        }
    }
}

/// What the mode cannot honour is refused for the request alone; log probabilities it can.
#[test]
fn what_synthetic_acceptance_cannot_honour_fails_alone() {
    let prompt = &oracle::cases("tiny-dsv3")[0].0;
    let base = SamplingParams { seed: Some(1), logprobs: Some(1), ..SamplingParams::default() };
    let sampled = SamplingParams { temperature: 0.5, ..base.clone() };
    let plain = Job::new(prompt, 9, 3);
    let mut masked = plain.clone();
    masked.mask = vec![u32::MAX; 128];
    let jobs = vec![plain.clone().sampled(base, &[]), plain.sampled(sampled, &[]), masked];
    let done = run(&mut runner_of("tiny-dsv3", &synthetic(4.0)), jobs, WHOLE);
    assert_eq!((done[0].generated().len(), done[0].logprobs.len()), (9, 9));
    assert!(done[0].accepted.iter().all(|&n| n == 3));
    for job in &done[1..] {
        assert!(job.failure.as_ref().unwrap().contains("with synthetic acceptance"));
        assert!(job.generated().is_empty() && job.logprobs.is_empty());
    }
}

#[test]
fn drafting_that_cannot_be_is_refused() {
    let refusal = |options: RunnerOptions| {
        let model = load("tiny-dsv3", options.num_speculative_tokens > 0);
        Runner::new(model, &options).err().unwrap().to_string()
    };
    let other = refusal(RunnerOptions { num_speculative_tokens: 2, ..synthetic(2.0) });
    assert!(other.contains("a schedule for 3 drafts, but num_speculative_tokens is 2"), "{other}");
    let sampled = DraftSampling::Sampled;
    let undrafted = refusal(RunnerOptions { draft_sampling: sampled, ..options(0) });
    assert!(undrafted.contains("num_speculative_tokens is 0"), "{undrafted}");
    let both = refusal(RunnerOptions { draft_sampling: sampled, ..synthetic(2.0) });
    assert!(both.contains("draft_sampling is sampled, but with synthetic acceptance"), "{both}");
}

//! Adaptive drafting against every fixed length, over measured and random acceptance.

#[path = "../benches/drafting/replay.rs"]
mod replay;

use scheduler::{AdaptiveDrafting, DraftPolicy, DraftingCosts};

use crate::replay::{K_MAX, best_fixed, replay, workloads};

#[test]
fn adaptive_drafting_keeps_up_with_the_best_fixed_length() {
    let rule = AdaptiveDrafting::default();
    let policy = DraftPolicy::Adaptive(rule);
    let (mut sum, mut n) = (0.0, 0.0);
    for workload in workloads() {
        let mut lengths = vec![];
        for n_requests in [1, 4, 16, 64, 256] {
            let (best, best_rate) = best_fixed(&workload, &rule.costs, n_requests);
            let found = replay(&workload, &policy, K_MAX, &rule.costs, n_requests);
            let ratio = found.rate / best_rate;
            let what = format!("{}, {n_requests} requests, k = {best}", workload.name);
            assert!(ratio > 0.94, "{what}: {ratio}");
            let undrafted = replay(&workload, &DraftPolicy::Fixed, 0, &rule.costs, n_requests);
            let by_undrafted = found.rate / undrafted.rate;
            assert!(by_undrafted > 0.97, "{what}: {by_undrafted} of no drafts");
            sum += ratio;
            n += 1.0;
            lengths.push(found.mean_length);
        }
        // Where only probes are left, the texts decide how many fit.
        let is_no_longer = |a: &f64, b: &f64| *b < a + 0.01;
        assert!(lengths.is_sorted_by(is_no_longer), "{}: {lengths:?}", workload.name);
    }
    assert!(sum / n > 0.99, "{} on average", sum / n);
}

#[test]
fn hopeless_drafts_are_only_probed() {
    // A draft costs less than a step of 64 requests, so that probes pay there as well.
    let costs = DraftingCosts { step: 580, request: 96, draft_step: 275, draft: 90 };
    let rule = AdaptiveDrafting { costs, ..AdaptiveDrafting::default() };
    let policy = DraftPolicy::Adaptive(rule);
    let hopeless = workloads().into_iter().find(|workload| workload.name == "0 %");
    let hopeless = hopeless.expect("it is among them");
    for n_requests in [1, 64] {
        let run = |policy, k| replay(&hopeless, policy, k, &rule.costs, n_requests).rate;
        let ratio = run(&policy, K_MAX) / run(&DraftPolicy::Fixed, 0);
        // Beside the probes there are a few drafts until the first estimate is corrected.
        assert!((0.98..0.99).contains(&ratio), "{n_requests} requests: {ratio}");
    }
}

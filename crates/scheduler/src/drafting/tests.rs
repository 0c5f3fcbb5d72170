//! Tests of the length rule against a plain search.

use super::*;

/// A request whose drafts are accepted with this probability, in `1 / ONE`.
fn accepting(rate: u32) -> Acceptance {
    Acceptance { n_tried: ONE, n_accepted: rate, n_idle: 0 }
}

fn rates() -> impl Iterator<Item = u32> {
    (0..=64).map(|n| n * ONE / 64)
}

fn adaptive(costs: [u32; 4]) -> AdaptiveDrafting {
    let [step, request, draft_step, draft] = costs;
    let costs = DraftingCosts { step, request, draft_step, draft };
    AdaptiveDrafting { costs, ..AdaptiveDrafting::default() }
}

const COSTS: [[u32; 4]; 6] = [
    [580, 96, 275, 90],
    [10_000, 20, 300, 20],
    [0, 1, 0, 1],
    [5, 1, 0, 0],
    [1, 1, 10, 10],
    [MAX_COST; 4],
];
/// Costs of a machine on which drafts pay longer than by the default.
fn cheap() -> AdaptiveDrafting {
    adaptive(COSTS[0])
}

const BATCHES: [u32; 7] = [0, 1, 2, 16, 64, 1024, u32::MAX];

#[test]
fn the_length_has_the_most_tokens_by_cost() {
    for costs in COSTS {
        let rule = adaptive(costs);
        let [step, request, draft_step, draft] = costs.map(f64::from);
        for (rate, n_running) in rates().flat_map(|rate| BATCHES.map(|n| (rate, n))) {
            let n = f64::from(n_running.clamp(1, MAX_REQUESTS));
            let a = f64::from(rate) / f64::from(ONE);
            let gain = |k: u32| {
                let tokens: f64 = (0..=k).map(|i| a.powi(i32::try_from(i).unwrap())).sum();
                let drafts = f64::from(k) * (draft_step + n * draft) * 17.0 / 16.0;
                tokens / (step + n * request + drafts)
            };
            for k_max in 0..=8 {
                let length = rule.draft_length(k_max, &accepting(rate), n_running);
                assert!(length <= k_max);
                let best = (0..=k_max).map(gain).fold(0.0, f64::max);
                let found = gain(length);
                // The rule's numbers have 16 bits behind the point.
                assert!(found >= best * 0.9999, "{costs:?}, rate {a}, {n} requests: {length}");
            }
        }
    }
}

#[test]
fn lengths_rise_with_acceptance_and_fall_with_the_batch() {
    let rule = cheap();
    for n_running in BATCHES {
        let lengths = rates().map(|rate| rule.draft_length(8, &accepting(rate), n_running));
        assert!(lengths.is_sorted(), "{n_running} requests");
    }
    for rate in rates() {
        let lengths = BATCHES.map(|n| rule.draft_length(8, &accepting(rate), n));
        assert!(lengths.is_sorted_by(|a, b| a >= b), "rate {rate}: {lengths:?}");
    }
    let [good, bad] = [ONE * 19 / 20, ONE / 4].map(accepting);
    let lengths = [1, 4, 16, 64].map(|n| rule.draft_length(8, &good, n));
    assert_eq!(lengths, [4, 3, 2, 0]);
    assert_eq!([1, 64].map(|n| rule.draft_length(8, &bad, n)), [0, 0]);
}

#[test]
fn a_fixed_length_is_always_the_largest() {
    for n_running in BATCHES {
        assert_eq!(DraftPolicy::Fixed.draft_length(5, &accepting(0), n_running), 5);
    }
}

#[test]
fn drafts_behind_a_rejected_one_are_not_counted() {
    let after = |n_drafts, n_accepted| {
        let mut acceptance = Acceptance::default();
        acceptance.record(n_drafts, n_accepted);
        acceptance
    };
    assert_eq!(after(8, 2), after(3, 2));
    assert_ne!(after(3, 2), after(2, 2));
    let (tried, accepted) = (4 * ONE - ONE / 4 + 3 * ONE, 3 * ONE - 3 * ONE / 16 + 2 * ONE);
    assert_eq!(after(8, 2), Acceptance { n_tried: tried, n_accepted: accepted, n_idle: 0 });
}

#[test]
fn a_steady_acceptance_is_found() {
    for (n_accepted, expected) in [(0, 0.0), (1, 0.5), (4, 0.8), (8, 1.0)] {
        let mut acceptance = Acceptance::default();
        (0..200).for_each(|_| acceptance.record(8, n_accepted));
        let rate = f64::from(acceptance.rate()) / f64::from(ONE);
        assert!((rate - expected).abs() < 0.001, "{n_accepted} of 8: {rate}");
    }
}

#[test]
fn one_draft_is_tried_when_the_steps_since_the_last_one_cost_enough() {
    let policy = DraftPolicy::Adaptive(cheap());
    // A step without drafts costs 6,724 and a draft position 6,035, which counts as 6,412, with 64
    // requests; 676, 365 and 388 with one.
    for (n_running, interval) in [(64, 62), (1, 37)] {
        let mut acceptance = accepting(0);
        for step in 1..1000 {
            let length = policy.draft_length(8, &acceptance, n_running);
            let is_due = step % (interval + 1) == 0;
            assert_eq!(length, u32::from(is_due), "step {step} of {n_running} requests");
            acceptance.record(length, 0);
        }
    }
    assert_eq!(policy.draft_length(0, &Acceptance { n_idle: 99, ..accepting(0) }, 64), 0);
}

#[test]
fn nothing_is_tried_where_not_even_an_accepted_draft_pays() {
    let dear = adaptive([1, 1, 10, 10]);
    let idle = Acceptance { n_idle: u32::MAX, ..accepting(ONE) };
    assert_eq!(dear.draft_length(8, &idle, 1), 0);
}

#[test]
fn a_request_whose_drafts_become_good_drafts_again() {
    let policy = DraftPolicy::Adaptive(cheap());
    let mut acceptance = Acceptance::default();
    (0..1000).for_each(|_| acceptance.record(3, 0));
    (0..1000).for_each(|_| acceptance.record(0, 0));
    let mut n_steps = 0;
    while policy.draft_length(8, &acceptance, 4) < 3 {
        let length = policy.draft_length(8, &acceptance, 4);
        acceptance.record(length, length);
        n_steps += 1;
    }
    assert!(n_steps < 200, "{n_steps} steps");
}

#[test]
fn counts_stay_in_their_bounds_for_ever() {
    let mut acceptance = Acceptance { n_idle: u32::MAX, ..Acceptance::default() };
    acceptance.record(0, 0);
    for step in 0..100_000 {
        let n_drafts = if step % 1000 < 500 { 8 } else { 0 };
        acceptance.record(n_drafts, n_drafts);
        assert!(acceptance.n_accepted <= acceptance.n_tried && acceptance.n_tried >= ONE / 2);
    }
}

#[test]
#[should_panic(expected = "accepted drafts were verified")]
fn more_accepted_than_drafted_is_a_broken_invariant() {
    Acceptance::default().record(1, 2);
}

#[test]
fn fields_outside_their_range_are_named() {
    let error = |costs, probe_share| {
        let rule = AdaptiveDrafting { probe_share, ..adaptive(costs) };
        DraftPolicy::Adaptive(rule).validate().map_err(|error| error.to_string())
    };
    assert_eq!(error([0, 1, 0, 0], 1), Ok(()));
    assert_eq!(error([MAX_COST; 4], 65_536), Ok(()));
    let refused = |costs, share, expected: &str| {
        assert_eq!(error(costs, share), Err(expected.to_owned()));
    };
    let above = MAX_COST + 1;
    refused([above, 1, 0, 0], 1, "drafting.costs.step is 10000001 and must be 0 to 10000000");
    refused([0, 0, 0, 0], 1, "drafting.costs.request is 0 and must be 1 to 10000000");
    refused([0, 1, above, 0], 1, "drafting.costs.draft_step is 10000001 and must be 0 to 10000000");
    refused([0, 1, 0, above], 1, "drafting.costs.draft is 10000001 and must be 0 to 10000000");
    refused([0, 1, 0, 0], 0, "drafting.probe_share is 0 and must be 1 to 65536");
    assert_eq!(DraftPolicy::Fixed.validate(), Ok(()));
    assert_eq!(DraftPolicy::default().validate(), Ok(()));
}

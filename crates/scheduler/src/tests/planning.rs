//! What plans look like.

use engine_types::RequestId;

use super::support::{Rig, config, limits, request};

/// Plans the first step for prompts of these lengths and returns its query lengths.
fn first_chunks(budget: u32, prompts: &[u32]) -> Vec<u32> {
    let mut limits = limits(4, 400);
    limits.max_model_len = 1000;
    limits.max_num_batched_tokens = budget;
    let mut rig = Rig::new(config(0), limits);
    for (id, &n_prompt) in (0..).zip(prompts) {
        rig.submit(id, n_prompt, 4);
    }
    rig.plan();
    rig.plan.rows().iter().map(|row| row.n_query).collect()
}

#[test]
fn chunks_fill_the_budget_in_aligned_steps() {
    assert_eq!(first_chunks(192, &[128, 128]), [128, 64]);
    assert_eq!(first_chunks(200, &[128, 128, 128]), [128, 64]);
    assert_eq!(first_chunks(6, &[10]), [6]);
    assert_eq!(first_chunks(70, &[8, 70, 8]), [8]);
    assert_eq!(first_chunks(64, &[1, 2, 3]), [1, 2, 3]);
}

#[test]
fn chunks_carry_the_token_that_follows() {
    let mut limits = limits(4, 16);
    limits.max_num_batched_tokens = 6;
    limits.n_lookahead_max = 2;
    let mut rig = Rig::new(config(3), limits);
    rig.submit(1, 13, 8);
    let mut seen = vec![];
    for _ in 0..3 {
        rig.plan();
        let row = rig.plan.rows()[0];
        let lookahead = rig.plan.lookahead(&row).to_vec();
        seen.push((row.n_computed, row.n_query, row.samples, row.n_propose, lookahead));
        rig.apply();
    }
    assert_eq!(seen[0], (0, 6, false, 0, vec![106, 107]));
    assert_eq!(seen[1], (6, 6, false, 0, vec![112]));
    assert_eq!(seen[2], (12, 1, true, 3, vec![]));
}

#[test]
fn outputs_and_prompts_share_a_step() {
    let mut rig = Rig::new(config(3), limits(4, 16));
    rig.submit(1, 6, 20);
    rig.step();
    rig.submit(2, 5, 20);
    rig.plan();
    assert_eq!(rig.rows(), [(1, 6, 4, 3), (2, 0, 5, 0)]);
    assert_eq!(rig.plan.tokens(&rig.plan.rows()[0]), [106, 107, 108, 109]);
    assert_eq!(rig.plan.drafts(&rig.plan.rows()[0]), [107, 108, 109]);
    rig.apply();
    rig.step();
    let stats = rig.stats();
    assert_eq!((stats.n_prefill_steps, stats.n_mixed_steps, stats.n_decode_steps), (1, 1, 1));
}

#[test]
fn valid_lengths_advance_by_what_was_accepted() {
    let mut rig = Rig::new(config(3), limits(4, 16));
    rig.n_right = 1;
    rig.submit(1, 6, 9);
    let mut starts = vec![];
    while rig.plan() {
        starts.push(rig.rows()[0].1);
        rig.apply();
    }
    assert_eq!(starts, [0, 6, 8, 10, 12]);
    assert_eq!(rig.tokens(1), (106..115).collect::<Vec<_>>());
    let spec = rig.stats().spec_decode;
    assert_eq!((spec.n_verify_steps, spec.n_accepted_tokens), (4, 4));
}

#[test]
fn right_drafts_are_all_used() {
    for k in 0..=8 {
        let mut rig = Rig::new(config(k), limits(4, 16));
        rig.submit(1, 3, 1 + 4 * (k + 1));
        rig.drain();
        let expected = (k > 0).then(|| f64::from(k + 1));
        assert_eq!(rig.stats().spec_decode.acceptance_length(), expected);
    }
}

#[test]
fn nothing_is_planned_outside_the_model() {
    let mut limits = limits(4, 16);
    limits.max_model_len = 12;
    let mut rig = Rig::new(config(8), limits);
    rig.n_right = 0;
    rig.submit(1, 6, 20);
    while rig.plan() {
        for row in rig.plan.rows() {
            let n_written = row.n_computed + row.n_query + row.n_propose.saturating_sub(1);
            assert!(n_written <= 12, "{row:?}");
        }
        rig.apply();
    }
    assert_eq!(rig.tokens(1), (106..112).collect::<Vec<_>>());
}

#[test]
fn a_blocked_head_is_not_skipped() {
    let mut rig = Rig::new(config(0), limits(4, 4));
    rig.submit(1, 8, 4);
    rig.submit(2, 12, 4);
    rig.submit(3, 1, 4);
    rig.plan();
    assert_eq!(rig.rows(), [(1, 0, 8, 0)]);
    rig.apply();
    rig.drain();
    assert_eq!(rig.stats().n_finished, 3);
}

#[test]
fn a_preempted_request_waits_until_it_can_stay() {
    let mut rig = Rig::new(config(0), limits(4, 5));
    rig.submit(1, 6, 12);
    rig.submit(2, 2, 6);
    rig.submit(3, 5, 6);
    rig.drain();
    // When request 2 ends, the blocks of request 3 fit, but request 1 is about to need one of them.
    assert_eq!(rig.stats().n_preemptions, 1);
    assert_eq!(rig.tokens(1), (106..118).collect::<Vec<_>>());
    assert_eq!(rig.tokens(3), (105..111).collect::<Vec<_>>());
}

#[test]
fn a_failed_step_fails_its_requests_alone() {
    let mut limits = limits(4, 16);
    limits.max_num_seqs = 1;
    let mut rig = Rig::new(config(0), limits);
    rig.submit(1, 4, 4);
    rig.submit(2, 4, 4);
    rig.plan();
    rig.fail();
    rig.drain();
    let failed = engine_types::FinishReason::Failed("broken".to_owned());
    assert_eq!(rig.reason(1), Some(failed));
    assert_eq!(rig.tokens(2).len(), 4);
}

#[test]
#[should_panic(expected = "every planned row has one outcome row")]
fn a_missing_outcome_row_is_noticed() {
    let mut rig = Rig::new(config(0), limits(4, 16));
    rig.submit(1, 4, 4);
    rig.plan();
    rig.scheduler.apply(&rig.plan, &Default::default(), &mut rig.events);
}

#[test]
fn a_row_of_an_aborted_request_is_ignored() {
    let mut rig = Rig::new(config(3), limits(4, 16));
    rig.submit(1, 4, 4);
    rig.submit(2, 4, 4);
    rig.plan();
    assert!(rig.scheduler.abort(RequestId(1), &mut rig.events));
    rig.apply();
    rig.drain();
    assert!(rig.tokens(1).is_empty());
    assert_eq!(rig.tokens(2).len(), 4);
}

#[test]
fn a_row_of_an_aborted_request_is_not_its_successors() {
    let mut rig = Rig::new(config(0), limits(4, 16));
    rig.submit(1, 4, 4);
    rig.plan();
    assert!(rig.scheduler.abort(RequestId(1), &mut rig.events));
    // It takes the place of request 1 while the step with its row runs.
    rig.submit(2, 6, 4);
    rig.apply();
    assert!(rig.tokens(1).is_empty() && rig.tokens(2).is_empty());
    rig.drain();
    assert_eq!(rig.tokens(2), (106..110).collect::<Vec<_>>());
}

#[test]
fn a_request_may_ask_for_fewer_drafts() {
    let mut rig = Rig::new(config(3), limits(4, 16));
    for (id, k) in [(0, Some(0)), (1, Some(1)), (2, None)] {
        let mut request = request(id, 4, 20);
        request.params.num_speculative_tokens = k;
        rig.scheduler.submit(request).unwrap();
    }
    rig.plan();
    let rows = rig.plan.rows().iter();
    let proposals: Vec<_> = rows.map(|row| (row.n_propose, row.drafting)).collect();
    assert_eq!(proposals, [(0, false), (1, true), (3, true)]);
    rig.apply();
    rig.plan();
    assert_eq!(rig.rows(), [(0, 4, 1, 0), (1, 4, 2, 1), (2, 4, 4, 3)]);
}

#[test]
fn a_preempted_request_waits_for_the_drafts_of_the_others() {
    for n_right in 0..=3 {
        let mut rig = Rig::new(config(3), limits(4, 8));
        rig.n_right = n_right;
        rig.submit(1, 8, 14);
        rig.submit(2, 8, 6);
        rig.submit(3, 8, 14);
        rig.drain();
        // When request 2 ends, there is room for request 3 and one more token of request 1, but
        // not for the drafts of request 1.
        assert_eq!(rig.stats().n_preemptions, 1, "{n_right}");
    }
}

#[test]
fn nothing_is_proposed_behind_a_sure_end() {
    // The last token that the request wants, and the last one that the model has room for.
    for (n_prompt, max_tokens) in [(4, 1), (63, 20)] {
        let mut rig = Rig::new(config(3), limits(4, 16));
        rig.submit(1, n_prompt, max_tokens);
        rig.plan();
        assert_eq!(rig.plan.rows()[0].n_propose, 0);
        rig.apply();
        assert!(rig.reason(1).is_some());
    }
}

#[test]
fn proposals_are_given_up_before_drafts() {
    let mut rig = Rig::new(config(3), limits(4, 4));
    rig.submit(1, 8, 20);
    rig.step();
    rig.step();
    // Of the 16 slots 12 hold tokens; token and drafts take the rest, and one proposal takes none.
    rig.plan();
    assert_eq!(rig.rows(), [(1, 12, 4, 3)]);
    assert_eq!(rig.plan.rows()[0].n_propose, 1);
}

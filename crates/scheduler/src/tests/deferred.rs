//! A step that is planned before the tokens of the step before are known.

use engine_types::{FinishReason, Request, RequestEvent, RequestId};

use super::support::{Rig, deferred, limits, request};
use crate::SchedulerConfig;

fn broken() -> Option<FinishReason> {
    Some(FinishReason::Failed("broken".to_owned()))
}

fn text(from: u32, to: u32) -> Vec<u32> {
    (100 + from..100 + to).collect()
}

/// Submits a request that ends with its output token at `position`.
fn submit_until(rig: &mut Rig, id: u64, n_prompt: u32, position: u32) {
    let mut request = request(id, n_prompt, 40);
    request.params.stop_token_ids = vec![100 + position];
    rig.scheduler.submit(request).unwrap();
}

#[test]
fn rows_name_the_rows_that_they_continue() {
    for k in [0, 3] {
        let mut rig = Rig::new(deferred(k), limits(4, 16));
        rig.submit(1, 6, 20);
        rig.submit(2, 5, 20);
        rig.plan();
        assert_eq!((rig.rows(), rig.sources()), (vec![(1, 0, 6, 0), (2, 0, 5, 0)], vec![None; 2]));
        // The tokens of neither step are known now.
        rig.plan();
        assert_eq!(rig.rows(), [(1, 6, 1 + k, k), (2, 5, 1 + k, k)]);
        assert_eq!(rig.sources(), [Some(0), Some(1)]);
        assert!(rig.plan.all_tokens().is_empty());
        let starts = [1, 2].map(|id| RequestEvent::Started { request_id: RequestId(id) });
        assert_eq!(rig.events, starts);
        rig.apply();
        assert_eq!((rig.tokens(1), rig.tokens(2)), (text(6, 7), text(5, 6)));
        rig.scheduler.abort(RequestId(1), &mut rig.events);
        rig.plan();
        assert_eq!((rig.rows(), rig.sources()), (vec![(2, 6, 1 + k, k)], vec![Some(1)]));
        rig.drain();
        assert_eq!(rig.tokens(2), text(5, 25));
        assert_eq!(rig.stats().blocks.n_used, 0);
    }
}

#[test]
#[should_panic(expected = "the step before is collected first")]
fn no_more_than_two_steps_are_in_flight() {
    let mut rig = Rig::new(deferred(0), limits(4, 16));
    rig.submit(1, 6, 20);
    (0..3).for_each(|_| assert!(rig.plan()));
}

#[test]
fn chunks_of_prompts_need_no_outcome() {
    let mut limits = limits(4, 16);
    limits.max_num_batched_tokens = 6;
    let mut rig = Rig::new(deferred(3), limits);
    rig.submit(1, 13, 4);
    for row in [(1, 0, 6, 0), (1, 6, 6, 0), (1, 12, 1, 0)] {
        rig.plan_next();
        assert_eq!((rig.rows(), rig.sources()), (vec![row], vec![None]));
    }
    rig.plan_next();
    assert_eq!((rig.rows(), rig.sources()), (vec![(1, 13, 4, 3)], vec![Some(0)]));
    rig.drain();
    assert_eq!(rig.tokens(1), text(13, 17));
}

#[test]
fn who_surely_ends_in_flight_has_no_row() {
    // The last token that the request wants, and the last one that the model has room for.
    for (n_prompt, max_tokens, n_rows) in [(4, 1, 1), (4, 2, 2), (63, 9, 1), (62, 9, 2)] {
        let mut rig = Rig::new(deferred(0), limits(4, 16));
        rig.submit(1, n_prompt, max_tokens);
        (0..n_rows).for_each(|_| assert!(rig.plan_next()));
        if n_rows == 2 {
            rig.apply();
        }
        assert!(!rig.plan(), "it ends with the step in flight");
        assert_eq!(rig.reason(1), None);
        rig.apply();
        assert!(rig.reason(1).is_some());
        assert_eq!(rig.scheduler.n_in_flight(), 0);
    }
}

#[test]
fn who_ends_in_flight_has_a_row_that_nobody_reads() {
    for k in [0, 3] {
        for last in 6..12 {
            let mut rig = Rig::new(deferred(k), limits(4, 16));
            submit_until(&mut rig, 1, 6, last);
            rig.submit(2, 5, 20);
            while rig.reason(1).is_none() {
                rig.step();
            }
            assert_eq!(rig.scheduler.n_in_flight(), 1, "its next row is in flight");
            // It takes the place of request 1, whose row is still to come.
            rig.submit(3, 2, 4);
            rig.drain();
            assert_eq!(rig.reason(1), Some(FinishReason::StopToken(100 + last)));
            assert_eq!(rig.tokens(1), text(6, last + 1));
            assert_eq!((rig.tokens(2), rig.tokens(3)), (text(5, 25), text(2, 6)));
            let n_tokens = u64::from(last - 5) + 20 + 4;
            assert_eq!(rig.stats().n_generated_tokens, n_tokens);
            assert_eq!((rig.stats().n_finished, rig.stats().blocks.n_used), (3, 0));
        }
    }
}

#[test]
fn eos_ends_a_run_that_was_in_flight() {
    let config = SchedulerConfig { eos_token_ids: vec![108], ..deferred(3) };
    let mut rig = Rig::new(config, limits(4, 16));
    rig.submit(1, 6, 20);
    rig.drain();
    assert_eq!(rig.reason(1), Some(FinishReason::Eos(108)));
    assert_eq!(rig.tokens(1), text(6, 9));
    let spec = rig.stats().spec_decode;
    // Of the three right drafts of the second step, the first is kept beside its last, the EOS.
    assert_eq!((spec.n_verify_steps, spec.n_accepted_tokens), (1, 1));
}

#[test]
fn a_request_may_end_with_one_and_two_steps_in_flight() {
    for k in [0, 3] {
        for n_in_flight in [1, 2] {
            for expires in [false, true] {
                let mut rig = Rig::new(deferred(k), limits(4, 16));
                rig.submit(1, 6, 20);
                rig.submit(2, 5, 12);
                (0..n_in_flight).for_each(|_| assert!(rig.plan()));
                let id = RequestId(1);
                let (was_there, reason) = if expires {
                    let was_there = rig.scheduler.expire(id, &mut rig.events);
                    (was_there, FinishReason::DeadlineExceeded)
                } else {
                    (rig.scheduler.abort(id, &mut rig.events), FinishReason::Aborted)
                };
                assert!(was_there);
                rig.scheduler.check_invariants();
                if n_in_flight == 2 {
                    rig.apply();
                }
                rig.drain();
                assert_eq!((rig.reason(1), rig.tokens(1)), (Some(reason), vec![]));
                assert_eq!(rig.tokens(2), text(5, 17));
                assert_eq!(rig.stats().blocks.n_used, 0);
            }
        }
    }
}

/// Request 1 has just taken the blocks of request 2, whose row is in flight and emits the last of
/// the tokens that are returned.
fn preempted_in_flight(k: u32, change: impl FnOnce(&mut Request)) -> (Rig, Vec<u32>) {
    // Where request 1 has no row it needs a block, unless it ends with its token in flight.
    let plans: &[&[_]] = match k {
        0 => &[&[(1, 0, 8, 0), (2, 0, 5, 0)], &[(2, 5, 1, 0)], &[(1, 8, 1, 0)]],
        _ => &[
            &[(1, 0, 8, 0), (2, 0, 5, 0)],
            &[(1, 8, 4, 3), (2, 5, 1, 0)],
            &[(2, 6, 2, 1)],
            &[(1, 12, 2, 1)],
        ],
    };
    let mut rig = Rig::new(deferred(k), limits(4, if k == 0 { 4 } else { 5 }));
    rig.submit(1, 8, 7);
    let mut second = request(2, 5, 9);
    change(&mut second);
    rig.scheduler.submit(second).unwrap();
    for rows in plans {
        assert_eq!(rig.stats().n_preemptions, 0);
        rig.plan_next();
        assert_eq!(&rig.rows(), rows);
    }
    assert_eq!((rig.stats().n_preemptions, rig.stats().n_preempted), (1, 1));
    assert_eq!(rig.stats().blocks.n_used, if k == 0 { 3 } else { 4 }, "request 1 has them");
    (rig, text(5, if k == 0 { 7 } else { 9 }))
}

#[test]
fn what_a_preempted_request_has_in_flight_is_committed() {
    for k in [0, 3] {
        let (mut rig, tokens) = preempted_in_flight(k, |_| {});
        assert!(rig.tokens(2).len() < tokens.len());
        rig.apply();
        assert_eq!(rig.tokens(2), tokens);
        while rig.reason(1).is_none() {
            rig.step();
            assert_eq!(rig.tokens(2), tokens, "it has no room before request 1 ends");
        }
        rig.drain();
        assert_eq!((rig.tokens(1), rig.tokens(2)), (text(8, 15), text(5, 14)));
        assert_eq!((rig.stats().n_preemptions, rig.stats().blocks.n_used), (1, 0));
    }
}

#[test]
fn a_preempted_request_does_not_come_back_before_its_tokens() {
    for k in [0, 3] {
        let (mut rig, tokens) = preempted_in_flight(k, |_| {});
        // Now there is room, but its tokens are not known yet.
        rig.scheduler.abort(RequestId(1), &mut rig.events);
        assert_eq!(rig.stats().blocks.n_used, 0);
        rig.apply();
        rig.plan();
        let n_tokens = 5 + tokens.len() as u32;
        assert_eq!((rig.rows(), rig.sources()), (vec![(2, 0, n_tokens, 0)], vec![None]));
        rig.drain();
        assert_eq!(rig.tokens(2), text(5, 14));
    }
}

#[test]
fn a_preempted_request_does_not_come_back_in_the_same_plan() {
    let config = SchedulerConfig { enable_prefix_caching: true, ..deferred(0) };
    let mut rig = Rig::new(config, limits(4, 4));
    rig.submit(1, 8, 3);
    rig.submit(2, 7, 5);
    // Of request 2, a block of its own goes to request 1, whose first block it could share now.
    for rows in [&[(1, 0, 8, 0), (2, 0, 7, 0)][..], &[(2, 7, 1, 0)], &[(1, 8, 1, 0)]] {
        rig.plan_next();
        assert_eq!(rig.rows(), rows);
    }
    assert_eq!(rig.stats().blocks.n_free, 1);
    rig.plan_next();
    // With its token in flight it has two whole blocks in common.
    assert_eq!(rig.rows(), [(1, 9, 1, 0), (2, 8, 1, 0)]);
    rig.drain();
    assert_eq!((rig.tokens(1), rig.tokens(2)), (text(8, 11), text(7, 12)));
}

#[test]
fn a_preempted_request_may_end_with_its_tokens_in_flight() {
    for k in [0, 3] {
        let n_tokens = if k == 0 { 2 } else { 4 };
        let (mut rig, tokens) =
            preempted_in_flight(k, |r| r.params.stop_token_ids = vec![104 + n_tokens]);
        rig.apply();
        assert_eq!(rig.reason(2), Some(FinishReason::StopToken(104 + n_tokens)));
        assert_eq!((rig.tokens(2), rig.stats().n_preempted), (tokens, 0));
        rig.drain();
        assert_eq!((rig.tokens(1), rig.stats().blocks.n_used), (text(8, 15), 0));
    }
}

#[test]
fn a_preempted_request_may_end_before_its_tokens_come() {
    for k in [0, 3] {
        let (mut rig, _) = preempted_in_flight(k, |_| {});
        let n_known = rig.tokens(2).len();
        rig.fail();
        assert_eq!((rig.reason(2), rig.tokens(2).len()), (broken(), n_known));
        assert_eq!((rig.reason(1), rig.stats().n_preempted), (None, 0));
        rig.drain();
        assert_eq!(rig.tokens(1), text(8, 15));

        let (mut rig, _) = preempted_in_flight(k, |_| {});
        rig.scheduler.abort(RequestId(2), &mut rig.events);
        rig.scheduler.check_invariants();
        rig.drain();
        assert_eq!((rig.reason(2), rig.tokens(2).len()), (Some(FinishReason::Aborted), n_known));
        assert_eq!((rig.tokens(1), rig.stats().n_preempted), (text(8, 15), 0));
    }
}

#[test]
fn nobody_loses_blocks_to_tokens_that_do_not_come() {
    let mut rig = Rig::new(deferred(0), limits(4, 4));
    submit_until(&mut rig, 1, 8, 8);
    rig.submit(2, 5, 9);
    rig.drain();
    assert_eq!((rig.tokens(1), rig.tokens(2)), (text(8, 9), text(5, 14)));
    assert_eq!(rig.stats().n_preemptions, 0);
}

#[test]
fn limits_hold_whatever_is_in_flight() {
    for k in 0..=8 {
        for n_right in 0..=k {
            let mut limits = limits(4, 16);
            limits.max_model_len = 21;
            let mut rig = Rig::new(deferred(k), limits);
            rig.n_right = n_right;
            rig.submit(1, 6, 12);
            rig.submit(2, 9, 40);
            // The rig checks that no row writes outside the model.
            rig.drain();
            assert_eq!(rig.tokens(1), text(6, 18), "{k} {n_right}");
            assert_eq!(rig.tokens(2), text(9, 21), "{k} {n_right}");
            assert_eq!(rig.reason(1), Some(FinishReason::MaxTokens));
            assert_eq!(rig.reason(2), Some(FinishReason::ModelLength));
        }
    }
}

#[test]
fn a_failed_step_ends_those_that_it_had_a_row_of() {
    for k in [0, 3] {
        let mut rig = Rig::new(deferred(k), limits(4, 16));
        rig.submit(1, 6, 20);
        rig.plan();
        rig.submit(2, 5, 9);
        rig.plan();
        assert_eq!(rig.sources(), [Some(0), None]);
        rig.fail();
        assert_eq!((rig.reason(1), rig.reason(2)), (broken(), None));
        rig.plan();
        assert_eq!((rig.rows(), rig.sources()), (vec![(2, 5, 1 + k, k)], vec![Some(1)]));
        rig.drain();
        assert_eq!((rig.tokens(1), rig.tokens(2)), (vec![], text(5, 14)));
        assert_eq!(rig.stats().blocks.n_used, 0);
    }
}

#[test]
fn outcome_rows_come_in_any_order() {
    for k in [0, 3] {
        let mut rig = Rig::new(deferred(k), limits(4, 9));
        rig.is_reversed = true;
        for (id, n_prompt) in [(1, 6), (2, 3), (3, 7), (4, 2)] {
            rig.submit(id, n_prompt, 10);
        }
        rig.drain();
        assert!(rig.stats().n_preemptions > 0);
        for (id, n_prompt) in [(1, 6), (2, 3), (3, 7), (4, 2)] {
            assert_eq!(rig.tokens(id), text(n_prompt, n_prompt + 10), "{id}");
        }
    }
}

#[test]
fn the_last_of_those_that_run_ends_where_the_pool_ends() {
    for k in [0, 3] {
        let mut rig = Rig::new(deferred(k), limits(4, 4));
        rig.submit(1, 12, 20);
        rig.drain();
        assert_eq!(rig.reason(1), Some(FinishReason::OutOfBlocks));
        assert_eq!(rig.tokens(1), text(12, 17));
        assert_eq!((rig.stats().n_preemptions, rig.stats().blocks.n_used), (0, 0));
    }
}

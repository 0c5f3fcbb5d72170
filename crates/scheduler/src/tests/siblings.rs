//! Requests that share a prompt.

use engine_types::{BlockId, FinishReason, OutputMode, RequestId};

use super::support::{Rig, caching, config, deferred, limits, request};
use crate::{SchedulerConfig, SubmitError};

/// Submits a request with `n_siblings` siblings, whose ids follow its own.
fn submit(rig: &mut Rig, id: u64, n_prompt: u32, max_tokens: u32, n_siblings: u64) {
    let mut request = request(id, n_prompt, max_tokens);
    request.siblings = (id + 1..=id + n_siblings).map(RequestId).collect();
    rig.scheduler.submit(request).unwrap();
}

fn text(from: u32, to: u32) -> Vec<u32> {
    (100 + from..100 + to).collect()
}

/// The copies of the last plan, by block numbers.
fn copies(rig: &Rig) -> Vec<(u32, u32)> {
    rig.plan.copies().iter().map(|copy| (copy.from.0, copy.to.0)).collect()
}

/// The tables that the last plan begins.
fn new_tables(rig: &Rig) -> Vec<Vec<BlockId>> {
    let updates = rig.plan.table_updates().filter(|update| update.start == 0);
    updates.map(|update| update.blocks.to_vec()).collect()
}

#[test]
fn whole_blocks_are_shared_and_the_partial_one_is_copied() {
    for config in [config(0), config(3), caching(0), caching(3)] {
        let k = config.num_speculative_tokens;
        let mut rig = Rig::new(config, limits(4, 16));
        submit(&mut rig, 1, 7, 4, 2);
        rig.plan();
        assert_eq!(rig.rows(), [(1, 0, 7, 0)]);
        assert_eq!((rig.stats().n_running, rig.stats().n_waiting), (1, 2));
        let first = new_tables(&rig).remove(0);
        rig.apply();
        rig.plan();
        assert_eq!(rig.rows(), [(1, 7, 1 + k, k), (2, 6, 1, 0), (3, 6, 1, 0)]);
        let tables = new_tables(&rig);
        assert_eq!([tables[0][0], tables[1][0]], [first[0]; 2]);
        let (from, to) = (first[1].0, [tables[0][1].0, tables[1][1].0]);
        assert_eq!(copies(&rig), [(from, to[0]), (from, to[1])]);
        rig.apply();
        rig.drain();
        for id in 1..=3 {
            assert_eq!(rig.tokens(id), text(7, 11));
            assert_eq!(rig.cached_tokens(id), Some(if id == 1 { 0 } else { 6 }));
        }
        let stats = rig.stats();
        assert_eq!((stats.n_shared_tokens, stats.n_prompt_tokens), (12, 21));
        assert_eq!((stats.n_waiting, stats.blocks.n_used), (0, 0));
    }
}

#[test]
fn a_prompt_of_whole_blocks_still_queries_one_token() {
    // Of eight tokens seven are shared, so that the last block is copied; of nine, two blocks.
    for (n_prompt, n_copies) in [(1, None), (5, Some(0)), (8, Some(1)), (9, Some(0))] {
        let mut rig = Rig::new(config(0), limits(4, 16));
        submit(&mut rig, 1, n_prompt, 2, 1);
        rig.step();
        rig.plan();
        assert_eq!(rig.rows()[1], (2, n_prompt - 1, 1, 0));
        assert_eq!(copies(&rig).len(), n_copies.unwrap_or(0));
        rig.apply();
        rig.drain();
        let n_shared = rig.stats().n_shared_tokens;
        assert_eq!((rig.tokens(2), n_shared), (text(n_prompt, n_prompt + 2), n_prompt as u64 - 1));
    }
}

#[test]
fn what_follows_the_shared_tokens_is_queried_once_for_each_draft_layer() {
    let mut limits = limits(4, 16);
    limits.n_lookahead_max = 2;
    let mut rig = Rig::new(config(3), limits);
    submit(&mut rig, 1, 7, 4, 1);
    rig.step();
    rig.plan();
    // The second layer's KV of token 5 is made of the token that request 1 went on with.
    assert_eq!(rig.rows(), [(1, 7, 4, 3), (2, 5, 2, 0)]);
    assert_eq!(copies(&rig).len(), 1);
    rig.apply();
    rig.drain();
    assert_eq!((rig.tokens(1), rig.tokens(2)), (text(7, 11), text(7, 11)));
}

#[test]
fn siblings_start_with_a_step_in_flight() {
    for k in [0, 3] {
        let mut rig = Rig::new(deferred(k), limits(4, 16));
        submit(&mut rig, 1, 7, 4, 1);
        rig.plan();
        rig.plan();
        assert_eq!(rig.rows(), [(1, 7, 1 + k, k)]);
        rig.apply();
        rig.plan();
        assert_eq!(rig.rows().last(), Some(&(2, 6, 1, 0)));
        rig.drain();
        assert_eq!((rig.tokens(1), rig.tokens(2)), (text(7, 11), text(7, 11)));
    }
}

#[test]
fn siblings_wait_until_the_whole_prompt_is_computed() {
    for mode in [OutputMode::Immediate, OutputMode::Deferred] {
        let config = SchedulerConfig { output_mode: mode, ..config(0) };
        let mut limits = limits(4, 16);
        limits.max_num_batched_tokens = 4;
        let mut rig = Rig::new(config, limits);
        submit(&mut rig, 1, 11, 4, 1);
        while rig.tokens(1).is_empty() {
            assert!(rig.scheduler.has_not_started(RequestId(2)));
            assert!(rig.rows().iter().all(|row| row.0 == 1));
            rig.step();
        }
        rig.drain();
        assert_eq!((rig.tokens(2), rig.stats().n_shared_tokens), (text(11, 15), 10));
    }
}

#[test]
fn siblings_go_on_without_the_first() {
    for (config, n_cached) in [(config(0), 0), (caching(0), 4)] {
        // It ends with its first token, and its blocks with it.
        let mut rig = Rig::new(config.clone(), limits(4, 16));
        submit(&mut rig, 1, 7, 1, 1);
        rig.step();
        assert_eq!(rig.reason(1), Some(FinishReason::MaxTokens));
        rig.plan();
        assert_eq!(rig.rows(), [(2, n_cached, 7 - n_cached, 0)]);
        rig.apply();
        assert_eq!((rig.cached_tokens(2), rig.tokens(2)), (Some(n_cached), text(7, 8)));

        // It is aborted before it starts, with its row in flight, and right after its row.
        for n_calls in 0..3 {
            let mut rig = Rig::new(config.clone(), limits(4, 16));
            submit(&mut rig, 1, 7, 3, 2);
            if n_calls > 0 {
                rig.plan();
            }
            if n_calls > 1 {
                rig.apply();
            }
            rig.scheduler.abort(RequestId(1), &mut rig.events);
            rig.scheduler.check_invariants();
            rig.drain();
            for id in [2, 3] {
                let n_cached = if n_calls == 2 { n_cached } else { 0 };
                assert_eq!(rig.tokens(id), text(7, 10));
                assert_eq!(rig.cached_tokens(id), Some(n_cached));
            }
            assert_eq!((rig.stats().n_shared_tokens, rig.stats().blocks.n_used), (0, 0));
        }

        let mut rig = Rig::new(config, limits(4, 16));
        submit(&mut rig, 1, 7, 3, 2);
        rig.plan();
        rig.fail();
        assert_eq!(rig.reason(1), Some(FinishReason::Failed("broken".to_owned())));
        rig.drain();
        assert_eq!((rig.tokens(2), rig.tokens(3)), (text(7, 10), text(7, 10)));
    }
}

#[test]
fn a_preempted_first_shares_nothing() {
    for config in [config(0), caching(0)] {
        let mut rig = Rig::new(config, limits(4, 4));
        rig.submit_prompt(9, &[7; 8], 6);
        submit(&mut rig, 1, 7, 4, 1);
        rig.plan();
        assert_eq!(rig.rows(), [(9, 0, 8, 0), (1, 0, 7, 0)]);
        rig.apply();
        rig.plan();
        // All four blocks are taken, and request 9 needs one more.
        assert_eq!((rig.rows(), rig.stats().n_preemptions), (vec![(9, 8, 1, 0)], 1));
        rig.apply();
        rig.drain();
        assert_eq!(rig.tokens(9), text(8, 14));
        assert_eq!((rig.tokens(1), rig.tokens(2)), (text(7, 11), text(7, 11)));
        assert_eq!((rig.stats().n_shared_tokens, rig.stats().blocks.n_used), (0, 0));
    }
}

#[test]
fn held_siblings_end_like_others() {
    let mut rig = Rig::new(config(0), limits(4, 16));
    submit(&mut rig, 1, 7, 4, 3);
    rig.plan();
    assert!(rig.scheduler.abort(RequestId(3), &mut rig.events));
    assert!(rig.scheduler.expire(RequestId(4), &mut rig.events));
    rig.scheduler.check_invariants();
    assert_eq!(rig.stats().n_waiting, 1);
    rig.apply();
    rig.plan();
    assert_eq!(rig.rows(), [(1, 7, 1, 0), (2, 6, 1, 0)]);
    rig.apply();
    rig.drain();
    assert_eq!(rig.reason(3), Some(FinishReason::Aborted));
    assert_eq!(rig.reason(4), Some(FinishReason::DeadlineExceeded));
    assert_eq!((rig.tokens(2), rig.tokens(3)), (text(7, 11), vec![]));
}

#[test]
fn a_sibling_without_room_waits() {
    let mut rig = Rig::new(config(0), limits(4, 3));
    submit(&mut rig, 1, 6, 2, 2);
    rig.step();
    rig.plan();
    // Three blocks hold the prompt twice but for its shared part, not three times.
    assert_eq!(rig.rows(), [(1, 6, 1, 0), (2, 5, 1, 0)]);
    assert_eq!(rig.stats().blocks.n_used, 3);
    rig.apply();
    rig.drain();
    assert!((1..=3).all(|id| rig.tokens(id) == text(6, 8)));
    assert_eq!(rig.stats().blocks.n_used, 0);
}

#[test]
fn a_preempted_sibling_comes_back_by_itself() {
    for config in [config(0), caching(0)] {
        let mut rig = Rig::new(config, limits(4, 4));
        submit(&mut rig, 1, 7, 8, 1);
        rig.drain();
        assert!(rig.stats().n_preemptions > 0);
        assert_eq!((rig.tokens(1), rig.tokens(2)), (text(7, 15), text(7, 15)));
        assert_eq!((rig.stats().n_shared_tokens, rig.stats().blocks.n_used), (6, 0));
    }
}

#[test]
fn a_preempted_sibling_shares_only_what_is_cached() {
    let mut rig = Rig::new(config(0), limits(4, 5));
    rig.submit(9, 4, 3);
    submit(&mut rig, 1, 7, 6, 1);
    let plans = [
        &[(9, 0, 4, 0), (1, 0, 7, 0)][..],
        &[(9, 4, 1, 0), (1, 7, 1, 0), (2, 6, 1, 0)],
        &[(9, 5, 1, 0), (1, 8, 1, 0)],
        // Request 9 has ended. It comes back with room for all its tokens and those of request 1.
        &[(1, 9, 1, 0), (2, 0, 8, 0)],
    ];
    for rows in plans {
        rig.plan_next();
        assert_eq!(rig.rows(), rows);
    }
    rig.drain();
    assert_eq!((rig.tokens(1), rig.tokens(2)), (text(7, 13), text(7, 13)));
    assert_eq!(rig.stats().n_preemptions, 1);
}

#[test]
fn ids_of_a_group_are_new_and_different() {
    let mut rig = Rig::new(config(0), limits(4, 16));
    rig.submit(7, 4, 4);
    for (id, siblings, doubled) in [(1, [1, 2], 1), (1, [2, 2], 2), (1, [2, 7], 7), (7, [1, 2], 7)]
    {
        let mut request = request(id, 4, 4);
        request.siblings = siblings.map(RequestId).to_vec();
        let refused = rig.scheduler.submit(request);
        assert_eq!(refused, Err(SubmitError::DuplicateId(RequestId(doubled))));
        rig.scheduler.check_invariants();
    }
    assert_eq!((rig.stats().n_waiting, rig.stats().n_prompt_tokens), (1, 4));
}

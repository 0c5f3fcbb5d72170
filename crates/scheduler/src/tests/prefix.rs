//! What the prefix cache changes in plans, and what it may never learn.

use engine_types::{FinishReason, Request};

use super::support::{Rig, caching, config, limits, request};

/// The tokens `100 + p` at positions `p` below `n`, which the scripted executor continues.
fn text(n: u32) -> Vec<u32> {
    (100..100 + n).collect()
}

#[test]
fn only_what_is_not_cached_is_planned() {
    for (config, row, n_cached) in [
        (caching(0), (2, 8, 2, 0), 8),
        (config(0), (2, 0, 10, 0), 0),
        (caching(3), (2, 8, 2, 0), 8),
    ] {
        let mut rig = Rig::new(config.clone(), limits(4, 16));
        rig.submit_prompt(1, &text(10), 2);
        rig.drain();
        let other = [&text(9)[..], &[7]].concat();
        rig.submit_prompt(2, &other, 2);
        rig.plan();
        assert_eq!(rig.rows(), [row]);
        rig.apply();
        rig.drain();
        assert_eq!((rig.cached_tokens(1), rig.cached_tokens(2)), (Some(0), Some(n_cached)));
        let stats = rig.stats();
        let n_queried = if config.enable_prefix_caching { 20 } else { 0 };
        assert_eq!(stats.n_prefix_queried_tokens, n_queried);
        assert_eq!(stats.n_prefix_hit_tokens, u64::from(n_cached));
    }
}

#[test]
fn outputs_are_cached_like_prompts() {
    for k in [0, 3] {
        let mut rig = Rig::new(caching(k), limits(4, 16));
        rig.submit(1, 8, 12);
        rig.drain();
        // 20 tokens, the last of which ended the request and has no KV: 4 whole blocks. Engines
        // that keep a step in flight run one more and so have 5.
        assert_eq!(rig.stats().blocks.n_cached, 4);
        rig.submit(2, 24, 2);
        rig.plan();
        assert_eq!(rig.rows(), [(2, 16, 8, 0)]);
    }
}

#[test]
fn chunks_are_cached_one_by_one() {
    let mut limits = limits(4, 32);
    limits.max_num_batched_tokens = 10;
    let mut rig = Rig::new(caching(0), limits);
    rig.submit(1, 24, 2);
    rig.step();
    rig.submit(2, 24, 2);
    rig.step();
    rig.plan();
    // The first request has 20 tokens, 5 blocks of them whole, and leaves room for 6.
    assert_eq!(rig.rows(), [(1, 20, 4, 0), (2, 20, 4, 0)]);
    rig.apply();
    rig.drain();
    assert_eq!(rig.tokens(2), [124, 125]);
    assert_eq!(rig.cached_tokens(2), Some(20));
}

#[test]
fn a_cached_prefix_fits_where_the_whole_prompt_does_not() {
    let mut limits = limits(4, 10);
    limits.max_num_batched_tokens = 8;
    let mut rig = Rig::new(caching(0), limits);
    rig.submit(1, 17, 8);
    while rig.tokens(1).is_empty() {
        rig.step();
    }
    // Five blocks each, four of them common: both fit the pool and the budget beside an output.
    rig.submit_prompt(2, &[&text(16)[..], &[7, 7]].concat(), 2);
    rig.submit_prompt(3, &[&text(16)[..], &[8, 8]].concat(), 2);
    rig.plan();
    assert_eq!(rig.rows(), [(1, 17, 1, 0), (2, 16, 2, 0), (3, 16, 2, 0)]);
    assert_eq!(rig.stats().blocks.n_used, 7);
    rig.apply();
    rig.drain();
    assert_eq!(rig.stats().n_preemptions, 0);
}

#[test]
fn a_preempted_request_finds_its_own_blocks() {
    let mut rig = Rig::new(caching(0), limits(4, 5));
    rig.submit_prompt(1, &[7; 6], 7);
    rig.submit_prompt(2, &text(9), 6);
    let mut starts = vec![];
    while rig.plan() {
        starts.extend(rig.rows().iter().filter(|row| row.0 == 2).map(|row| row.1));
        rig.apply();
    }
    let stats = rig.stats();
    assert_eq!(stats.n_preemptions, 1);
    // It lost one of its three blocks and computes the tokens of that one again.
    assert_eq!(starts, [0, 9, 10, 8, 12, 13]);
    assert_eq!(rig.tokens(2), (109..115).collect::<Vec<_>>());
    // What came back after the preemption was no saving.
    assert_eq!(rig.cached_tokens(2), Some(0));
    assert_eq!((stats.n_prefix_queried_tokens, stats.n_prefix_hit_tokens), (15, 0));
}

#[test]
fn salts_and_undrafted_requests_keep_to_themselves() {
    let mut rig = Rig::new(caching(2), limits(4, 64));
    let mut cached = |id, salt: Option<&[u8]>, k| {
        let mut request = Request { cache_salt: salt.map(<[u8]>::to_vec), ..request(id, 9, 3) };
        request.params.num_speculative_tokens = k;
        rig.scheduler.submit(request).unwrap();
        rig.drain();
        rig.cached_tokens(id)
    };
    let kinds = [
        (None, None),
        (None, Some(0)),
        (Some(&b"a"[..]), None),
        (Some(&b"b"[..]), None),
        (Some(&b"b"[..]), Some(0)),
    ];
    for (id, (salt, k)) in (0..).zip(kinds) {
        assert_eq!(cached(id, salt, k), Some(0), "{salt:?} {k:?}");
    }
    for (id, (salt, k)) in (10..).zip(kinds) {
        assert_eq!(cached(id, salt, k), Some(8), "{salt:?} {k:?}");
    }
    // Any number of drafts is the same kind.
    assert_eq!(cached(20, None, Some(1)), Some(8));
}

#[test]
fn rejected_drafts_are_never_cached() {
    let mut rig = Rig::new(caching(3), limits(4, 16));
    rig.n_right = 0;
    rig.submit(1, 3, 9);
    rig.drain();
    // Beside the text, each step wrote KV of three drafts, all of them the token 1.
    rig.submit_prompt(2, &[&text(4)[..], &[1; 8]].concat(), 1);
    rig.submit_prompt(3, &[&text(8)[..], &[1; 4]].concat(), 1);
    rig.submit_prompt(4, &[&text(11)[..], &[1; 4]].concat(), 1);
    rig.drain();
    let cached = [2, 3, 4].map(|id| rig.cached_tokens(id));
    assert_eq!(cached, [Some(0), Some(4), Some(8)]);
}

#[test]
fn a_token_without_kv_is_never_cached() {
    // Each request ends with its last block full but for the KV of the last token.
    for k in [0, 3] {
        let mut rig = Rig::new(caching(k), limits(4, 16));
        rig.submit(1, 5, 3);
        rig.drain();
        assert_eq!(rig.tokens(1), [105, 106, 107]);
        assert_eq!(rig.stats().blocks.n_cached, 1);
    }
}

#[test]
fn with_two_draft_layers_a_rejection_ends_what_is_cached() {
    let mut limits = limits(4, 16);
    limits.n_lookahead_max = 2;
    // The last draft layer's KV of the last token is made of the first draft, and never again.
    for (n_right, n_cached) in [(0, 1), (1, 3), (8, 3)] {
        let mut rig = Rig::new(caching(3), limits);
        rig.n_right = n_right;
        rig.submit(1, 6, 9);
        rig.drain();
        assert_eq!(rig.stats().blocks.n_cached, n_cached, "{n_right} right drafts");
        rig.submit(2, 15, 1);
        rig.drain();
        assert_eq!(rig.cached_tokens(2), Some(4 * n_cached));
    }
}

#[test]
fn a_failed_step_caches_nothing() {
    let mut rig = Rig::new(caching(0), limits(4, 16));
    rig.submit(1, 9, 4);
    rig.plan();
    rig.fail();
    assert_eq!(rig.reason(1), Some(FinishReason::Failed("broken".to_owned())));
    let blocks = rig.stats().blocks;
    assert_eq!((blocks.n_free, blocks.n_cached), (16, 0));
}

//! Published fault cases, by number.

use engine_types::{FinishReason, RequestId};

use super::support::{Rig, caching, config, limits, request};
use crate::{ConfigError, Scheduler, SchedulerConfig, SubmitError};

/// A request with prompt `[5, 6, 7]` and drafts in hand, answered by one verified run.
fn verified_run(run: [u32; 4], ignore_eos: bool) -> Rig {
    let mut rig = Rig::new(config(3), limits(4, 16));
    let mut request = request(1, 3, 16);
    request.prompt = vec![5, 6, 7];
    request.params.ignore_eos = ignore_eos;
    rig.scheduler.submit(request).unwrap();
    for (tokens, n_accepted, drafts) in [(&[8][..], 0, &run[..3]), (&run[..], 3, &[9; 3])] {
        rig.plan();
        rig.collect(|_, outcome| {
            outcome.push_row(RequestId(1), tokens, n_accepted, drafts);
            Ok(())
        });
    }
    rig
}

#[test]
fn l01_eos_ends_an_accepted_run_wherever_it_is() {
    for eos_idx in 0..4 {
        let mut run = [11, 12, 13, 14];
        run[eos_idx] = 2;
        let rig = verified_run(run, false);
        assert_eq!(rig.reason(1), Some(FinishReason::Eos(2)));
        assert_eq!(rig.tokens(1)[1..], run[..=eos_idx]);
        let stats = rig.stats();
        assert_eq!(stats.n_generated_tokens as usize, 2 + eos_idx);
        assert_eq!(stats.spec_decode.n_accepted_tokens as usize, eos_idx);
        assert_eq!(stats.blocks.n_used, 0);

        let mut rig = verified_run(run, true);
        assert_eq!(rig.reason(1), None);
        assert_eq!(rig.tokens(1)[1..], run);
        rig.plan();
        assert_eq!(rig.rows(), [(1, 7, 4, 3)]);
    }
}

#[test]
fn l09_preemption_keeps_committed_tokens_only() {
    for k in [0, 3] {
        for n_right in [0, 1, 8] {
            let run = |num_blocks| {
                let mut rig = Rig::new(config(k), limits(4, num_blocks));
                rig.n_right = n_right;
                rig.submit(1, 8, 12);
                rig.submit(2, 8, 12);
                rig.drain();
                assert_eq!(rig.stats().blocks.n_used, 0);
                rig
            };
            let (small, large) = (run(6), run(64));
            assert!(small.stats().n_preemptions > 0, "k={k}");
            assert_eq!(large.stats().n_preemptions, 0);
            for id in [1, 2] {
                assert_eq!(small.tokens(id), large.tokens(id), "k={k} n_right={n_right}");
                assert_eq!(small.reason(id), Some(FinishReason::MaxTokens));
            }
        }
    }
}

#[test]
fn l10_the_number_of_drafts_is_one_number() {
    for k in 0..=8 {
        let mut rig = Rig::new(config(k), limits(16, 16));
        rig.submit(1, 5, 30);
        rig.plan();
        let row = rig.plan.rows()[0];
        assert_eq!((row.n_propose, row.drafting), (k, k > 0));
        rig.apply();
        rig.plan();
        assert_eq!(rig.rows(), [(1, 5, 1 + k, k)]);
    }
    let new = |config: SchedulerConfig, max| {
        let mut limits = limits(4, 8);
        limits.max_num_speculative_tokens = max;
        Scheduler::new(config, limits).map(|_| ())
    };
    let error = new(config(2), 0).unwrap_err();
    assert_eq!(error, ConfigError::TooManySpeculativeTokens { value: 2, max: 0 });
    assert!(error.to_string().contains("no draft layers"), "{error}");
    assert_eq!(new(config(0), 0), Ok(()));
    let error = ConfigError::TooManySpeculativeTokens { value: 9, max: 8 };
    assert_eq!(new(config(9), 99), Err(error));
}

#[test]
fn l11_equal_blocks_behind_other_parents_are_not_shared() {
    let mut rig = Rig::new(caching(0), limits(4, 16));
    let prompts = [
        (&[1, 3, 3, 4, 9][..], 0),
        (&[5, 6, 7, 8, 9], 0),
        (&[1, 3, 3, 4, 5, 6, 7, 8, 0], 4),
        (&[9, 9, 9, 9, 5, 6, 7, 8, 0], 0),
        (&[9, 9, 9, 9, 5, 6, 7, 8, 0], 8),
        // The last token is queried even where its block is known.
        (&[9, 9, 9, 9, 5, 6, 7, 8], 4),
        (&[9, 9, 9, 9], 0),
    ];
    for (id, (prompt, n_cached)) in (0..).zip(prompts) {
        rig.submit_prompt(id, prompt, 2);
        rig.drain();
        assert_eq!(rig.cached_tokens(id), Some(n_cached), "{prompt:?}");
    }
}

#[test]
fn l12_sequential_requests_leave_nothing() {
    for config in [config(3), caching(3)] {
        let mut rig = Rig::new(config, limits(4, 8));
        for id in 0..20 {
            rig.submit(id, 8, 4);
            rig.drain();
            let blocks = rig.stats().blocks;
            assert_eq!((blocks.n_used, blocks.n_free + blocks.n_cached), (0, 8));
        }
    }
}

#[test]
fn l12_aborts_in_every_state_leave_nothing() {
    // Queued, between two chunks, decoding, with a step in flight.
    let states = [(0, false), (1, false), (3, false), (1, true), (3, true)];
    for ((n_steps, in_flight), config) in
        states.into_iter().flat_map(|state| [(state, config(3)), (state, caching(3))])
    {
        let mut limits = limits(4, 8);
        limits.max_num_batched_tokens = 6;
        let mut rig = Rig::new(config, limits);
        rig.submit(1, 8, 16);
        for _ in 0..n_steps {
            rig.step();
        }
        if in_flight {
            rig.plan();
        }
        assert!(rig.scheduler.abort(RequestId(1), &mut rig.events));
        assert!(!rig.scheduler.abort(RequestId(1), &mut rig.events));
        rig.scheduler.check_invariants();
        if in_flight {
            rig.apply();
        }
        assert_eq!(rig.reason(1), Some(FinishReason::Aborted));
        let blocks = rig.stats().blocks;
        assert_eq!((blocks.n_used, blocks.n_free + blocks.n_cached), (0, 8));
        assert!(!rig.plan());
    }
}

#[test]
fn l12_drafts_take_the_room_of_cached_blocks() {
    let mut rig = Rig::new(caching(3), limits(4, 4));
    rig.submit_prompt(1, &[7; 13], 1);
    rig.drain();
    assert_eq!((rig.stats().blocks.n_cached, rig.stats().blocks.n_free), (3, 1));
    rig.submit(2, 3, 8);
    rig.plan();
    // The drafts' KV behind the prompt crosses into a second block.
    assert_eq!(rig.stats().blocks.n_evictions, 1);
    rig.apply();
    rig.plan();
    assert_eq!(rig.rows(), [(2, 3, 4, 3)]);
    rig.apply();
    rig.drain();
    assert_eq!(rig.tokens(2), (103..111).collect::<Vec<_>>());
    assert_eq!(rig.stats().blocks.n_used, 0);
}

#[test]
fn l12_a_verify_step_without_room_gives_up_drafts() {
    // Three of the four blocks are another request's; one block of 4 holds prompt and output.
    let mut rig = Rig::new(config(3), limits(4, 4));
    rig.submit(1, 9, 2);
    rig.submit(2, 3, 8);
    rig.plan();
    assert_eq!(rig.rows(), [(1, 0, 9, 0), (2, 0, 3, 0)]);
    rig.apply();
    rig.plan();
    assert_eq!(rig.rows()[1], (2, 3, 1, 0));
    rig.apply();
    rig.drain();
    assert_eq!(rig.tokens(2), (103..111).collect::<Vec<_>>());
    assert_eq!(rig.stats().blocks.n_used, 0);
}

#[test]
fn l23_the_queue_is_bounded_and_refuses_at_once() {
    let mut config = config(0);
    (config.max_num_seqs, config.max_queued_requests) = (1, 4);
    let mut rig = Rig::new(config, limits(4, 16));
    let answers: Vec<_> =
        (0..10).map(|id| rig.scheduler.submit(request(id, 4, 20)).is_ok()).collect();
    assert_eq!(answers, [[true; 5], [false; 5]].concat());
    let full = rig.scheduler.submit(request(11, 4, 4));
    assert_eq!(full, Err(SubmitError::QueueFull { limit: 5 }));
    rig.drain();
    assert_eq!(rig.stats().n_finished, 5);
    assert!((0..5).all(|id| rig.reason(id) == Some(FinishReason::MaxTokens)));
}

#[test]
fn l23_a_prompt_that_never_fits_blocks_nobody() {
    let mut rig = Rig::new(config(0), limits(4, 4));
    let refused = rig.scheduler.submit(request(1, 20, 4));
    assert_eq!(refused, Err(SubmitError::NeverFits { n_tokens: 20, pool_tokens: 16 }));
    rig.submit(2, 3, 4);
    rig.drain();
    assert_eq!(rig.reason(2), Some(FinishReason::MaxTokens));
}

#[test]
fn l23_a_lone_request_that_outgrows_the_pool_ends() {
    for k in [0, 3] {
        let mut rig = Rig::new(config(k), limits(4, 4));
        rig.submit(1, 12, 20);
        rig.drain();
        assert_eq!(rig.reason(1), Some(FinishReason::OutOfBlocks));
        assert_eq!(rig.tokens(1), (112..117).collect::<Vec<_>>());
        assert_eq!(rig.stats().n_preemptions, 0);
        assert_eq!(rig.stats().blocks.n_used, 0);
    }
}

#[test]
fn l13_a_block_is_computed_again_where_the_next_token_differs() {
    let mut rig = Rig::new(caching(2), limits(4, 16));
    let mut first_row = |id, last| {
        rig.submit_prompt(id, &[1, 3, 3, 4, 5, 6, 7, 8, last], 4);
        rig.plan();
        let row = rig.rows()[0];
        rig.apply();
        rig.drain();
        row
    };
    assert_eq!(first_row(1, 20), (1, 0, 9, 0));
    // Only the draft layer's KV at position 7 depends on the 30; its whole block is not used.
    assert_eq!(first_row(2, 30), (2, 4, 5, 0));
    assert_eq!(first_row(3, 20), (3, 8, 1, 0));
    assert_eq!(first_row(4, 30), (4, 8, 1, 0));
}

//! Who runs, and in which chunks.

use engine_types::FinishReason;
use scheduler::{SchedulerConfig, SubmitError};

use crate::rig::{BOTH, Rig, config, limits, params, request, text};

/// The widths of the first step for prompts of these lengths.
fn first_widths(config: SchedulerConfig, budget: u32, prompts: &[u32]) -> Vec<u32> {
    let mut limits = limits(4, 200);
    (limits.max_num_batched_tokens, limits.max_model_len) = (budget, 400);
    let mut rig = Rig::new(config, limits);
    for (id, &n_prompt) in (0..).zip(prompts) {
        rig.submit(id, n_prompt, 1);
    }
    rig.plan();
    rig.widths()
}

#[test]
fn requests_wait_run_and_go() {
    for mode in BOTH {
        let mut rig = Rig::new(config(mode, 0), limits(4, 10));
        assert!(!rig.plan() && rig.scheduler.is_idle(), "nothing to do");
        rig.submit(0, 4, 2);
        assert_eq!(rig.counts(), (0, 1));
        rig.plan();
        assert_eq!((rig.counts(), rig.rows()), ((1, 0), vec![(0, 0, 4, 0)]));
        rig.submit(1, 3, 2);
        rig.submit(2, 3, 2);
        assert_eq!(rig.counts(), (1, 2));
        assert!(!rig.scheduler.is_idle());
        rig.collect();
        rig.drain();
        assert_eq!((rig.counts(), rig.scheduler.is_idle()), ((0, 0), true));
    }
}

#[test]
fn one_token_is_decoded_after_the_prompt() {
    for mode in BOTH {
        let mut rig = Rig::new(config(mode, 0), limits(4, 10));
        rig.submit(0, 4, 2);
        rig.step();
        rig.plan();
        assert_eq!(rig.rows(), [(0, 4, 1, 0)]);
    }
}

#[test]
fn the_number_of_requests_and_blocks_limits_admission() {
    let mut two = limits(4, 10);
    two.max_num_seqs = 2;
    let mut rig = Rig::new(config(BOTH[0], 0), two);
    (0..5).for_each(|id| rig.submit(id, 4, 2));
    rig.plan();
    assert_eq!((rig.widths(), rig.counts()), (vec![4, 4], (2, 3)));

    let mut rig = Rig::new(config(BOTH[0], 0), limits(4, 1));
    (0..2).for_each(|id| rig.submit(id, 3, 1));
    rig.plan();
    assert_eq!((rig.widths(), rig.counts()), (vec![3], (1, 1)));
}

#[test]
fn chunks_are_aligned_to_64_tokens_where_the_budget_ends() {
    let plain = || config(BOTH[0], 0);
    assert_eq!(first_widths(plain(), 192, &[128, 128]), [128, 64]);
    assert_eq!(first_widths(plain(), 200, &[128, 128, 128]), [128, 64]);
}

#[test]
fn a_prompt_longer_than_the_budget_goes_on_in_the_next_step() {
    for mode in BOTH {
        let mut limits = limits(4, 10);
        limits.max_num_batched_tokens = 6;
        let mut rig = Rig::new(config(mode, 0), limits);
        rig.submit(0, 10, 2);
        rig.step();
        assert_eq!((rig.rows(), rig.plan.all_tokens()), (vec![(0, 0, 6, 0)], &text(0..6)[..]));
        rig.step();
        assert_eq!((rig.rows(), rig.plan.all_tokens()), (vec![(0, 6, 4, 0)], &text(6..10)[..]));
        rig.drain();
        assert_eq!(rig.tokens(0), text(10..12));
    }
}

#[test]
fn long_prompts_are_read_in_pieces_of_the_threshold() {
    let cut = |threshold| SchedulerConfig {
        long_prefill_token_threshold: threshold,
        ..config(BOTH[0], 0)
    };
    assert_eq!(first_widths(cut(0), 64, &[20]), [20]);
    assert_eq!(first_widths(cut(8), 64, &[20]), [8]);
    assert_eq!(first_widths(cut(8), 64, &[5]), [5]);
    assert_eq!(first_widths(cut(8), 64, &[20, 20]), [8, 8]);
    assert_eq!(first_widths(cut(128), 200, &[300, 300]), [128, 64]);
    for mode in BOTH {
        let mut rig = Rig::new(SchedulerConfig { output_mode: mode, ..cut(8) }, limits(4, 10));
        rig.submit(0, 20, 2);
        let widths: Vec<u32> = (0..3).map(|_| (rig.step(), rig.widths()[0]).1).collect();
        assert_eq!(widths, [8, 8, 4]);
        rig.drain();
        assert_eq!(rig.tokens(0), text(20..22));
    }
}

/// In the reference such a request is put on a list of rejected ones when its turn comes.
#[test]
fn what_can_never_run_is_refused_at_once_and_blocks_nobody() {
    let mut rig = Rig::new(config(BOTH[0], 0), limits(4, 10));
    let mut submit = |n_prompt| rig.scheduler.submit(request(0, &text(0..n_prompt), params(1)));
    let too_long = SubmitError::PromptTooLong { n_tokens: 64, max_model_len: 64 };
    assert_eq!(submit(64), Err(too_long));
    let never_fits = SubmitError::NeverFits { n_tokens: 40, pool_tokens: 40 };
    assert_eq!(submit(40), Err(never_fits));
    rig.submit(1, 4, 1);
    rig.drain();
    assert_eq!(rig.reason(1), Some(FinishReason::MaxTokens));
}

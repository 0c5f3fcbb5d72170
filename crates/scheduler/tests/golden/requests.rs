//! What a request holds and says.

use engine_types::{FinishReason, Request, RequestId, Usage};
use kv_block_manager::blocks_for;
use scheduler::{Scheduler, SubmitError};

use crate::rig::{BOTH, Rig, config, limits, params, request, text};

#[test]
fn blocks_are_the_ceiling_of_tokens() {
    for (n_tokens, block_size, n_blocks) in [(4, 4, 1), (5, 4, 2), (3, 1, 3)] {
        assert_eq!(blocks_for(n_tokens, block_size), n_blocks);
        let mut rig = Rig::new(config(BOTH[0], 0), limits(block_size, 10));
        rig.submit(0, n_tokens, 1);
        rig.plan();
        assert_eq!(rig.stats().blocks.n_used, n_blocks);
    }
}

#[test]
fn the_fifth_token_takes_the_second_block() {
    for mode in BOTH {
        let mut rig = Rig::new(config(mode, 0), limits(4, 10));
        rig.submit(0, 4, 3);
        rig.plan();
        assert_eq!(rig.stats().blocks.n_used, 1);
        rig.collect();
        rig.plan();
        assert_eq!(rig.stats().blocks.n_used, 2);
        rig.collect();
        rig.drain();
    }
}

#[test]
fn a_completion_is_what_follows_the_prompt() {
    for mode in BOTH {
        let mut rig = Rig::new(config(mode, 0), limits(4, 10));
        rig.submit_with(42, &[10, 20, 30], &[40, 50], params(2));
        rig.drain();
        assert_eq!(rig.tokens(42), [40, 50]);
        let usage = Usage { prompt_tokens: 3, completion_tokens: 2, cached_tokens: 0 };
        assert_eq!(rig.end(42), Some((FinishReason::MaxTokens, usage)));
    }
}

/// The reference makes siblings of a request outside its scheduler; `n` is the number of ids here,
/// so that it cannot be 0 or -1.
#[test]
fn siblings_have_ids_and_streams_of_their_own() {
    for mode in BOTH {
        let mut rig = Rig::new(config(mode, 0), limits(4, 10));
        let siblings = vec![RequestId(8), RequestId(9)];
        let request = Request { siblings, ..request(7, &text(0..6), params(3)) };
        assert_eq!(rig.submit_request(request.clone(), &[]), Ok(()));
        let again = rig.submit_request(request, &[]);
        assert_eq!(again, Err(SubmitError::DuplicateId(RequestId(7))));
        rig.drain();
        for id in [7, 8, 9] {
            assert_eq!(rig.tokens(id), text(6..9));
            assert_eq!(rig.reason(id), Some(FinishReason::MaxTokens));
        }
    }
}

#[test]
fn an_empty_prompt_and_an_empty_output_are_refused() {
    let mut scheduler =
        Scheduler::new(config(BOTH[0], 0), limits(4, 10)).expect("a valid configuration");
    let mut submit =
        |prompt: &[u32], max_tokens| scheduler.submit(request(0, prompt, params(max_tokens)));
    assert_eq!(submit(&[], 1), Err(SubmitError::EmptyPrompt));
    assert_eq!(submit(&[1], 0), Err(SubmitError::ZeroMaxTokens));
    assert!(scheduler.is_idle());
}

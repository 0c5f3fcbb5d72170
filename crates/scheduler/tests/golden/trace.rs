//! Deferred output, step by step.

use engine_types::{FinishReason, OutputMode, TokenSource};

use crate::rig::{BOTH, Rig, config, limits, text};

/// One round of the engine's loop: a step is planned, then the one before is collected.
#[derive(Debug, PartialEq)]
struct Round {
    /// The longest context that the planned row can have, its queried tokens included: what the
    /// reference sends as `context_lens`.
    n_context_max: u32,
    /// Tokens whose KV turned out to be valid before the planned row.
    n_valid: u32,
    /// Blocks that the request holds at the end of the round.
    n_blocks: u32,
    /// Tokens streamed by then.
    n_streamed: usize,
}

/// Runs two requests with prompts of 6 tokens until they end; they must do the same.
fn trace(k: u32, max_tokens: u32) -> (Rig, Vec<Round>) {
    let mut rig = Rig::new(config(OutputMode::Deferred, k), limits(4, 32)).with_right_drafts(1);
    rig.submit(0, 6, max_tokens);
    rig.submit(1, 6, max_tokens);
    let (mut rounds, mut n_draft_before) = (vec![], 0);
    let mut collected = vec![];
    while rig.plan() {
        let row = rig.plan.rows()[0];
        assert_eq!(rig.plan.rows().len(), 2);
        let is_known = row.source == TokenSource::Host;
        assert_eq!(is_known, rounds.is_empty(), "all but prompts are in flight when planned");
        let n_context_max = row.n_computed + n_draft_before + row.n_query;
        n_draft_before = row.n_draft;
        if rig.scheduler.n_in_flight() == 2 {
            collected.push(rig.collect()[0].0.n_computed);
        }
        let (n_blocks, n_streamed) = (rig.stats().blocks.n_used / 2, rig.tokens(0).len());
        rounds.push(Round { n_context_max, n_valid: 0, n_blocks, n_streamed });
    }
    collected.push(rig.collect()[0].0.n_computed);
    assert_eq!(collected.len(), rounds.len());
    rounds.iter_mut().zip(collected).for_each(|(round, n_valid)| round.n_valid = n_valid);
    assert_eq!(rig.tokens(0), rig.tokens(1));
    assert_eq!((rig.stats().blocks.n_used, rig.plan()), (0, false));
    (rig, rounds)
}

/// Each step accepts one draft of three.
///
/// Contexts, blocks and the end are the reference's but for the blocks of step 3, where it has 4:
/// ours reserves the two positions behind the window that the drafter writes, too. Its `num_tokens`
/// (10, 14, 16, 18, 20) are each the next step's context, since it fills its token lists with
/// placeholders; ours hold committed tokens alone, and what is in flight is counted.
#[test]
fn three_drafts_of_which_one_is_right() {
    let (rig, rounds) = trace(3, 9);
    let expected = [
        (6, 0, 2, 0),
        (10, 6, 3, 1),
        (14, 8, 4, 3),
        (16, 10, 5, 5),
        (18, 12, 5, 7),
        (20, 14, 0, 9),
    ];
    let round = |(n_context_max, n_valid, n_blocks, n_streamed)| Round {
        n_context_max,
        n_valid,
        n_blocks,
        n_streamed,
    };
    assert_eq!(rounds, expected.map(round));
    assert_eq!(rig.tokens(0), text(6..15));
    assert_eq!(rig.reason(0), Some(FinishReason::MaxTokens));
    let spec_decode = rig.stats().spec_decode;
    assert_eq!((spec_decode.n_verify_steps, spec_decode.n_accepted_tokens), (8, 8));
}

/// Contexts are 6, 7, 8 and so on. The reference finishes at step 10, when it learns of the tenth
/// token; ours plans no such step, since nothing that is in flight can change that the limit is
/// reached.
#[test]
fn no_drafts() {
    let (rig, rounds) = trace(0, 10);
    let contexts: Vec<u32> = rounds.iter().map(|round| round.n_context_max).collect();
    assert_eq!(contexts, (6..16).collect::<Vec<_>>());
    let streamed: Vec<usize> = rounds.iter().map(|round| round.n_streamed).collect();
    assert_eq!(streamed, (0..10).collect::<Vec<_>>());
    assert_eq!(rig.tokens(0), text(6..16));
    assert_eq!(rig.reason(0), Some(FinishReason::MaxTokens));
}

/// Defect D3: the reference streams 13 tokens where 12 were asked for.
#[test]
fn a_limit_inside_a_run_cuts_it() {
    for mode in BOTH {
        for max_tokens in 1..=13 {
            let mut rig = Rig::new(config(mode, 3), limits(4, 32)).with_right_drafts(1);
            rig.submit(0, 6, max_tokens);
            rig.drain();
            assert_eq!(rig.tokens(0), text(6..6 + max_tokens), "{mode:?}");
            assert_eq!(rig.reason(0), Some(FinishReason::MaxTokens));
        }
    }
}

/// Defect D4: without deferred output the reference loses every second accepted token.
#[test]
fn both_modes_stream_the_same() {
    for k in 0..=8 {
        for n_right in 0..=k {
            let [immediate, deferred] = BOTH.map(|mode| {
                // Blocks of one token are more than one a step.
                let rig = Rig::new(config(mode, k), limits(1 + k % 4, 128));
                let mut rig = rig.with_right_drafts(n_right);
                rig.submit(0, 6, 20);
                rig.submit(1, 3, 25);
                rig.drain();
                rig
            });
            for (id, expected) in [(0, text(6..26)), (1, text(3..28))] {
                assert_eq!(immediate.tokens(id), expected, "k={k}, {n_right} right");
                assert_eq!(deferred.deltas(id), immediate.deltas(id), "k={k}, {n_right} right");
            }
        }
    }
}

//! Where outputs end, and what is counted.

use engine_types::{FinishReason, OutputMode, RequestEvent, RequestId, SamplingParams};
use engine_types::{SpecDecodeStats, TokenId};

use crate::rig::{BOTH, EOS, Rig, config, limits, params};

/// Runs a request whose output is `output`, with drafts that are all right.
fn run(mode: OutputMode, k: u32, output: &[TokenId], params: SamplingParams) -> Rig {
    let mut rig = Rig::new(config(mode, k), limits(4, 10));
    rig.submit_with(0, &[5, 6, 7], output, params);
    rig.drain();
    assert_eq!((rig.counts(), rig.stats().blocks.n_used), ((0, 0), 0));
    rig
}

fn stops(ids: &[TokenId], sequences: &[&[TokenId]]) -> SamplingParams {
    let stop_sequences = sequences.iter().map(|stop| stop.to_vec()).collect();
    SamplingParams { stop_token_ids: ids.to_vec(), stop_sequences, ..params(16) }
}

#[test]
fn each_end_is_streamed_and_named() {
    let ignoring = SamplingParams { ignore_eos: true, ..params(4) };
    let cases = [
        (&[9, EOS, 8, 8][..], params(16), 2, FinishReason::Eos(EOS)),
        (&[9, EOS, 8, 8], ignoring, 4, FinishReason::MaxTokens),
        (&[9, 8, 8, 8], params(2), 2, FinishReason::MaxTokens),
        (&[9, 99, 8, 8], stops(&[99], &[]), 2, FinishReason::StopToken(99)),
        (&[9, 10, 11, 8], stops(&[], &[&[10, 11]]), 3, FinishReason::StopSequence(0)),
    ];
    for mode in BOTH {
        for k in [0, 1, 3, 8] {
            for (output, params, n_kept, reason) in &cases {
                let rig = run(mode, k, output, params.clone());
                assert_eq!(rig.tokens(0), output[..*n_kept], "{mode:?}, k={k}");
                assert_eq!(rig.reason(0).as_ref(), Some(reason), "{mode:?}, k={k}");
            }
        }
    }
}

/// Defect D5: in the reference a later match of a stop sequence wins, a stop sequence hides an
/// earlier EOS, and EOS wins over an earlier stop id. The first four runs are cut there; ours cuts
/// each at its first end, counts what it streams, and has no draft accepted behind it.
#[test]
fn the_first_end_of_a_run_cuts_it() {
    let sequence = || stops(&[], &[&[10, 11]]);
    let cases = [
        ([10, 11, 10, 11], sequence(), 2, FinishReason::StopSequence(0)),
        ([EOS, 9, 10, 11], sequence(), 1, FinishReason::Eos(EOS)),
        ([9, 99, EOS, 98], stops(&[99], &[]), 2, FinishReason::StopToken(99)),
        ([50, EOS, 51, 52], params(16), 2, FinishReason::Eos(EOS)),
        ([EOS, 9, 9, 9], params(16), 1, FinishReason::Eos(EOS)),
    ];
    for mode in BOTH {
        for (verified, params, n_kept, reason) in &cases {
            let output = [&[60][..], verified].concat();
            let rig = run(mode, 3, &output, params.clone());
            let deltas = rig.deltas(0);
            assert_eq!((deltas.len(), &deltas[1].tokens[..]), (2, &verified[..*n_kept]));
            assert_eq!(deltas[1].n_accepted as usize, n_kept - 1, "{mode:?}, {verified:?}");
            assert_eq!(rig.reason(0).as_ref(), Some(reason), "{mode:?}, {verified:?}");
            let stats = rig.stats();
            assert_eq!(stats.n_generated_tokens as usize, 1 + n_kept);
            assert_eq!(stats.spec_decode.n_accepted_tokens as usize, n_kept - 1);
        }
    }
}

/// Nothing that was in flight is streamed after the last event.
#[test]
fn an_abort_ends_a_request_whatever_is_in_flight() {
    for mode in BOTH {
        for n_steps in 0..6 {
            let mut rig = Rig::new(config(mode, 3), limits(4, 20));
            rig.submit(0, 6, 40);
            rig.submit(1, 6, 10);
            (0..n_steps).for_each(|_| assert!(rig.step()));
            let n_streamed = rig.tokens(0).len();
            assert!(rig.scheduler.abort(RequestId(0), &mut rig.events));
            rig.scheduler.check_invariants();
            rig.drain();
            assert_eq!(rig.reason(0), Some(FinishReason::Aborted));
            assert_eq!(rig.tokens(0).len(), n_streamed);
            let of_request = |event: &&RequestEvent| event.request_id() == RequestId(0);
            let last = rig.events.iter().rfind(of_request);
            assert!(matches!(last, Some(RequestEvent::Finished { .. })), "{last:?}");
            assert_eq!(rig.reason(1), Some(FinishReason::MaxTokens));
            assert_eq!(rig.stats().blocks.n_used, 0);
        }
    }
}

/// The reference's rate without a step is 0.0; ours says that there is none.
#[test]
fn acceptance_is_counted_over_drafts() {
    let after = |k, accepted: &[usize]| {
        let mut stats = SpecDecodeStats::default();
        accepted.iter().for_each(|&n_accepted| stats.record_step(k, n_accepted));
        stats
    };
    // A step of `m` tokens accepted `m - 1` drafts.
    let both = after(1, &[0, 1]);
    assert_eq!((both.n_draft_tokens, both.n_accepted_tokens), (2, 1));
    assert_eq!(after(2, &[0]).n_draft_tokens, 2);
    assert_eq!(after(3, &[]).acceptance_rate(), None);
}

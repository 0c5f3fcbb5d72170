//! Metrics of records whose figures are known.

use super::*;
use crate::record::Arrival;
use crate::target::Counters;

fn at(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

fn record(due: u64, messages: &[(u64, u32)]) -> Record {
    let messages: Vec<_> =
        messages.iter().map(|(millis, n)| Arrival { at: at(*millis), n_tokens: *n }).collect();
    let ended = messages.last().map_or(at(due), |message| message.at);
    Record {
        index: 0,
        due: at(due),
        sent: at(due),
        messages,
        ended,
        outcome: Outcome::Completed,
        n_prompt: 10,
        n_planned: None,
        counted: Counted::Ids,
    }
}

fn failed(due: u64, class: &str) -> Record {
    let outcome = Outcome::Failed { class: class.to_owned(), message: String::new() };
    Record { outcome, ended: at(due + 100_000), ..record(due, &[(due + 1, 7)]) }
}

#[test]
fn bunched_tokens_are_told_by_message_and_by_token() {
    let metrics = Metrics::of(&[record(0, &[(100, 1), (130, 4), (160, 4)])], &Slo::default());
    assert_eq!(metrics.tpot_ms.unwrap().mean, 7.5);
    assert_eq!((metrics.itl_message_ms.unwrap().n, metrics.itl_message_ms.unwrap().p50), (2, 30.0));
    assert_eq!((metrics.itl_token_ms.unwrap().n, metrics.itl_token_ms.unwrap().mean), (8, 7.5));
    assert_eq!(metrics.tokens_per_message.unwrap().mean, 3.0);
    assert_eq!(metrics.output_throughput, 9.0 / 0.16);
    assert!(metrics.peak_output_throughput >= metrics.output_throughput);
}

/// Messages of several tokens, a run of accepted drafts that an end-of-sequence id cuts, and a
/// reply of one token.
#[test]
fn l25_messages_of_several_tokens_are_measured_right() {
    let metrics = Metrics::of(&[record(0, &[(100, 1), (130, 4), (160, 4)])], &Slo::default());
    assert_eq!(metrics.n_output_tokens, 9);
    assert_eq!(metrics.tpot_ms.unwrap().mean, 7.5);
    assert!(metrics.peak_output_throughput >= metrics.output_throughput);

    // Its two verify steps: 3 drafts each, all right.
    let before = Counters {
        verify_steps: 2,
        draft_tokens: 6,
        accepted_tokens: 6,
        drafted_per_position: vec![2; 3],
        accepted_per_position: vec![2; 3],
        ..Counters::default()
    };
    assert_eq!((before.acceptance_length(), before.acceptance_rate()), (Some(4.0), Some(1.0)));
    // Then one whose 5 drafts are all right, the third of them the end: 3 tokens are emitted.
    let after = Counters {
        verify_steps: 3,
        draft_tokens: 11,
        accepted_tokens: 8,
        drafted_per_position: vec![3, 3, 3, 1, 1],
        accepted_per_position: vec![3, 3, 2, 0, 0],
        ..Counters::default()
    };
    let last = after.since(&before).unwrap();
    assert_eq!(last.acceptance_length(), Some(3.0), "what is emitted, not what was right");
    assert_eq!(last.accepted_per_position, [1, 1, 0, 0, 0]);
    for (of, k) in [(&before, 3.0), (&last, 5.0)] {
        let rate = of.acceptance_rate().unwrap();
        assert_eq!(of.acceptance_length(), Some(1.0 + k * rate));
    }

    let one = Metrics::of(&[record(0, &[(100, 1)])], &Slo::default());
    assert_eq!((one.tpot_ms, one.itl_token_ms), (None, None), "neither 0 nor NaN");
    assert!(serde_json::to_value(&one).unwrap()["tpot_ms"].is_null());
    let both = [record(0, &[(100, 1)]), record(0, &[(100, 1), (130, 4)])];
    let tpot_ms = Metrics::of(&both, &Slo::default()).tpot_ms.unwrap();
    assert_eq!((tpot_ms.n, tpot_ms.mean), (1, 7.5));
    let unspoken = Counters { decode_steps: 5, ..Counters::default() };
    assert_eq!((unspoken.acceptance_length(), unspoken.acceptance_rate()), (None, None));
    let error = unspoken.since(&after).unwrap_err();
    assert_eq!(error.message, "the server was started anew while it was measured");
    let fewer_positions = Counters { drafted_per_position: vec![3], ..after.clone() };
    assert!(fewer_positions.since(&after).is_err());
}

#[test]
fn failures_are_counted_and_never_averaged_in() {
    let good = record(0, &[(100, 1), (200, 1)]);
    let cut = Record { outcome: Outcome::Cut, ..record(0, &[(900_000, 5)]) };
    let records = [good.clone(), failed(0, "UNAVAILABLE"), failed(10, "UNAVAILABLE"), cut];
    let mixed = Metrics::of(&records, &Slo::default());
    let alone = Metrics::of(&[good], &Slo::default());
    assert_eq!(mixed.failures, BTreeMap::from([("UNAVAILABLE".to_owned(), 2)]));
    assert_eq!((mixed.n_requests, mixed.n_completed, mixed.n_cut), (4, 1, 1));
    assert_eq!((mixed.e2el_ms, mixed.ttft_ms), (alone.e2el_ms, alone.ttft_ms));
    assert_eq!(mixed.output_throughput, alone.output_throughput);
}

#[test]
fn answers_that_are_short_are_counted_where_their_tokens_are() {
    let planned = |n, counted| Record { n_planned: n, counted, ..record(0, &[(100, 1), (200, 3)]) };
    let of = |records: &[Record]| {
        let metrics = Metrics::of(records, &Slo::default());
        (metrics.n_short, metrics.counted)
    };
    let (ids, usage) = (Counted::Ids, Counted::Usage);
    assert_eq!(of(&[planned(Some(4), ids), planned(None, ids)]), (0, ids));
    assert_eq!(of(&[planned(Some(5), ids), planned(Some(9), usage)]), (2, usage));
    let by_messages = planned(Some(5), Counted::Messages);
    assert_eq!(of(&[planned(None, usage), by_messages]), (0, Counted::Messages));
    let cut = Record { outcome: Outcome::Cut, ..planned(Some(5), usage) };
    assert_eq!(of(&[cut]), (0, ids));
}

#[test]
fn good_requests_keep_every_limit() {
    let records = [
        record(0, &[(100, 1), (200, 1)]),
        record(0, &[(300, 1), (350, 1)]),
        record(0, &[(100, 1), (1_000, 1)]),
        record(0, &[(50, 1)]),
    ];
    let slo = Slo { ttft_ms: Some(200.0), tpot_ms: Some(100.0), e2el_ms: None };
    assert_eq!(Metrics::of(&records, &slo).goodput, Some(2.0));
    assert_eq!(Metrics::of(&records, &Slo::default()).goodput, None);
}

#[test]
fn the_peak_is_found_and_is_no_bunch() {
    // One token each 100 ms for 2 s, then 50 tokens evenly over the third second in two bunches.
    let mut messages: Vec<_> = (0..20).map(|i| (100 * i, 1)).collect();
    messages.extend([(2_000, 1), (2_500, 25), (3_000, 25)]);
    let metrics = Metrics::of(&[record(0, &messages)], &Slo::default());
    assert_eq!(metrics.duration_s, 3.0);
    assert!((metrics.peak_output_throughput - 51.0).abs() < 1.1, "{metrics:?}");
    assert_eq!(metrics.output_throughput, 71.0 / 3.0);
}

#[test]
fn nothing_is_nothing() {
    let metrics = Metrics::of(&[], &Slo::default());
    assert_eq!((metrics.duration_s, metrics.output_throughput), (0.0, 0.0));
    assert!(metrics.ttft_ms.is_none() && metrics.peak_output_throughput == 0.0);
}

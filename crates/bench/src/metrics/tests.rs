//! Metrics of records whose figures are known.

use super::*;
use crate::record::Arrival;

fn at(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

fn record(due: u64, messages: &[(u64, u32)]) -> Record {
    let messages: Vec<_> =
        messages.iter().map(|(millis, n)| Arrival { at: at(*millis), n_tokens: *n }).collect();
    let ended = messages.last().map_or(at(due), |message| message.at);
    let outcome = Outcome::Completed;
    Record { index: 0, due: at(due), sent: at(due), messages, ended, outcome, n_prompt: 10 }
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

//! What the mock server does, and what must be measured of it.

use std::time::Duration;

use bench::{Arrival, Metrics, Outcome, Record, Summary};

/// Tokens of the messages of an answer, in turn.
const BUNCHES: [u32; 4] = [1, 4, 2, 3];

/// How the server answers the request of a place.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Script {
    /// Whether a request waits until the one before it has ended.
    pub(crate) one_at_a_time: bool,
}

/// One answer: after each pause, this many tokens; then the end, or an error.
pub(crate) struct Answer {
    pub(crate) messages: Vec<(Duration, u32)>,
    pub(crate) fails: bool,
}

fn ms(n: u32) -> Duration {
    Duration::from_millis(n.into())
}

impl Script {
    pub(crate) fn answer(&self, index: u32) -> Answer {
        if self.one_at_a_time {
            return Answer { messages: vec![(ms(50), 1), (ms(30), 4)], fails: false };
        }
        if index % 11 == 3 {
            return Answer { messages: vec![], fails: true };
        }
        // Some start slowly.
        let first = if index % 17 == 5 { 2_000 } else { 50 + 10 * (index % 7) };
        let gap = 20 + 8 * (index % 5);
        let n_messages = 3 + (index % 9) as usize;
        let bunches = BUNCHES.iter().cycle().skip((index % 4) as usize).take(n_messages);
        let pauses = std::iter::once(first).chain(std::iter::repeat(gap));
        let messages = pauses.zip(bunches).map(|(pause, n)| (ms(pause), *n)).collect();
        Answer { messages, fails: index % 13 == 7 }
    }

    /// The record of a request that is sent at `due` and begun at `start`.
    fn record(&self, index: u32, due: Duration, start: Duration) -> Record {
        let answer = self.answer(index);
        let mut at = start;
        let arrival = |(pause, n_tokens): &(Duration, u32)| {
            at += *pause;
            Arrival { at, n_tokens: *n_tokens }
        };
        let messages: Vec<Arrival> = answer.messages.iter().map(arrival).collect();
        let failure =
            Outcome::Failed { class: "Unavailable".into(), message: "as scripted".into() };
        let outcome = if answer.fails { failure } else { Outcome::Completed };
        Record { index: index as usize, due, sent: due, messages, ended: at, outcome, n_prompt: 1 }
    }

    /// The records of a closed loop: each place takes the next request when it is free.
    pub(crate) fn closed(&self, n: u32, concurrency: usize) -> Vec<Record> {
        let mut free = vec![Duration::ZERO; concurrency];
        (0..n)
            .map(|index| {
                let place = free.iter_mut().min().unwrap();
                let record = self.record(index, *place, *place);
                *place = record.ended;
                record
            })
            .collect()
    }

    /// The records of an open loop, at a server that takes one request at a time.
    pub(crate) fn open(&self, due: &[Duration]) -> Vec<Record> {
        let mut free = Duration::ZERO;
        (0..)
            .zip(due)
            .map(|(index, due)| {
                let record = self.record(index, *due, free.max(*due));
                free = record.ended;
                record
            })
            .collect()
    }
}

/// Asserts that all figures are within 1 % of the truth, and counts equal.
pub(crate) fn assert_close(measured: &Metrics, truth: &Metrics) {
    assert_eq!(measured.failures, truth.failures);
    assert_eq!(measured.n_completed, truth.n_completed);
    assert_eq!(measured.n_output_tokens, truth.n_output_tokens);
    assert_eq!(measured.n_prompt_tokens, truth.n_prompt_tokens);
    let close = |name: &str, measured: f64, truth: f64| {
        let bound = 0.01 * truth.abs();
        assert!((measured - truth).abs() <= bound, "{name}: {measured}, the truth is {truth}");
    };
    close("duration", measured.duration_s, truth.duration_s);
    close("requests", measured.request_throughput, truth.request_throughput);
    close("output", measured.output_throughput, truth.output_throughput);
    close("total", measured.total_throughput, truth.total_throughput);
    close("concurrency", measured.mean_concurrency, truth.mean_concurrency);
    assert!(measured.peak_output_throughput >= measured.output_throughput);
    type Of = fn(&Metrics) -> Option<Summary>;
    let pairs: [(&str, Of); 6] = [
        ("ttft", |of| of.ttft_ms),
        ("tpot", |of| of.tpot_ms),
        ("itl by message", |of| of.itl_message_ms),
        ("itl by token", |of| of.itl_token_ms),
        ("tokens a message", |of| of.tokens_per_message),
        ("e2el", |of| of.e2el_ms),
    ];
    for (name, of) in pairs {
        let (measured, truth) = (of(measured).unwrap(), of(truth).unwrap());
        assert_eq!(measured.n, truth.n, "{name}");
        close(name, measured.mean, truth.mean);
        close(name, measured.p50, truth.p50);
        close(name, measured.p99, truth.p99);
    }
}

//! What plots need of a run, in a bounded size.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::metrics::spread;
use crate::record::{Outcome, Record};
use crate::target::Counters;

/// Most parts of a timeline.
const N_PARTS_MAX: usize = 120;
/// Least length of a part, seconds: what is shorter shows single steps of a server.
const PART_S_MIN: f64 = 0.25;

/// What plots need of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Series {
    /// Time to the first token, milliseconds.
    pub ttft_ms: Quantiles,
    /// Time per output token after the first, milliseconds.
    pub tpot_ms: Quantiles,
    /// Gaps between tokens, milliseconds.
    pub itl_token_ms: Quantiles,
    /// Time to the end, milliseconds.
    pub e2el_ms: Quantiles,
    /// What went on over time.
    pub timeline: Timeline,
}

/// The values at 0, 1, ... 100 percent of a sample (nearest rank, none interpolated); none of an
/// empty one.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Quantiles(pub Vec<f64>);

/// Equal parts of a run from its first request's due time on, those that failed or were cut
/// included: they were work too.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Timeline {
    /// Length of a part, seconds.
    pub part_s: f64,
    /// Generated tokens a second. A message's tokens count evenly over the gap before it.
    pub output_throughput: Vec<f64>,
    /// Mean number of requests that ran.
    pub running: Vec<f64>,
    /// Steps of the engine a second, by kind; empty where the server does not tell.
    #[serde(default)]
    pub steps: StepRates,
}

/// Steps a second in each part of a [`Timeline`], by what they did.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepRates {
    /// Continued outputs.
    pub decode: Vec<f64>,
    /// Read prompts.
    pub prefill: Vec<f64>,
    /// Both.
    pub mixed: Vec<f64>,
}

/// The steps that a server had done at a moment of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepCount {
    at: Duration,
    /// Decode, prefill and mixed steps.
    n_steps: [u64; 3],
}

impl StepCount {
    /// Of what it had counted `at` this time from the start of the run.
    #[must_use]
    pub fn new(at: Duration, counters: &Counters) -> Self {
        let Counters { decode_steps, prefill_steps, mixed_steps, .. } = *counters;
        Self { at, n_steps: [decode_steps, prefill_steps, mixed_steps] }
    }
}

impl Quantiles {
    /// Of values, each as often as its weight says.
    #[must_use]
    pub fn of_weighted(values: impl IntoIterator<Item = (f64, u64)>) -> Self {
        let mut values: Vec<(f64, u64)> =
            values.into_iter().filter(|(_, weight)| *weight > 0).collect();
        values.sort_by(|a, b| a.0.total_cmp(&b.0));
        let n: u64 = values.iter().map(|(_, weight)| weight).sum();
        let Some((mut value, mut n_below)) = values.first().copied() else {
            return Self::default();
        };
        let mut rest = values[1..].iter();
        let at = |percent: u64| {
            let rank = (n * percent).div_ceil(100).max(1);
            while n_below < rank {
                let Some((next, weight)) = rest.next() else { break };
                (value, n_below) = (*next, n_below + weight);
            }
            value
        };
        Self((0..=100).map(at).collect())
    }

    fn of(values: impl IntoIterator<Item = Duration>) -> Self {
        Self::of_weighted(values.into_iter().map(|value| (ms(value), 1)))
    }
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

impl Series {
    /// Of what a run kept. Latencies are those of completed requests.
    #[must_use]
    pub fn of(records: &[Record]) -> Self {
        Self::with_steps(records, &[])
    }

    /// The same with the steps that the server had done at moments of the run, in their order.
    #[must_use]
    pub fn with_steps(records: &[Record], counts: &[StepCount]) -> Self {
        let completed = || records.iter().filter(|record| record.outcome == Outcome::Completed);
        let gaps = completed().flat_map(Record::gaps);
        Self {
            ttft_ms: Quantiles::of(completed().filter_map(Record::ttft)),
            tpot_ms: Quantiles::of(completed().filter_map(Record::tpot)),
            itl_token_ms: Quantiles::of_weighted(
                gaps.map(|(gap, n)| (ms(gap) / f64::from(n.max(1)), u64::from(n))),
            ),
            e2el_ms: Quantiles::of(completed().map(Record::e2el)),
            timeline: Timeline::of(records, counts),
        }
    }
}

impl Timeline {
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "few parts"
    )]
    fn of(records: &[Record], counts: &[StepCount]) -> Self {
        let start = records.iter().map(|record| record.due).min().unwrap_or_default();
        let end = records.iter().map(|record| record.ended).max().unwrap_or_default();
        let at = |time: Duration| time.saturating_sub(start).as_secs_f64();
        if at(end) <= 0.0 {
            return Self::default();
        }
        let n_parts = ((at(end) / PART_S_MIN) as usize).clamp(1, N_PARTS_MAX);
        let part_s = at(end) / n_parts as f64;
        let (mut tokens, mut busy) = (vec![0.0; n_parts], vec![0.0; n_parts]);
        for record in records {
            let (sent, ended) = (at(record.sent), at(record.ended));
            spread(&mut busy, part_s, (sent, ended), ended - sent);
            let mut from = record.messages.first().map_or(0.0, |message| at(message.at));
            for message in &record.messages {
                let to = at(message.at);
                spread(&mut tokens, part_s, (from, to), f64::from(message.n_tokens));
                from = to;
            }
        }
        let per_second = |parts: Vec<f64>| parts.into_iter().map(|sum| sum / part_s).collect();
        // Those between two looks count evenly over the time between.
        let steps = |kind: usize| {
            let mut steps = vec![0.0; if counts.is_empty() { 0 } else { n_parts }];
            for two in counts.windows(2) {
                let n = two[1].n_steps[kind].saturating_sub(two[0].n_steps[kind]);
                spread(&mut steps, part_s, (at(two[0].at), at(two[1].at)), n as f64);
            }
            per_second(steps)
        };
        let [decode, prefill, mixed] = [0, 1, 2].map(steps);
        Self {
            part_s,
            output_throughput: per_second(tokens),
            running: per_second(busy),
            steps: StepRates { decode, prefill, mixed },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Arrival;

    fn record(due: u64, messages: &[(u64, u32)], ended: u64) -> Record {
        let at = Duration::from_millis;
        let arrival =
            |(millis, n_tokens): &(u64, u32)| Arrival { at: at(*millis), n_tokens: *n_tokens };
        Record {
            index: 0,
            due: at(due),
            sent: at(due),
            messages: messages.iter().map(arrival).collect(),
            ended: at(ended),
            outcome: Outcome::Completed,
            n_prompt: 1,
            n_planned: None,
            counted: crate::Counted::Ids,
        }
    }

    #[test]
    fn quantiles_are_values_of_the_sample() {
        let quantiles = Quantiles::of_weighted((1..=100).rev().map(|n| (f64::from(n), 1))).0;
        assert_eq!(
            (quantiles[0], quantiles[1], quantiles[50], quantiles[100]),
            (1., 1., 50., 100.)
        );
        let weighted = Quantiles::of_weighted([(9.0, 0), (2.0, 3), (1.0, 1)]).0;
        assert_eq!((weighted[0], weighted[25], weighted[26], weighted[100]), (1., 1., 2., 2.));
        assert_eq!(Quantiles::of_weighted([]).0, Vec::<f64>::new());
    }

    #[test]
    fn gaps_count_once_a_token() {
        let series = Series::of(&[record(0, &[(100, 1), (130, 4), (160, 1)], 160)]);
        assert_eq!(series.itl_token_ms.0[0], 7.5);
        assert_eq!((series.itl_token_ms.0[80], series.itl_token_ms.0[81]), (7.5, 30.0));
        assert_eq!(series.ttft_ms.0[50], 100.0);
        assert_eq!(series.tpot_ms.0[50], 12.0);
    }

    #[test]
    fn a_timeline_holds_every_token_and_every_second_of_a_request() {
        let cut = Record { outcome: Outcome::Cut, ..record(1000, &[(2000, 5)], 4000) };
        let timeline = Series::of(&[record(1000, &[(1500, 1), (2500, 99)], 3000), cut]).timeline;
        let sum = |parts: &[f64]| parts.iter().sum::<f64>() * timeline.part_s;
        assert!((sum(&timeline.output_throughput) - 105.0).abs() < 1e-9);
        assert!((sum(&timeline.running) - 5.0).abs() < 1e-9);
        assert!((timeline.running[0] - 2.0).abs() < 1e-9);
        assert_eq!((timeline.part_s, timeline.running.len()), (0.25, 12));
        let long = Series::of(&[record(0, &[(600_000, 1)], 600_000)]).timeline;
        assert_eq!((long.part_s, long.running.len()), (5.0, 120));
        assert_eq!(Series::of(&[]), Series::default());
    }
}

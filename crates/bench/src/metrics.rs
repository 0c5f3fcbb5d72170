//! The figures of a run, right also where a message holds several tokens.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::record::{Counted, Outcome, Record};
use crate::summary::Summary;

/// Limits that a good request keeps, in milliseconds; what is not set is not asked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Slo {
    /// Time to the first token.
    pub ttft_ms: Option<f64>,
    /// Time per output token after the first; one of a single token keeps it.
    pub tpot_ms: Option<f64>,
    /// Time to the end.
    pub e2el_ms: Option<f64>,
}

/// The figures of a run. Latencies and token counts are those of completed requests alone; failed
/// and cut ones are counted and never averaged in.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Metrics {
    /// Requests that were due.
    pub n_requests: u64,
    /// Requests that completed.
    pub n_completed: u64,
    /// Requests that failed, by class.
    pub failures: BTreeMap<String, u64>,
    /// Requests that the end of the run cut short.
    pub n_cut: u64,
    /// Completed requests that have fewer tokens than planned, where only their number was to end
    /// them.
    #[serde(default)]
    pub n_short: u64,
    /// How generated tokens were counted: the least sure way of a completed request.
    #[serde(default)]
    pub counted: Counted,
    /// Seconds from the first request's due time to the last completed one's end.
    pub duration_s: f64,
    /// Prompt tokens.
    pub n_prompt_tokens: u64,
    /// Generated tokens.
    pub n_output_tokens: u64,
    /// Completed requests a second.
    pub request_throughput: f64,
    /// Generated tokens a second.
    pub output_throughput: f64,
    /// Prompt and generated tokens a second.
    pub total_throughput: f64,
    /// Generated tokens a second in the best of the run's equal parts of a second or a little more;
    /// never below `output_throughput`.
    pub peak_output_throughput: f64,
    /// Completed requests a second that keep the limits, if there are any.
    pub goodput: Option<f64>,
    /// Mean number of requests that ran at once.
    pub mean_concurrency: f64,
    /// Time to the first token, milliseconds.
    pub ttft_ms: Option<Summary>,
    /// Time per output token after the first, milliseconds; one value a request of two tokens or
    /// more.
    pub tpot_ms: Option<Summary>,
    /// Gaps between messages, milliseconds.
    pub itl_message_ms: Option<Summary>,
    /// The same by token: a gap divided by the tokens at its end, once for each of them.
    pub itl_token_ms: Option<Summary>,
    /// Tokens a message.
    pub tokens_per_message: Option<Summary>,
    /// Time to the end, milliseconds.
    pub e2el_ms: Option<Summary>,
    /// How late requests were sent, milliseconds: how well the load kept to its schedule.
    pub send_lag_ms: Option<Summary>,
}

fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

impl Metrics {
    /// The figures of what a run kept.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "counts stay far below 2^52")]
    pub fn of(records: &[Record], slo: &Slo) -> Self {
        let completed: Vec<&Record> =
            records.iter().filter(|record| record.outcome == Outcome::Completed).collect();
        let start = records.iter().map(|record| record.due).min().unwrap_or_default();
        let end = completed.iter().map(|record| record.ended).max().unwrap_or(start);
        let duration_s = end.saturating_sub(start).as_secs_f64();
        let per_second = |n: f64| if duration_s > 0.0 { n / duration_s } else { 0.0 };
        let n_prompt_tokens = completed.iter().map(|record| u64::from(record.n_prompt)).sum();
        let n_output_tokens: u64 =
            completed.iter().map(|record| u64::from(record.n_output())).sum();
        let n_good = completed.iter().filter(|record| slo.is_kept(record)).count();
        let busy_s: f64 = completed.iter().map(|record| record.e2el().as_secs_f64()).sum();
        let gaps = || completed.iter().flat_map(|record| record.gaps());
        let by_token = |(gap, n): (Duration, u32)| (ms(gap) / f64::from(n.max(1)), u64::from(n));
        let messages = completed.iter().flat_map(|record| &record.messages);
        Self {
            n_requests: records.len() as u64,
            n_completed: completed.len() as u64,
            failures: failures(records),
            n_cut: records.iter().filter(|record| record.outcome == Outcome::Cut).count() as u64,
            n_short: records.iter().filter(|record| record.is_short()).count() as u64,
            counted: completed.iter().map(|record| record.counted).max().unwrap_or_default(),
            duration_s,
            n_prompt_tokens,
            n_output_tokens,
            request_throughput: per_second(completed.len() as f64),
            output_throughput: per_second(n_output_tokens as f64),
            total_throughput: per_second((n_prompt_tokens + n_output_tokens) as f64),
            peak_output_throughput: peak(&completed, start, duration_s),
            goodput: (*slo != Slo::default()).then(|| per_second(n_good as f64)),
            mean_concurrency: per_second(busy_s),
            ttft_ms: Summary::of(completed.iter().filter_map(|record| record.ttft()).map(ms)),
            tpot_ms: Summary::of(completed.iter().filter_map(|record| record.tpot()).map(ms)),
            itl_message_ms: Summary::of(gaps().map(|(gap, _)| ms(gap))),
            itl_token_ms: Summary::of_weighted(gaps().map(by_token)),
            tokens_per_message: Summary::of(messages.map(|message| f64::from(message.n_tokens))),
            e2el_ms: Summary::of(completed.iter().map(|record| ms(record.e2el()))),
            send_lag_ms: Summary::of(
                completed.iter().map(|record| ms(record.sent.saturating_sub(record.due))),
            ),
        }
    }
}

impl Slo {
    fn is_kept(&self, record: &Record) -> bool {
        let keeps = |limit: Option<f64>, time: Option<Duration>| match (limit, time) {
            (Some(limit), Some(time)) => ms(time) <= limit,
            _ => true,
        };
        (self.ttft_ms.is_none() || record.ttft().is_some())
            && keeps(self.ttft_ms, record.ttft())
            && keeps(self.tpot_ms, record.tpot())
            && keeps(self.e2el_ms, Some(record.e2el()))
    }
}

fn failures(records: &[Record]) -> BTreeMap<String, u64> {
    let mut failures = BTreeMap::new();
    for record in records {
        if let Outcome::Failed { class, .. } = &record.outcome {
            *failures.entry(class.clone()).or_default() += 1;
        }
    }
    failures
}

/// The greatest rate in equal parts of the run of at least a second. A message's tokens count
/// evenly over the gap before it, so that bunches make no peaks.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a run has far fewer than 2^52 seconds"
)]
fn peak(completed: &[&Record], start: Duration, duration_s: f64) -> f64 {
    if duration_s <= 0.0 {
        return 0.0;
    }
    let n_parts = (duration_s as usize).max(1);
    let part_s = duration_s / n_parts as f64;
    let mut n_tokens = vec![0.0; n_parts];
    let at = |time: Duration| time.saturating_sub(start).as_secs_f64();
    for record in completed {
        let mut from = record.messages.first().map_or(0.0, |message| at(message.at));
        for message in &record.messages {
            let to = at(message.at);
            spread(&mut n_tokens, part_s, (from, to), f64::from(message.n_tokens));
            from = to;
        }
    }
    n_tokens.into_iter().fold(0.0, f64::max) / part_s
}

/// Adds `n` evenly to the parts that the time between the two ends is in.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "indices of parts"
)]
pub(crate) fn spread(parts: &mut [f64], part_s: f64, (from, to): (f64, f64), n: f64) {
    let last = parts.len() - 1;
    let index = |time: f64| ((time / part_s) as usize).min(last);
    let (first, end) = (index(from), index(to));
    if to <= from {
        parts[end] += n;
        return;
    }
    for (i, part) in parts.iter_mut().enumerate().take(end + 1).skip(first) {
        let begins = (i as f64 * part_s).max(from);
        let ends = if i == last { to } else { ((i + 1) as f64 * part_s).min(to) };
        *part += n * (ends - begins).max(0.0) / (to - from);
    }
}

#[cfg(test)]
mod tests;

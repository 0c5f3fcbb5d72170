//! What is kept of each request of a run.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// One request from the moment it was due to its end. Times count from the start of the run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Place in the workload.
    pub index: usize,
    /// When the load was to send it: an open loop's schedule, or when a place became free.
    /// Latencies count from here, so that a generator that is late makes nothing look fast.
    pub due: Duration,
    /// When it was sent.
    pub sent: Duration,
    /// Messages with tokens, in the order in which they came.
    pub messages: Vec<Arrival>,
    /// When the stream ended.
    pub ended: Duration,
    /// How it ended.
    pub outcome: Outcome,
    /// Prompt tokens, as the server counts them; as sent where it does not say.
    pub n_prompt: u32,
    /// Generated tokens that it was to have, where nothing else was to end it.
    #[serde(default)]
    pub n_planned: Option<u32>,
    /// How its generated tokens were counted.
    #[serde(default)]
    pub counted: Counted,
}

/// How generated tokens are counted, the surest way first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Counted {
    /// By their ids.
    #[default]
    Ids,
    /// By the total that the end of the answer tells, shared out evenly over its messages.
    Usage,
    /// As one a message: nothing tells more.
    Messages,
}

/// Tokens that came in one message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Arrival {
    /// When.
    pub at: Duration,
    /// How many, as [`Record::counted`] says.
    pub n_tokens: u32,
}

/// How a request ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// Whole.
    Completed,
    /// With an error, of this class (a gRPC code, an HTTP status, `connection`).
    Failed {
        /// What failures are counted by.
        class: String,
        /// The first one's text is shown.
        message: String,
    },
    /// Not at all: the run was cut short.
    Cut,
}

impl Record {
    /// Generated tokens.
    #[must_use]
    pub fn n_output(&self) -> u32 {
        self.messages.iter().map(|message| message.n_tokens).sum()
    }

    /// Whether it completed with fewer tokens than it was to have, as far as they are counted.
    #[must_use]
    pub fn is_short(&self) -> bool {
        let is_below = self.n_planned.is_some_and(|n| self.n_output() < n);
        self.outcome == Outcome::Completed && self.counted != Counted::Messages && is_below
    }

    /// Time to the first token.
    #[must_use]
    pub fn ttft(&self) -> Option<Duration> {
        Some(self.messages.first()?.at.saturating_sub(self.due))
    }

    /// Time to the end of the stream.
    #[must_use]
    pub fn e2el(&self) -> Duration {
        self.ended.saturating_sub(self.due)
    }

    /// Time per output token after the first one: the time between the first and the last message
    /// with tokens, divided by the tokens but one. None of fewer than two tokens.
    #[must_use]
    pub fn tpot(&self) -> Option<Duration> {
        let n_gaps = self.n_output().checked_sub(1).filter(|n| *n > 0)?;
        let (first, last) = (self.messages.first()?, self.messages.last()?);
        Some(last.at.saturating_sub(first.at) / n_gaps)
    }

    /// The gaps between messages, each with the tokens that came at its end.
    pub fn gaps(&self) -> impl Iterator<Item = (Duration, u32)> + '_ {
        self.messages.windows(2).map(|two| (two[1].at.saturating_sub(two[0].at), two[1].n_tokens))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    fn record(messages: &[(u64, u32)]) -> Record {
        let messages: Vec<_> =
            messages.iter().map(|(at, n)| Arrival { at: ms(*at), n_tokens: *n }).collect();
        let ended = messages.last().map_or(ms(0), |message| message.at);
        Record {
            index: 0,
            due: ms(0),
            sent: ms(0),
            messages,
            ended,
            outcome: Outcome::Completed,
            n_prompt: 1,
            n_planned: None,
            counted: Counted::Ids,
        }
    }

    #[test]
    fn bunched_tokens_count_one_by_one() {
        let record = record(&[(100, 1), (130, 4), (160, 4)]);
        assert_eq!(record.n_output(), 9);
        assert_eq!(record.ttft(), Some(ms(100)));
        assert_eq!(record.tpot(), Some(Duration::from_micros(7500)));
        assert_eq!(record.gaps().collect::<Vec<_>>(), [(ms(30), 4), (ms(30), 4)]);
    }

    #[test]
    fn one_token_has_no_time_per_token_and_none_no_first() {
        assert_eq!(record(&[(100, 1)]).tpot(), None);
        assert_eq!(record(&[]).tpot(), None);
        assert_eq!(record(&[]).ttft(), None);
    }

    #[test]
    fn a_late_generator_makes_nothing_look_fast() {
        let record = Record { due: ms(10), sent: ms(60), ..record(&[(100, 1), (110, 1)]) };
        assert_eq!(record.ttft(), Some(ms(90)));
        assert_eq!(record.e2el(), ms(100));
    }
}

//! Which differences between results mean something.

pub(crate) mod ab;
mod files;

use serde::{Deserialize, Serialize};

use crate::result::RunResult;

pub use ab::{AbResult, AbRow, CONFIDENCE, EFFECT_MIN};
pub use files::{
    ACCEPTANCE_LOSS_MAX, ASSUMED_SPREAD, Comparison, Finding, Incomparable, Row, Setting, compare,
};

/// Repeats from which on their range says something of their spread.
pub(crate) const N_REPEATS_MIN: usize = 3;

/// Values of repeats.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// How many.
    pub n: usize,
    /// The middle one; the mean of the middle two.
    pub median: f64,
    /// Least.
    pub min: f64,
    /// Greatest.
    pub max: f64,
}

impl Spread {
    /// Of values; `None` of none.
    #[must_use]
    pub fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut values: Vec<f64> = values.into_iter().collect();
        values.sort_by(f64::total_cmp);
        let n = values.len();
        let (min, max) = (*values.first()?, *values.last()?);
        Some(Self { n, median: f64::midpoint(values[(n - 1) / 2], values[n / 2]), min, max })
    }

    /// Greatest less least.
    #[must_use]
    pub fn range(&self) -> f64 {
        self.max - self.min
    }
}

/// A figure of a run that is compared.
pub(crate) struct Figure {
    pub(crate) label: &'static str,
    /// The same where there is little room.
    pub(crate) short: &'static str,
    pub(crate) unit: &'static str,
    pub(crate) is_more_better: bool,
    pub(crate) of: fn(&RunResult) -> Option<f64>,
}

/// The figure that decides.
pub(crate) const HEADLINE: &str = "output throughput";

/// The figure that means nothing without its limits.
pub(crate) const GOODPUT: &str = "goodput";

pub(crate) const FIGURES: [Figure; 11] = [
    Figure {
        label: HEADLINE,
        short: "output tok/s",
        unit: "tokens/s",
        is_more_better: true,
        of: |run| Some(run.metrics.output_throughput),
    },
    Figure {
        label: "request throughput",
        short: "req/s",
        unit: "requests/s",
        is_more_better: true,
        of: |run| Some(run.metrics.request_throughput),
    },
    Figure {
        label: GOODPUT,
        short: "good req/s",
        unit: "requests/s",
        is_more_better: true,
        of: |run| run.metrics.goodput,
    },
    Figure {
        label: "TTFT, median",
        short: "TTFT p50",
        unit: "ms",
        is_more_better: false,
        of: |run| Some(run.metrics.ttft_ms?.p50),
    },
    Figure {
        label: "TTFT, p99",
        short: "TTFT p99",
        unit: "ms",
        is_more_better: false,
        of: |run| Some(run.metrics.ttft_ms?.p99),
    },
    Figure {
        label: "TPOT, mean",
        short: "TPOT",
        unit: "ms",
        is_more_better: false,
        of: |run| Some(run.metrics.tpot_ms?.mean),
    },
    Figure {
        label: "ITL per token, p99",
        short: "ITL p99",
        unit: "ms",
        is_more_better: false,
        of: |run| Some(run.metrics.itl_token_ms?.p99),
    },
    Figure {
        label: "E2EL, median",
        short: "E2EL p50",
        unit: "ms",
        is_more_better: false,
        of: |run| Some(run.metrics.e2el_ms?.p50),
    },
    Figure {
        label: "batch, median",
        short: "batch p50",
        unit: "ms",
        is_more_better: false,
        of: |run| Some(run.batch_ms?.p50),
    },
    Figure {
        label: "acceptance length",
        short: "accepted length",
        unit: "tokens/step",
        is_more_better: true,
        of: |run| run.counters.as_ref()?.acceptance_length(),
    },
    Figure {
        label: "acceptance rate",
        short: "accepted %",
        unit: "%",
        is_more_better: true,
        of: |run| Some(run.counters.as_ref()?.acceptance_rate()? * 100.0),
    },
];

/// The repeats of one setting on one server.
pub(crate) struct Group<'a> {
    pub(crate) name: &'a str,
    pub(crate) server: &'a str,
    pub(crate) runs: Vec<&'a RunResult>,
}

/// Runs by setting and server, in the order in which those first ran.
pub(crate) fn groups<'a>(runs: impl IntoIterator<Item = &'a RunResult>) -> Vec<Group<'a>> {
    let mut groups: Vec<Group<'_>> = vec![];
    for run in runs {
        let known = groups.iter_mut().find(|of| of.name == run.name && of.server == run.server);
        match known {
            Some(group) => group.runs.push(run),
            None => groups.push(Group { name: &run.name, server: &run.server, runs: vec![run] }),
        }
    }
    for group in &mut groups {
        group.runs.sort_by_key(|run| run.repeat);
    }
    groups
}

impl Group<'_> {
    pub(crate) fn spread(&self, of: fn(&RunResult) -> Option<f64>) -> Option<Spread> {
        Spread::of(self.runs.iter().filter_map(|run| of(run)))
    }
}

#[cfg(test)]
pub(crate) mod tests;

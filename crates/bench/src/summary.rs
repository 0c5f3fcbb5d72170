//! A distribution in a few figures.

use serde::{Deserialize, Serialize};

/// Figures of a sample, in the sample's unit.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// Number of values.
    pub n: u64,
    /// Arithmetic mean.
    pub mean: f64,
    /// Standard deviation of the sample (divided by `n`).
    pub std: f64,
    /// Least value.
    pub min: f64,
    /// Median.
    pub p50: f64,
    /// 90 of 100 values are at most this.
    pub p90: f64,
    /// 95 of 100.
    pub p95: f64,
    /// 99 of 100.
    pub p99: f64,
    /// Greatest value.
    pub max: f64,
}

impl Summary {
    /// Of values, each as often as its weight says; `None` of none. Percentiles are values of the
    /// sample (nearest rank), none is interpolated.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "counts stay far below 2^52")]
    pub fn of_weighted(values: impl IntoIterator<Item = (f64, u64)>) -> Option<Self> {
        let mut values: Vec<(f64, u64)> =
            values.into_iter().filter(|(_, weight)| *weight > 0).collect();
        values.sort_by(|a, b| a.0.total_cmp(&b.0));
        let n: u64 = values.iter().map(|(_, weight)| weight).sum();
        let ((min, _), (max, _)) = (values.first()?, values.last()?);
        let mean_of = |of: &dyn Fn(f64) -> f64| {
            values.iter().map(|(value, weight)| of(*value) * *weight as f64).sum::<f64>() / n as f64
        };
        let mean = mean_of(&|value| value);
        let variance = mean_of(&|value| (value - mean).powi(2));
        let percentile = |percent: u64| {
            let rank = (n * percent).div_ceil(100).max(1);
            let mut n_below = 0;
            let at_rank = values.iter().find(|(_, weight)| {
                n_below += weight;
                n_below >= rank
            });
            at_rank.map_or(*max, |(value, _)| *value)
        };
        Some(Self {
            n,
            mean,
            std: variance.sqrt(),
            min: *min,
            p50: percentile(50),
            p90: percentile(90),
            p95: percentile(95),
            p99: percentile(99),
            max: *max,
        })
    }

    /// Of values that count once each.
    #[must_use]
    pub fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        Self::of_weighted(values.into_iter().map(|value| (value, 1)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_values_of_the_sample() {
        let summary = Summary::of((1..=100).rev().map(f64::from)).unwrap();
        assert_eq!((summary.min, summary.p50, summary.p90), (1.0, 50.0, 90.0));
        assert_eq!((summary.p95, summary.p99, summary.max), (95.0, 99.0, 100.0));
        assert_eq!(summary.mean, 50.5);
        assert!((summary.std - 28.866_070_047_722_12).abs() < 1e-12);
        assert_eq!(Summary::of([]), None);
        assert_eq!(Summary::of([3.0]).unwrap().p99, 3.0);
    }

    #[test]
    fn a_weight_is_that_many_values() {
        let weighted = Summary::of_weighted([(2.0, 3), (1.0, 1), (9.0, 0)]).unwrap();
        assert_eq!(weighted, Summary::of([1.0, 2.0, 2.0, 2.0]).unwrap());
    }
}

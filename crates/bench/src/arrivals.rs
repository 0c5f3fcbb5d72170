//! When requests are sent.

use std::time::Duration;

use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution as _, Gamma};
use serde::{Deserialize, Serialize};

/// When requests are sent.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Load {
    /// So that this many run at a time: the next one is sent when one ends.
    Closed {
        /// Requests at a time, at least 1.
        concurrency: usize,
    },
    /// At times of its own, whatever the server does.
    Open {
        /// Requests a second, above 0.
        rate: f64,
        /// Shape of the gamma distribution of the gaps: 1 is a Poisson process, below is burstier,
        /// above is more even.
        burstiness: f64,
    },
}

/// The due times of `n` requests of an open loop, from 0 on.
///
/// # Panics
///
/// If the rate or the burstiness is not a finite number above 0.
#[must_use]
pub fn schedule(rate: f64, burstiness: f64, n: usize, rng: &mut ChaCha8Rng) -> Vec<Duration> {
    let gaps = Gamma::new(burstiness, 1.0 / (rate * burstiness)).expect("numbers above 0");
    let mut due = 0.0;
    let mut times = Vec::with_capacity(n);
    for _ in 0..n {
        times.push(Duration::from_secs_f64(due));
        due += gaps.sample(rng);
    }
    times
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng as _;

    use super::*;

    #[test]
    fn gaps_have_the_rate_and_the_burstiness() {
        for burstiness in [0.3, 1.0, 4.0] {
            let times = schedule(50.0, burstiness, 100_001, &mut ChaCha8Rng::seed_from_u64(7));
            let gaps: Vec<f64> =
                times.windows(2).map(|two| (two[1] - two[0]).as_secs_f64()).collect();
            let mean = gaps.iter().sum::<f64>() / 1e5;
            let variance = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / 1e5;
            assert!((mean * 50.0 - 1.0).abs() < 0.03, "{mean}");
            // A gamma distribution's squared coefficient of variation is one over its shape.
            assert!((variance / (mean * mean) * burstiness - 1.0).abs() < 0.06, "{variance}");
        }
    }

    #[test]
    fn a_seed_always_gives_the_same_times() {
        let of = |seed| schedule(3.0, 1.0, 10, &mut ChaCha8Rng::seed_from_u64(seed));
        assert_eq!(of(1), of(1));
        assert_ne!(of(1), of(2));
        assert_eq!(of(1)[0], Duration::ZERO);
    }
}

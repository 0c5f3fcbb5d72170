//! Acceptance by a schedule instead of by the target, for benches of the machinery around it.

use engine_types::MAX_SPECULATIVE_TOKENS;
use sampler::noise::philox4x32;

use crate::error::SpecDecodeError;

/// Keys the noise of the first step.
const SEED: u64 = 0x5EED;

/// Which share of drafts is accepted at each place of a window, with the mean asked for and the
/// smallest variance that it can have: as many whole places as fit, then a fraction.
#[derive(Clone, Debug, PartialEq)]
pub struct SyntheticAcceptance {
    marginal: Vec<f64>,
}

impl SyntheticAcceptance {
    /// Runs of `length` tokens in the mean, in `[1, num_speculative_tokens + 1]`: accepted drafts
    /// and the one token that the target adds.
    ///
    /// # Errors
    ///
    /// [`SpecDecodeError::SyntheticAcceptance`] if `length` is outside of that,
    /// [`SpecDecodeError::TooManyDrafts`] beyond [`MAX_SPECULATIVE_TOKENS`].
    pub fn from_length(
        length: f64,
        num_speculative_tokens: usize,
    ) -> Result<Self, SpecDecodeError> {
        let most = (num_speculative_tokens + 1) as f64;
        Self::check("length", length, (1.0, most), num_speculative_tokens)?;
        let share = |at: usize| (length - 1.0 - at as f64).clamp(0.0, 1.0);
        Ok(Self { marginal: (0..num_speculative_tokens).map(share).collect() })
    }

    /// The share `rate` of all drafts, in `[0, 1]`, so runs of `1 + rate * num_speculative_tokens`.
    ///
    /// # Errors
    ///
    /// As [`SyntheticAcceptance::from_length`].
    pub fn from_rate(rate: f64, num_speculative_tokens: usize) -> Result<Self, SpecDecodeError> {
        Self::check("rate", rate, (0.0, 1.0), num_speculative_tokens)?;
        Self::from_length(1.0 + rate * num_speculative_tokens as f64, num_speculative_tokens)
    }

    fn check(
        option: &'static str,
        value: f64,
        (least, most): (f64, f64),
        num_speculative_tokens: usize,
    ) -> Result<(), SpecDecodeError> {
        if num_speculative_tokens > MAX_SPECULATIVE_TOKENS {
            return Err(SpecDecodeError::TooManyDrafts { num_speculative_tokens });
        }
        if (least..=most).contains(&value) {
            return Ok(());
        }
        Err(SpecDecodeError::SyntheticAcceptance { option, value, least, most })
    }

    /// Probability that the draft at each place of a window is accepted, `[k]`, descending.
    #[must_use]
    pub fn marginal(&self) -> &[f64] {
        &self.marginal
    }

    /// Probability that the draft at place `at` is accepted if all before it are.
    fn conditional(&self, at: usize) -> f64 {
        let before = if at == 0 { 1.0 } else { self.marginal[at - 1] };
        if before == 0.0 { 0.0 } else { self.marginal[at] / before }
    }

    /// How many of `n_drafts` drafts are accepted in verify step `step`, in the window whose first
    /// logits row is `first`.
    #[must_use]
    pub fn n_accepted(&self, step: u64, first: usize, n_drafts: usize) -> usize {
        let n_places = n_drafts.min(self.marginal.len());
        let is_accepted = |&at: &usize| uniform(step, first + at) < self.conditional(at);
        (0..n_places).take_while(is_accepted).count()
    }
}

/// A number in `[0, 1)` for a logits row of a step, a multiple of 2^-32.
fn uniform(step: u64, row: usize) -> f64 {
    let key = SEED.wrapping_add(step);
    let row = row as u64;
    let counter = [row as u32, (row >> 32) as u32, 0, 0];
    f64::from(philox4x32(counter, [key as u32, (key >> 32) as u32])[0]) * (-32f64).exp2()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AcceptedRuns, SpecDecodeMetadata};

    #[test]
    fn the_schedule_has_the_least_variance() {
        let shares = |length, k| SyntheticAcceptance::from_length(length, k).unwrap().marginal;
        let close = |got: &[f64], expected: &[f64]| {
            assert_eq!(got.len(), expected.len());
            assert!(got.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-12), "{got:?}");
        };
        close(&shares(3.78, 7), &[1.0, 1.0, 0.78, 0.0, 0.0, 0.0, 0.0]);
        close(&shares(3.07, 3), &[1.0, 1.0, 0.07]);
        close(&shares(1.0, 3), &[0.0; 3]);
        close(&shares(4.0, 3), &[1.0; 3]);
        close(&SyntheticAcceptance::from_rate(0.657, 3).unwrap().marginal, &[1.0, 0.971, 0.0]);
        close(&SyntheticAcceptance::from_rate(1.0, 2).unwrap().marginal, &[1.0; 2]);
    }

    #[test]
    fn values_out_of_range_are_refused() {
        for length in [0.99, 4.01, f64::NAN] {
            let error = SyntheticAcceptance::from_length(length, 3).unwrap_err().to_string();
            assert!(error.ends_with("it must lie in [1, 4]"), "{error}");
        }
        for rate in [-0.1, 1.1, f64::NAN] {
            let error = SyntheticAcceptance::from_rate(rate, 3).unwrap_err().to_string();
            assert!(error.starts_with("the acceptance rate is"), "{error}");
        }
        assert!(SyntheticAcceptance::from_rate(0.5, MAX_SPECULATIVE_TOKENS + 1).is_err());
    }

    /// The specification's example: 22 % of the runs accept two drafts and 78 % three. Of 40,000
    /// runs the share is within four standard errors, 0.0083.
    #[test]
    fn runs_follow_the_schedule() {
        let synthetic = SyntheticAcceptance::from_length(3.78, 7).unwrap();
        let mut metadata = SpecDecodeMetadata::default();
        for seq in 0..4 {
            metadata.push(seq * 8..seq * 8 + 8, &[1, 2, 3, 4, 5, 6, 7]);
        }
        let target_ids: Vec<u32> = (100..132).collect();
        let (mut runs, mut counts) = (AcceptedRuns::default(), [0u32; 8]);
        for step in 0..10_000 {
            runs.verify_synthetic(&metadata, &target_ids, &synthetic, step);
            for seq in 0..4 {
                let n_accepted = runs.n_accepted(seq);
                counts[n_accepted] += 1;
                let (target, drafts) = runs.run(seq).split_last().unwrap();
                assert_eq!(drafts, &[1, 2, 3, 4, 5, 6, 7][..n_accepted]);
                assert_eq!(*target as usize, 100 + seq * 8 + n_accepted);
            }
        }
        assert_eq!(counts[2] + counts[3], 40_000, "{counts:?}");
        assert!((f64::from(counts[3]) / 40_000.0 - 0.78).abs() < 0.0083, "{counts:?}");
        let first = runs.clone();
        runs.verify_synthetic(&metadata, &target_ids, &synthetic, 9_999);
        assert_eq!(runs, first, "a step's noise is its own");
    }

    /// Windows shorter than the schedule, and none at all.
    #[test]
    fn short_windows_take_the_head_of_the_schedule() {
        let synthetic = SyntheticAcceptance::from_length(4.0, 3).unwrap();
        let mut metadata = SpecDecodeMetadata::default();
        metadata.push(0..2, &[5]);
        metadata.push(2..3, &[]);
        let mut runs = AcceptedRuns::default();
        runs.verify_synthetic(&metadata, &[7, 8, 9], &synthetic, 0);
        assert_eq!((runs.run(0), runs.run(1)), (&[5, 8][..], &[9][..]));
    }
}

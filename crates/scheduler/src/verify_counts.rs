//! Acceptance statistics as they are counted: with two additions a row.

use engine_types::{MAX_SPECULATIVE_TOKENS, SpecDecodeStats};

const N_COUNTS: usize = MAX_SPECULATIVE_TOKENS + 1;

/// Verify steps, from which every figure of [`SpecDecodeStats`] follows.
#[derive(Clone, Debug, Default)]
pub(crate) struct VerifyCounts {
    /// By the number of drafts.
    by_drafts: [u64; N_COUNTS],
    /// By how many of them were accepted and kept.
    by_accepted: [u64; N_COUNTS],
}

impl VerifyCounts {
    /// Counts one step; one without drafts does not count.
    #[inline]
    pub(crate) fn record_step(&mut self, n_drafts: u32, n_accepted: u32) {
        if n_drafts > 0 {
            self.by_drafts[n_drafts as usize] += 1;
            self.by_accepted[n_accepted as usize] += 1;
        }
    }

    pub(crate) fn stats(&self) -> SpecDecodeStats {
        let n_tokens =
            |counts: &[u64; N_COUNTS]| (0..).zip(counts).map(|(n, count)| n * count).sum();
        // Whoever has more than `i` has one at position `i`.
        let per_position = |counts: &[u64; N_COUNTS]| {
            std::array::from_fn(|position| counts[position + 1..].iter().sum())
        };
        SpecDecodeStats {
            n_verify_steps: self.by_drafts.iter().sum(),
            n_draft_tokens: n_tokens(&self.by_drafts),
            n_accepted_tokens: n_tokens(&self.by_accepted),
            drafted_per_position: per_position(&self.by_drafts),
            accepted_per_position: per_position(&self.by_accepted),
            histogram: self.by_accepted,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_figures_are_those_of_counting_each() {
        let (mut counts, mut expected) = (VerifyCounts::default(), SpecDecodeStats::default());
        for n_drafts in 0..=8 {
            for n_accepted in 0..=n_drafts {
                for _ in 0..n_drafts + 2 * n_accepted {
                    counts.record_step(n_drafts, n_accepted);
                    expected.record_step(n_drafts as usize, n_accepted as usize);
                }
            }
        }
        assert_eq!(counts.stats(), expected);
    }
}

//! Acceptance statistics of speculative decoding.

use crate::MAX_SPECULATIVE_TOKENS;

/// Counts over verify steps: steps that verified at least one draft.
///
/// A step that emitted `m` kept tokens counts `m - 1` accepted drafts, also where an end of the
/// request cut the run, so that tokens from verify steps = `n_verify_steps + n_accepted_tokens`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpecDecodeStats {
    /// Steps that verified drafts.
    pub n_verify_steps: u64,
    /// Drafts verified.
    pub n_draft_tokens: u64,
    /// Drafts accepted and kept.
    pub n_accepted_tokens: u64,
    /// Steps that verified a draft at position `i` (from 0).
    pub drafted_per_position: [u64; MAX_SPECULATIVE_TOKENS],
    /// Steps that accepted the draft at position `i`.
    pub accepted_per_position: [u64; MAX_SPECULATIVE_TOKENS],
    /// Steps by number of accepted drafts.
    pub histogram: [u64; MAX_SPECULATIVE_TOKENS + 1],
}

impl SpecDecodeStats {
    /// Counts one verify step; a step without drafts does not count.
    ///
    /// # Panics
    ///
    /// If more drafts were accepted than verified, or more verified than
    /// [`MAX_SPECULATIVE_TOKENS`].
    pub fn record_step(&mut self, n_drafts: usize, n_accepted: usize) {
        assert!(n_accepted <= n_drafts && n_drafts <= MAX_SPECULATIVE_TOKENS);
        if n_drafts == 0 {
            return;
        }
        self.n_verify_steps += 1;
        self.n_draft_tokens += n_drafts as u64;
        self.n_accepted_tokens += n_accepted as u64;
        for count in &mut self.drafted_per_position[..n_drafts] {
            *count += 1;
        }
        for count in &mut self.accepted_per_position[..n_accepted] {
            *count += 1;
        }
        self.histogram[n_accepted] += 1;
    }

    /// Adds the counts of `other`.
    pub fn merge(&mut self, other: &Self) {
        self.n_verify_steps += other.n_verify_steps;
        self.n_draft_tokens += other.n_draft_tokens;
        self.n_accepted_tokens += other.n_accepted_tokens;
        let add = |into: &mut [u64], from: &[u64]| {
            into.iter_mut().zip(from).for_each(|(sum, n)| *sum += n);
        };
        add(&mut self.drafted_per_position, &other.drafted_per_position);
        add(&mut self.accepted_per_position, &other.accepted_per_position);
        add(&mut self.histogram, &other.histogram);
    }

    /// Mean tokens a verify step emits, `1 + accepted / steps`; `None` before the first step.
    #[must_use]
    pub fn acceptance_length(&self) -> Option<f64> {
        ratio(self.n_accepted_tokens, self.n_verify_steps).map(|accepted| 1.0 + accepted)
    }

    /// Accepted share of the verified drafts; `None` before the first draft.
    #[must_use]
    pub fn acceptance_rate(&self) -> Option<f64> {
        ratio(self.n_accepted_tokens, self.n_draft_tokens)
    }

    /// Accepted share of the drafts at position `position`; `None` where none was verified.
    #[must_use]
    pub fn acceptance_rate_at(&self, position: usize) -> Option<f64> {
        ratio(*self.accepted_per_position.get(position)?, *self.drafted_per_position.get(position)?)
    }
}

#[expect(clippy::cast_precision_loss, reason = "counts stay far below 2^52")]
fn ratio(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 / whole as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seed_table_identity_holds() {
        // Fault case L25: accept_len = 1 + k * accept_rate at a fixed k.
        let mut stats = SpecDecodeStats::default();
        for n_accepted in [3, 0, 2, 1, 3] {
            stats.record_step(3, n_accepted);
        }
        assert_eq!(stats.acceptance_length(), Some(1.0 + 9.0 / 5.0));
        assert_eq!(stats.acceptance_rate(), Some(9.0 / 15.0));
        assert_eq!(stats.accepted_per_position[..3], [4, 3, 2]);
        assert_eq!(stats.histogram[..4], [1, 1, 1, 2]);
        assert_eq!(stats.acceptance_rate_at(2), Some(2.0 / 5.0));
    }

    #[test]
    fn steps_without_drafts_do_not_count() {
        let mut stats = SpecDecodeStats::default();
        stats.record_step(0, 0);
        assert_eq!(stats, SpecDecodeStats::default());
        assert_eq!(stats.acceptance_length(), None);
    }

    #[test]
    fn merge_adds_every_count() {
        let mut a = SpecDecodeStats::default();
        a.record_step(3, 2);
        let mut b = SpecDecodeStats::default();
        b.record_step(1, 1);
        let mut both = SpecDecodeStats::default();
        both.record_step(3, 2);
        both.record_step(1, 1);
        a.merge(&b);
        assert_eq!(a, both);
    }
}

//! What the indexers of sparse attention did.

use std::ops::AddAssign;

use crate::MAX_SPECULATIVE_TOKENS;

/// Work of the indexers in one kind of forward pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IndexerCounts {
    /// Runs of an indexer over the rows of a pass, one a layer that has one.
    pub n_launches: u64,
    /// Query rows for which keys were selected, over all launches.
    pub n_rows: u64,
    /// Keys whose score was computed, over all rows. A row that sees no more than `index_topk`
    /// keys selects them all and scores none.
    pub n_scored_keys: u64,
}

impl AddAssign for IndexerCounts {
    fn add_assign(&mut self, other: Self) {
        self.n_launches += other.n_launches;
        self.n_rows += other.n_rows;
        self.n_scored_keys += other.n_scored_keys;
    }
}

/// Work of the indexers by the kind of the pass; all zero for models without sparse attention.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IndexerStats {
    /// Target passes with at least one prefill chunk, which is a row of more than one known token
    /// or one that does not sample; verify windows beside it count here, too.
    pub target_prefill: IndexerCounts,
    /// Target passes of verify windows only: one known token and its drafts, if any. A chunk that
    /// is the single last token of a prompt is such a row.
    pub target_verify: IndexerCounts,
    /// Passes of the MTP layers, by draft step. Step 0 runs once a propose; with
    /// `index_share_for_mtp_iteration` only the first step of each MTP layer runs an indexer, so
    /// with one layer no other step than 0.
    pub draft_steps: [IndexerCounts; MAX_SPECULATIVE_TOKENS],
}

impl IndexerStats {
    /// Work of all draft steps.
    #[must_use]
    pub fn draft(&self) -> IndexerCounts {
        self.draft_steps.iter().fold(IndexerCounts::default(), |mut sum, &step| {
            sum += step;
            sum
        })
    }

    /// Whether no indexer ran.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl AddAssign<&Self> for IndexerStats {
    fn add_assign(&mut self, other: &Self) {
        self.target_prefill += other.target_prefill;
        self.target_verify += other.target_verify;
        for (sum, &step) in self.draft_steps.iter_mut().zip(&other.draft_steps) {
            *sum += step;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_keep_kinds_apart() {
        let counts = |n| IndexerCounts { n_launches: n, n_rows: 10 * n, n_scored_keys: 100 * n };
        let mut step = IndexerStats { target_verify: counts(1), ..IndexerStats::default() };
        step.draft_steps[0] = counts(2);
        step.draft_steps[2] = counts(3);
        let mut sum = IndexerStats { target_prefill: counts(7), ..IndexerStats::default() };
        assert!(!sum.is_empty() && IndexerStats::default().is_empty());
        sum += &step;
        sum += &step;
        assert_eq!((sum.target_prefill, sum.target_verify), (counts(7), counts(2)));
        assert_eq!((sum.draft_steps[0], sum.draft_steps[1]), (counts(4), counts(0)));
        assert_eq!(sum.draft(), counts(10));
    }
}

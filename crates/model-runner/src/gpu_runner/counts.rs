//! What the indexers did in decode steps, which the device does not tell.

use engine_types::{IndexerCounts, MAX_SPECULATIVE_TOKENS, PlanRow};

use super::Facts;
use super::split::n_before;

/// What the indexers did in a decode step.
pub(super) struct Counts {
    facts: Facts,
    index_share: bool,
    pub(super) target: IndexerCounts,
    pub(super) drafts: [IndexerCounts; MAX_SPECULATIVE_TOKENS],
}

impl Counts {
    pub(super) fn new(facts: Facts, index_share: bool) -> Self {
        Self { facts, index_share, target: IndexerCounts::default(), drafts: Default::default() }
    }

    /// Adds the slot of a row that was `n_accepted` tokens further than its plan says at least,
    /// emitted `n_emitted` tokens and made `n_drafts` drafts.
    pub(super) fn add(
        &mut self,
        row: &PlanRow,
        n_accepted: u32,
        n_emitted: usize,
        n_drafts: usize,
    ) {
        let Facts { topk, n_indexers, drafts_have_indexer, .. } = self.facts;
        let first = u64::from(row.n_computed + n_before(row) + n_accepted);
        let scored = |position: u64| if position + 1 > topk { position + 1 } else { 0 };
        let one = |counts: &mut IndexerCounts, n: u64, position: u64| {
            counts.n_launches = n;
            counts.n_rows += n;
            counts.n_scored_keys += n * scored(position);
        };
        if n_indexers > 0 {
            let window = first..=first + u64::from(row.n_draft);
            window.for_each(|position| one(&mut self.target, n_indexers, position));
        }
        let n_steps = if !drafts_have_indexer {
            0
        } else if self.index_share {
            n_drafts.min(1)
        } else {
            n_drafts
        };
        for (step, counts) in self.drafts[..n_steps].iter_mut().enumerate() {
            one(counts, 1, first + n_emitted as u64 - 1 + step as u64);
        }
    }
}

#[cfg(test)]
mod tests {
    use engine_types::{BlockId, RequestId, RowSpec, StepPlan};

    use super::*;

    /// A window of 3 rows at positions 9, 10 and 11 with 8 of them free of scoring, one draft
    /// accepted, 2 drafts made.
    #[test]
    fn windows_and_drafts_are_counted_by_their_positions() {
        let facts = Facts { max_slots: 4, topk: 10, n_indexers: 2, drafts_have_indexer: true };
        let mut plan = StepPlan::default();
        let table = plan.update_table(0, 0, &[BlockId(0)]);
        let spec = RowSpec { n_computed: 8, n_draft: 2, samples: true, ..RowSpec::default() };
        plan.push_row(RequestId(1), spec, &[5, 6, 7], &[], table);
        let of = |index_share| {
            let mut counts = Counts::new(facts, index_share);
            counts.add(&plan.rows()[0], 1, 2, 2);
            counts
        };
        let IndexerCounts { n_launches, n_rows, n_scored_keys } = of(true).target;
        assert_eq!((n_launches, n_rows, n_scored_keys), (2, 6, 2 * (11 + 12)));
        // The last valid row is at position 10, the next draft's at 11.
        let of_drafts = |index_share| of(index_share).drafts.map(|counts| counts.n_scored_keys);
        assert_eq!(of_drafts(true)[..3], [11, 0, 0]);
        assert_eq!(of_drafts(false)[..3], [11, 12, 0]);
    }

    /// A prompt of 5 tokens behind 8 others: its slot is at position 12.
    #[test]
    fn of_a_prompt_the_last_row_counts() {
        let facts = Facts { max_slots: 4, topk: 10, n_indexers: 2, drafts_have_indexer: true };
        let mut plan = StepPlan::default();
        let table = plan.update_table(0, 0, &[BlockId(0)]);
        let spec = RowSpec { n_computed: 8, samples: true, ..RowSpec::default() };
        plan.push_row(RequestId(1), spec, &[5, 6, 7, 8, 9], &[], table);
        let mut counts = Counts::new(facts, true);
        counts.add(&plan.rows()[0], 0, 1, 1);
        let IndexerCounts { n_launches, n_rows, n_scored_keys } = counts.target;
        assert_eq!((n_launches, n_rows, n_scored_keys), (2, 2, 2 * 13));
        assert_eq!(counts.drafts[0].n_scored_keys, 13);
    }
}

//! Drafts that were drawn, with the distributions that they were drawn from.

use engine_types::{ExecutorLimits, PlanRow, RequestId, StepPlan, StepTokens, TokenId};
use spec_decode::{DraftSeq, Proposal};
use tch::{Kind, TchError, Tensor};

/// The drafts of the last proposal of each block table, and on the device what they were drawn
/// from, until they are verified.
#[derive(Debug)]
pub(crate) struct DrawnDrafts {
    /// Drafts that a table has room for.
    k: usize,
    vocab_size: i64,
    /// f32 `[tables * k, vocab]`; absent until a draft is drawn.
    probs: Option<Tensor>,
    tables: Vec<Option<Drawn>>,
}

/// The drafts of one table.
#[derive(Clone, Copy, Debug)]
struct Drawn {
    request_id: RequestId,
    /// Position of the token before the first draft.
    position: u32,
    drafts: StepTokens,
}

impl DrawnDrafts {
    pub(crate) fn new(limits: &ExecutorLimits) -> Self {
        Self {
            k: limits.max_num_speculative_tokens as usize,
            vocab_size: i64::from(limits.vocab_size),
            probs: None,
            tables: vec![None; limits.max_num_seqs as usize],
        }
    }

    /// What drafts were drawn from: all tables' distributions.
    pub(crate) fn probs(&self) -> Option<&Tensor> {
        self.probs.as_ref()
    }

    /// For each draft of the plan's sampling rows the row of [`probs`](Self::probs) that it was
    /// drawn from; none where that is not known, for instance since it is from before a preemption.
    pub(crate) fn rows(&self, plan: &StepPlan) -> Vec<Option<u32>> {
        let sampling = plan.rows().iter().filter(|row| row.samples);
        sampling
            .flat_map(|row| {
                let first = self.has(row, plan.drafts(row)).then_some(self.first_row(row));
                (0..row.n_draft).map(move |at| first.map(|first| first + at))
            })
            .collect()
    }

    /// Whether `drafts` of `row` were drawn, rather than some that others took the place of.
    fn has(&self, row: &PlanRow, drafts: &[TokenId]) -> bool {
        self.tables[row.table.slot as usize].as_ref().is_some_and(|drawn| {
            let position = row.n_computed + row.n_query - row.n_draft - 1;
            drawn.request_id == row.request_id
                && drawn.position == position
                && drawn.drafts.starts_with(drafts)
        })
    }

    fn first_row(&self, row: &PlanRow) -> u32 {
        row.table.slot * self.k as u32
    }

    /// Keeps the drawn drafts of a proposal, and what each step drew from. `drafted` are the rows
    /// of the plan that its sequences, `seqs`, belong to.
    pub(crate) fn keep(
        &mut self,
        plan: &StepPlan,
        drafted: &[usize],
        seqs: &[DraftSeq<'_>],
        proposal: &Proposal<'_>,
    ) -> Result<(), TchError> {
        let row = |seq: usize| &plan.rows()[drafted[seq]];
        for draws in &proposal.draws {
            let places = draws.seqs.iter().map(|&seq| i64::from(self.first_row(row(seq))));
            let places: Vec<i64> = places.map(|first| first + draws.step as i64).collect();
            let device = draws.probs.device();
            let size = [(self.tables.len() * self.k) as i64, self.vocab_size];
            let kept = match &mut self.probs {
                Some(kept) => kept,
                none => none.insert(Tensor::f_zeros(size, (Kind::Float, device))?),
            };
            let places = Tensor::f_from_slice(&places)?.f_to_device(device)?;
            let _ = kept.f_index_copy_(0, &places, &draws.probs.f_to_kind(Kind::Float)?)?;
        }
        // A sequence with any draft has a first one.
        let drawn = proposal.draws.iter().filter(|draws| draws.step == 0);
        for &seq in drawn.flat_map(|draws| &draws.seqs) {
            let DraftSeq { first_position, rows, .. } = &seqs[seq];
            self.tables[row(seq).table.slot as usize] = Some(Drawn {
                request_id: row(seq).request_id,
                position: first_position + rows.len() as u32,
                drafts: proposal.drafts[seq][..].into(),
            });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use engine_types::{BlockId, RowSpec};
    use spec_decode::DraftDraws;
    use tch::Device;

    use super::*;

    const DRAFTS: [TokenId; 3] = [4, 5, 6];

    fn limits() -> ExecutorLimits {
        ExecutorLimits {
            block_size: 4,
            num_blocks: 8,
            max_model_len: 32,
            max_num_seqs: 3,
            max_num_batched_tokens: 32,
            max_num_speculative_tokens: 3,
            n_lookahead_max: 1,
            vocab_size: 7,
        }
    }

    /// A row of the request in table 2 that begins at `n_computed`.
    fn plan(id: u64, n_computed: u32, tokens: &[TokenId], n_draft: u32) -> StepPlan {
        let mut plan = StepPlan::default();
        let spec = RowSpec { n_computed, n_draft, samples: true, ..RowSpec::default() };
        let table = plan.update_table(2, 0, &[BlockId(0)]);
        plan.push_row(RequestId(id), spec, tokens, &[], table);
        plan
    }

    /// Three drafts behind the token at position 6 of request 9, drawn from rows of 1, 2 and 3.
    fn drawn() -> DrawnDrafts {
        let mut drawn = DrawnDrafts::new(&limits());
        let tokens = [7, 8];
        let seq = DraftSeq {
            first_position: 4,
            rows: 0..2,
            tokens: &tokens,
            following: &[3],
            blocks: &[0],
            n_propose: 3,
            sampling: None,
        };
        let draws = |step: usize| DraftDraws {
            step,
            seqs: vec![0],
            probs: Tensor::full([1, 7], step as i64 + 1, (Kind::Double, Device::Cpu)),
        };
        let proposal = Proposal {
            drafts: &[DRAFTS.to_vec()],
            indexer: &Default::default(),
            draws: (0..3).map(draws).collect(),
        };
        drawn.keep(&plan(9, 4, &tokens, 0), &[0], &[seq], &proposal).unwrap();
        drawn
    }

    #[test]
    fn drafts_find_what_they_were_drawn_from() {
        let drawn = drawn();
        let rows = drawn.rows(&plan(9, 6, &[3, 4, 5, 6], 3));
        assert_eq!(rows, [Some(6), Some(7), Some(8)]);
        for (row, expected) in rows.iter().zip(1..) {
            let probs = drawn.probs().unwrap().get(i64::from(row.unwrap()));
            assert_eq!(Vec::<f32>::try_from(probs).unwrap(), [expected as f32; 7]);
        }
        // A window that budget, blocks or a grammar cut short.
        assert_eq!(drawn.rows(&plan(9, 6, &[3, 4], 1)), [Some(6)]);
        assert!(drawn.rows(&plan(9, 6, &[3], 0)).is_empty());
    }

    #[test]
    fn other_drafts_were_not_drawn() {
        let drawn = drawn();
        assert_eq!(drawn.rows(&plan(8, 6, &[3, 4, 5, 6], 3)), [None; 3], "another request");
        assert_eq!(drawn.rows(&plan(9, 5, &[3, 4, 5, 6], 3)), [None; 3], "another position");
        assert_eq!(drawn.rows(&plan(9, 6, &[3, 4, 4], 2)), [None; 2], "another draft");
        let fresh = DrawnDrafts::new(&limits());
        assert!(fresh.probs().is_none());
        assert_eq!(fresh.rows(&plan(9, 6, &[3, 4], 1)), [None]);
    }
}

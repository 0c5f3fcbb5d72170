//! Verification: which drafts the target confirms, and the one token that it adds.

use engine_types::TokenId;
use sampler::{RowFault, SamplingRow};
use tch::Tensor;

use crate::error::SpecDecodeError;
use crate::metadata::SpecDecodeMetadata;
use crate::sampled::{Choices, DraftProbs};
use crate::synthetic::SyntheticAcceptance;

/// The accepted run of each sampling sequence; buffers are reused.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AcceptedRuns {
    tokens: Vec<TokenId>,
    ends: Vec<usize>,
    faults: Vec<(usize, RowFault)>,
}

impl AcceptedRuns {
    /// Verifies the drafts of all sequences of `metadata` against `target_ids`, the target's own
    /// choice at each logits row, `[metadata.n_logits()]`.
    ///
    /// A draft is accepted where the target chose it and every draft before it is accepted. The
    /// run ends with the target's choice behind the last accepted draft: the recovered token if a
    /// draft was rejected there, the bonus token if none was. Accepted drafts *are* the target's
    /// choices, so every run is a stretch of `target_ids` from the sequence's first row on.
    ///
    /// # Panics
    ///
    /// If `target_ids` does not hold one id for each logits row.
    pub fn verify_greedy(&mut self, metadata: &SpecDecodeMetadata, target_ids: &[TokenId]) {
        assert_eq!(target_ids.len(), metadata.n_logits(), "one target id for each logits row");
        self.clear();
        for (first, drafts) in metadata.windows() {
            let choices = &target_ids[first..=first + drafts.len()];
            let n_accepted = drafts.iter().zip(choices).take_while(|(d, t)| d == t).count();
            self.tokens.extend_from_slice(&choices[..=n_accepted]);
            self.ends.push(self.tokens.len());
        }
    }

    /// Verifies the drafts of all sequences of `metadata` against the target's `logits`, one row
    /// for each logits row, `[metadata.n_logits(), vocab]`, with the parameters of `rows`.
    ///
    /// A greedy sequence is verified as in [`AcceptedRuns::verify_greedy`], by the largest
    /// processed logit. In a sampled one, the runs are distributed exactly as tokens drawn from
    /// the target one by one. Let `p` be a row's [`Distribution`](sampler::Distribution), after
    /// every processor and with the drafts before the row counted as history, and `q` what its
    /// draft `d` was drawn from, 1 at `d` for a draft that was chosen otherwise:
    ///
    /// * `d` is accepted with probability `min(1, p(d) / q(d))`;
    /// * the first rejected one is replaced by a draw from `max(p - q, 0)`, normalised;
    /// * behind a wholly accepted window the bonus token is drawn from `p`.
    ///
    /// If `p` and `q` differ by rounding alone, a rejection can leave `max(p - q, 0)` all zero. The
    /// token is then drawn from `p`, from which it differs by as much.
    ///
    /// `draft_probs` is absent if no draft was sampled. Runs and counts cross to the host in one
    /// copy. A sequence whose run ends at a row without a token has a [fault](Self::fault), and no
    /// other sequence notices.
    ///
    /// # Errors
    ///
    /// [`SpecDecodeError`] if a tensor operation fails; there are no runs then.
    ///
    /// # Panics
    ///
    /// If `rows` or `draft_probs` do not match the metadata, or a parameter holds an id outside
    /// the vocabulary.
    pub fn verify(
        &mut self,
        metadata: &SpecDecodeMetadata,
        logits: &Tensor,
        rows: &[SamplingRow<'_>],
        draft_probs: Option<DraftProbs<'_>>,
    ) -> Result<(), SpecDecodeError> {
        self.clear();
        let choices = Choices::of(metadata, logits, rows, draft_probs)?;
        for (seq, (first, drafts)) in metadata.windows().enumerate() {
            let (n_accepted, code) = choices.of_window(seq, first, drafts);
            match TokenId::try_from(code) {
                Ok(token) => {
                    self.tokens.extend_from_slice(&drafts[..n_accepted]);
                    self.tokens.push(token);
                }
                Err(_) => {
                    let row_idx = first + n_accepted;
                    self.faults.push((seq, sampler::explain(code, row_idx, &rows[row_idx])));
                }
            }
            self.ends.push(self.tokens.len());
        }
        Ok(())
    }

    /// Accepts drafts by the schedule of `synthetic`, whatever the target says: its choices,
    /// `target_ids` as in [`AcceptedRuns::verify_greedy`], only end the runs. For benches; the
    /// text is meaningless. `step` counts verify steps and keys their noise.
    ///
    /// # Panics
    ///
    /// If `target_ids` does not hold one id for each logits row.
    pub fn verify_synthetic(
        &mut self,
        metadata: &SpecDecodeMetadata,
        target_ids: &[TokenId],
        synthetic: &SyntheticAcceptance,
        step: u64,
    ) {
        assert_eq!(target_ids.len(), metadata.n_logits(), "one target id for each logits row");
        self.clear();
        for (first, drafts) in metadata.windows() {
            let n_accepted = synthetic.n_accepted(step, first, drafts.len());
            self.tokens.extend_from_slice(&drafts[..n_accepted]);
            self.tokens.push(target_ids[first + n_accepted]);
            self.ends.push(self.tokens.len());
        }
    }

    fn clear(&mut self) {
        self.tokens.clear();
        self.ends.clear();
        self.faults.clear();
    }

    /// Number of sequences, in the order of the metadata.
    #[must_use]
    pub fn n_seqs(&self) -> usize {
        self.ends.len()
    }

    /// The accepted run of sequence `seq`: its accepted drafts and one token of the target. Empty
    /// if the sequence has a fault.
    #[must_use]
    pub fn run(&self, seq: usize) -> &[TokenId] {
        let start = if seq == 0 { 0 } else { self.ends[seq - 1] };
        &self.tokens[start..self.ends[seq]]
    }

    /// How many drafts of sequence `seq` were accepted; 0 if it has a fault.
    #[must_use]
    pub fn n_accepted(&self, seq: usize) -> usize {
        self.run(seq).len().saturating_sub(1)
    }

    /// Why sequence `seq` has no run.
    #[must_use]
    pub fn fault(&self, seq: usize) -> Option<&RowFault> {
        self.faults.iter().find(|(faulty, _)| *faulty == seq).map(|(_, fault)| fault)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The definition, one sequence and one row at a time.
    fn verify_one(target_ids: &[TokenId], drafts: &[TokenId]) -> Vec<TokenId> {
        let mut emitted = Vec::new();
        for (row, &draft) in drafts.iter().enumerate() {
            emitted.push(target_ids[row]);
            if target_ids[row] != draft {
                return emitted;
            }
        }
        emitted.push(target_ids[drafts.len()]);
        emitted
    }

    fn next(state: &mut u64) -> u64 {
        *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
        *state >> 33
    }

    /// Ragged random batches over three token ids, so that long accepted runs are common.
    #[test]
    fn batches_equal_the_scalar_definition() {
        let mut state = 7;
        let mut seen = [[0; 9]; 9];
        let mut runs = AcceptedRuns::default();
        let mut metadata = SpecDecodeMetadata::default();
        for _ in 0..3000 {
            metadata.clear();
            let (mut target_ids, mut expected, mut row) = (Vec::new(), Vec::new(), 0);
            for _ in 0..next(&mut state) % 6 {
                let n_drafts = (next(&mut state) % 9) as usize;
                let n_skipped = (next(&mut state) % 3) as usize;
                let token = |state: &mut u64| u32::from(next(state).is_multiple_of(4));
                let drafts: Vec<TokenId> = (0..n_drafts).map(|_| token(&mut state)).collect();
                let choices: Vec<TokenId> = (0..=n_drafts).map(|_| token(&mut state)).collect();
                metadata.push(row..row + n_skipped + n_drafts + 1, &drafts);
                row += n_skipped + n_drafts + 1;
                expected.push(verify_one(&choices, &drafts));
                target_ids.extend(choices);
            }
            runs.verify_greedy(&metadata, &target_ids);
            assert_eq!(runs.n_seqs(), expected.len());
            for (seq, expected) in expected.iter().enumerate() {
                assert_eq!(runs.run(seq), expected);
                let n_drafts = metadata.num_draft_tokens()[seq] as usize;
                seen[n_drafts][runs.n_accepted(seq)] += 1;
            }
        }
        for (n_drafts, counts) in seen.iter().enumerate() {
            assert!(counts[..=n_drafts].iter().all(|&n| n > 0), "{n_drafts} drafts: {counts:?}");
            assert!(counts[n_drafts + 1..].iter().all(|&n| n == 0));
        }
    }

    /// Fault case L01's verify step: the run is whole, also behind an end-of-sequence id, since
    /// ending a request is not the verifier's business.
    #[test]
    fn end_of_sequence_ids_do_not_cut_a_run() {
        let mut metadata = SpecDecodeMetadata::default();
        metadata.push(0..4, &[11, 2, 13]);
        let mut runs = AcceptedRuns::default();
        runs.verify_greedy(&metadata, &[11, 2, 13, 14]);
        assert_eq!(runs.run(0), [11, 2, 13, 14]);
        assert_eq!(runs.n_accepted(0), 3);
    }

    #[test]
    fn a_match_behind_a_rejected_draft_does_not_count() {
        let mut metadata = SpecDecodeMetadata::default();
        metadata.push(0..4, &[11, 12, 13]);
        let mut runs = AcceptedRuns::default();
        runs.verify_greedy(&metadata, &[11, 9, 13, 14]);
        assert_eq!(runs.run(0), [11, 9]);
    }
}

//! Greedy verification: which drafts the target confirms, and the one token that it adds.

use engine_types::TokenId;

use crate::metadata::SpecDecodeMetadata;

/// The accepted run of each sampling sequence; buffers are reused.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AcceptedRuns {
    tokens: Vec<TokenId>,
    ends: Vec<usize>,
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
        self.tokens.clear();
        self.ends.clear();
        let per_seq = metadata.num_draft_tokens().iter().zip(metadata.bonus_logits_indices());
        let mut drafts = metadata.draft_token_ids();
        for (&n_drafts, &bonus) in per_seq {
            let (own, later) = drafts.split_at(n_drafts as usize);
            drafts = later;
            let choices = &target_ids[bonus as usize - own.len()..=bonus as usize];
            let n_accepted = own.iter().zip(choices).take_while(|(d, t)| d == t).count();
            self.tokens.extend_from_slice(&choices[..=n_accepted]);
            self.ends.push(self.tokens.len());
        }
    }

    /// Number of sequences, in the order of the metadata.
    #[must_use]
    pub fn n_seqs(&self) -> usize {
        self.ends.len()
    }

    /// The accepted run of sequence `seq`: its accepted drafts and one token of the target.
    #[must_use]
    pub fn run(&self, seq: usize) -> &[TokenId] {
        let start = if seq == 0 { 0 } else { self.ends[seq - 1] };
        &self.tokens[start..self.ends[seq]]
    }

    /// How many drafts of sequence `seq` were accepted.
    #[must_use]
    pub fn n_accepted(&self, seq: usize) -> usize {
        self.run(seq).len() - 1
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

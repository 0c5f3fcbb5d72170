//! Where the drafts of a step lie, in its batch and among its logits rows.

use std::ops::Range;

use engine_types::TokenId;

/// Index arrays of a step's sampling rows: a sequence with `d` drafts has `d + 1` logits rows, of
/// which the first `d` check one draft each and the last one yields the bonus token.
///
/// Logits rows are numbered in the order in which sequences were pushed, without gaps; buffers
/// are reused. `B` is the number of sampling sequences, `D` the number of drafts of all of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpecDecodeMetadata {
    draft_token_ids: Vec<TokenId>,
    num_draft_tokens: Vec<u32>,
    cu_num_draft_tokens: Vec<u32>,
    target_logits_indices: Vec<u32>,
    bonus_logits_indices: Vec<u32>,
    logits_rows: Vec<i64>,
}

impl SpecDecodeMetadata {
    /// Empties the metadata and keeps its buffers.
    pub fn clear(&mut self) {
        self.draft_token_ids.clear();
        self.num_draft_tokens.clear();
        self.cu_num_draft_tokens.clear();
        self.target_logits_indices.clear();
        self.bonus_logits_indices.clear();
        self.logits_rows.clear();
    }

    /// Appends a sampling sequence whose queried tokens are the rows `query` of the packed batch;
    /// its last queried tokens are `drafts`.
    ///
    /// # Panics
    ///
    /// If every queried token is a draft: the first draft is checked by the row of the known
    /// token before it \[INV-6].
    pub fn push(&mut self, query: Range<usize>, drafts: &[TokenId]) {
        let n_logits = drafts.len() + 1;
        assert!(n_logits <= query.len(), "a row queries at least one known token [INV-6]");
        let first = self.logits_rows.len();
        self.logits_rows.extend((query.end - n_logits..query.end).map(|row| row as i64));
        self.target_logits_indices.extend((first..first + drafts.len()).map(as_u32));
        self.bonus_logits_indices.push(as_u32(first + drafts.len()));
        self.draft_token_ids.extend_from_slice(drafts);
        self.num_draft_tokens.push(as_u32(drafts.len()));
        self.cu_num_draft_tokens.push(as_u32(self.draft_token_ids.len()));
    }

    /// Number of sampling sequences, `B`.
    #[must_use]
    pub fn n_seqs(&self) -> usize {
        self.num_draft_tokens.len()
    }

    /// Number of logits rows, `D + B`.
    #[must_use]
    pub fn n_logits(&self) -> usize {
        self.logits_rows.len()
    }

    /// The drafts of all sequences, `[D]`.
    #[must_use]
    pub fn draft_token_ids(&self) -> &[TokenId] {
        &self.draft_token_ids
    }

    /// Drafts of each sequence, `[B]`.
    #[must_use]
    pub fn num_draft_tokens(&self) -> &[u32] {
        &self.num_draft_tokens
    }

    /// Inclusive prefix sum of [`Self::num_draft_tokens`], `[B]`.
    #[must_use]
    pub fn cu_num_draft_tokens(&self) -> &[u32] {
        &self.cu_num_draft_tokens
    }

    /// Logits row that checks each draft, `[D]`.
    #[must_use]
    pub fn target_logits_indices(&self) -> &[u32] {
        &self.target_logits_indices
    }

    /// Logits row that yields the token after a wholly accepted run, `[B]`.
    #[must_use]
    pub fn bonus_logits_indices(&self) -> &[u32] {
        &self.bonus_logits_indices
    }

    /// Each sequence's first logits row and its drafts.
    pub(crate) fn windows(&self) -> impl Iterator<Item = (usize, &[TokenId])> {
        let mut drafts = self.draft_token_ids.as_slice();
        self.num_draft_tokens.iter().zip(&self.bonus_logits_indices).map(move |(&n, &bonus)| {
            let (own, later) = drafts.split_at(n as usize);
            drafts = later;
            (bonus as usize - own.len(), own)
        })
    }

    /// Row of the packed batch behind each logits row, `[D + B]`, ascending.
    #[must_use]
    pub fn logits_rows(&self) -> &[i64] {
        &self.logits_rows
    }
}

fn as_u32(value: usize) -> u32 {
    u32::try_from(value).expect("a step has fewer than 2^32 logits rows")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The example of the behaviour specification: queried counts [4, 1, 3, 1, 2].
    #[test]
    fn indices_of_a_ragged_batch() {
        let input_ids: Vec<TokenId> = (100..111).collect();
        let mut metadata = SpecDecodeMetadata::default();
        for _ in 0..2 {
            metadata.clear();
            let mut start = 0;
            for n_query in [4, 1, 3, 1, 2] {
                let query = start..start + n_query;
                metadata.push(query.clone(), &input_ids[start + 1..query.end]);
                start = query.end;
            }
        }
        assert_eq!(metadata.num_draft_tokens(), [3, 0, 2, 0, 1]);
        assert_eq!(metadata.cu_num_draft_tokens(), [3, 3, 5, 5, 6]);
        assert_eq!(metadata.target_logits_indices(), [0, 1, 2, 5, 6, 9]);
        assert_eq!(metadata.bonus_logits_indices(), [3, 4, 7, 8, 10]);
        let after_target: Vec<TokenId> = metadata
            .target_logits_indices()
            .iter()
            .map(|&row| input_ids[row as usize + 1])
            .collect();
        assert_eq!(metadata.draft_token_ids(), after_target);
        assert_eq!(metadata.logits_rows(), (0..11).collect::<Vec<i64>>());
        assert_eq!((metadata.n_seqs(), metadata.n_logits()), (5, 11));
    }

    /// A final prefill chunk of five tokens needs only its last row, and middle chunks none.
    #[test]
    fn only_the_rows_that_sample_have_logits() {
        let mut metadata = SpecDecodeMetadata::default();
        metadata.push(3..8, &[]);
        metadata.push(20..23, &[7, 8]);
        assert_eq!(metadata.logits_rows(), [7, 20, 21, 22]);
        assert_eq!(metadata.target_logits_indices(), [1, 2]);
        assert_eq!(metadata.bonus_logits_indices(), [0, 3]);
    }

    #[test]
    #[should_panic(expected = "[INV-6]")]
    fn a_window_of_drafts_alone_is_refused() {
        SpecDecodeMetadata::default().push(0..2, &[7, 8]);
    }
}

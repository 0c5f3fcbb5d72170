//! Where the keys of the query tokens are.

/// The query tokens of a forward pass and the block tables of their sequences.
///
/// Position `p` of sequence `s` is in slot
/// `block_tables[s, p / block_size] * block_size + p % block_size`.
#[derive(Clone, Copy, Debug)]
pub struct PagedRows<'a> {
    /// The sequence of each token, `[n_tokens]`.
    pub token_to_seq: &'a [i32],
    /// The position of each token, `[n_tokens]`; it sees the keys `0..=position`.
    pub positions: &'a [i32],
    /// `[n_seqs, max_blocks]`; entries behind the visible keys are not read.
    pub block_tables: &'a [i32],
    /// Width of the block table.
    pub max_blocks: usize,
    /// Slots of a block.
    pub block_size: usize,
}

impl PagedRows<'_> {
    pub(crate) fn n_tokens(&self) -> usize {
        self.positions.len()
    }

    /// Keys that a token sees, its own included.
    pub(crate) fn n_visible(&self, token: usize) -> usize {
        self.positions[token] as usize + 1
    }

    /// The slot of a visible position of a token's sequence, and how many slots of its block
    /// follow, itself included.
    #[inline(always)]
    pub(crate) fn slot_run(&self, token: usize, position: usize) -> (usize, usize) {
        let row = self.token_to_seq[token] as usize * self.max_blocks;
        let block = self.block_tables[row + position / self.block_size];
        assert!(block >= 0, "a visible position has a block");
        let offset = position % self.block_size;
        (block as usize * self.block_size + offset, self.block_size - offset)
    }

    /// How many successive tokens from `first` on, at most `limit`, are of one sequence.
    pub(crate) fn same_seq(&self, first: usize, limit: usize) -> usize {
        let seq = self.token_to_seq[first];
        self.token_to_seq[first..].iter().take(limit).take_while(|&&other| other == seq).count()
    }

    /// Panics unless every token has a sequence and every position an entry of its table.
    pub(crate) fn check(&self) {
        assert_eq!(self.token_to_seq.len(), self.n_tokens(), "token_to_seq is [T]");
        assert!(self.block_size > 0 && self.max_blocks > 0, "blocks and tables are not empty");
        assert!(
            self.block_tables.len().is_multiple_of(self.max_blocks),
            "block_tables is [n_seqs, max_blocks]"
        );
        let n_seqs = self.block_tables.len() / self.max_blocks;
        let capacity = self.max_blocks * self.block_size;
        for (&seq, &position) in self.token_to_seq.iter().zip(self.positions) {
            assert!(seq >= 0 && (seq as usize) < n_seqs, "a token's sequence has a block table");
            assert!(
                position >= 0 && (position as usize) < capacity,
                "a position has a table entry"
            );
        }
    }
}

//! Row specifications to the flat i32 arrays that a forward pass reads.
//!
//! **Owns** the arithmetic from "this sequence has `n_computed` valid tokens and feeds `n_query`
//! more through these blocks" to positions, slots, lengths and the padded block table. **Must not
//! know** tensors, requests or models. No dependency.
//!
//! A *slot* is `block_table[p / block_size] * block_size + p % block_size` for position `p`.
//! Everything is rebuilt whenever the layout changes, so that no map outlives its batch (a stale
//! token-to-sequence map in the draft loop is a fault that real engines shipped).
//!
//! # Example
//!
//! A verify window of three tokens behind five computed ones, and a one-token decode:
//!
//! ```
//! use batch_layout::{BatchLayout, SeqSpec};
//!
//! let mut layout = BatchLayout::new(4);
//! layout.clear();
//! layout.push(SeqSpec { n_computed: 5, n_query: 3 }, &[10, 11]);
//! layout.push(SeqSpec { n_computed: 2, n_query: 1 }, &[7]);
//! layout.finish();
//! assert_eq!(layout.positions(), [5, 6, 7, 2]);
//! assert_eq!(layout.slot_mapping(), [45, 46, 47, 30]);
//! assert_eq!(layout.token_to_seq(), [0, 0, 0, 1]);
//! assert_eq!(layout.cu_seqlens_q(), [0, 3, 4]);
//! assert_eq!(layout.kv_lens(), [8, 3]);
//! assert_eq!(layout.block_tables(), [10, 11, 7, -1]);
//! ```

/// What one sequence feeds in this forward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SeqSpec {
    /// Tokens whose KV is valid before the pass; the position of the first queried token.
    pub n_computed: u32,
    /// Queried tokens, at least 1.
    pub n_query: u32,
}

/// The arrays of one forward pass; buffers are reused.
#[derive(Clone, Debug)]
pub struct BatchLayout {
    block_size: u32,
    positions: Vec<i32>,
    slot_mapping: Vec<i32>,
    token_to_seq: Vec<i32>,
    cu_seqlens_q: Vec<i32>,
    kv_lens: Vec<i32>,
    ragged_blocks: Vec<i32>,
    ragged_ends: Vec<usize>,
    block_tables: Vec<i32>,
    max_blocks: usize,
    max_query_len: usize,
}

impl BatchLayout {
    /// An empty layout for blocks of `block_size` tokens.
    ///
    /// # Panics
    ///
    /// If `block_size` is 0.
    #[must_use]
    pub fn new(block_size: u32) -> Self {
        assert!(block_size > 0, "block_size is at least 1");
        Self {
            block_size,
            positions: Vec::new(),
            slot_mapping: Vec::new(),
            token_to_seq: Vec::new(),
            cu_seqlens_q: vec![0],
            kv_lens: Vec::new(),
            ragged_blocks: Vec::new(),
            ragged_ends: Vec::new(),
            block_tables: Vec::new(),
            max_blocks: 0,
            max_query_len: 0,
        }
    }

    /// Empties the layout and keeps its buffers.
    pub fn clear(&mut self) {
        self.positions.clear();
        self.slot_mapping.clear();
        self.token_to_seq.clear();
        self.cu_seqlens_q.clear();
        self.cu_seqlens_q.push(0);
        self.kv_lens.clear();
        self.ragged_blocks.clear();
        self.ragged_ends.clear();
        self.block_tables.clear();
        self.max_blocks = 0;
        self.max_query_len = 0;
    }

    /// Appends a sequence. `blocks` is its block table; it covers every queried position.
    ///
    /// # Panics
    ///
    /// If nothing is queried, or the table does not cover a queried position: reading through a
    /// clamped index would hide a scheduler fault.
    pub fn push(&mut self, spec: SeqSpec, blocks: &[u32]) {
        let SeqSpec { n_computed, n_query } = spec;
        assert!(n_query > 0, "a sequence queries at least one token");
        let kv_len = n_computed + n_query;
        let n_blocks = kv_len.div_ceil(self.block_size) as usize;
        assert!(
            n_blocks <= blocks.len(),
            "{kv_len} tokens need {n_blocks} blocks of {}, the table has {}",
            self.block_size,
            blocks.len()
        );
        let seq = to_i32(self.kv_lens.len() as u64);
        for position in n_computed..kv_len {
            let block = u64::from(blocks[(position / self.block_size) as usize]);
            let slot = block * u64::from(self.block_size) + u64::from(position % self.block_size);
            self.positions.push(to_i32(u64::from(position)));
            self.slot_mapping.push(to_i32(slot));
            self.token_to_seq.push(seq);
        }
        self.cu_seqlens_q.push(to_i32(self.positions.len() as u64));
        self.kv_lens.push(to_i32(u64::from(kv_len)));
        self.ragged_blocks.extend(blocks[..n_blocks].iter().map(|&b| to_i32(u64::from(b))));
        self.ragged_ends.push(self.ragged_blocks.len());
        self.max_blocks = self.max_blocks.max(n_blocks);
        self.max_query_len = self.max_query_len.max(n_query as usize);
    }

    /// Builds the padded block table. Call it after the last [`BatchLayout::push`].
    pub fn finish(&mut self) {
        self.block_tables.clear();
        let mut start = 0;
        for &end in &self.ragged_ends {
            self.block_tables.extend_from_slice(&self.ragged_blocks[start..end]);
            let padding = self.max_blocks - (end - start);
            self.block_tables.extend(std::iter::repeat_n(-1, padding));
            start = end;
        }
    }

    /// Tokens a block.
    #[must_use]
    pub fn block_size(&self) -> u32 {
        self.block_size
    }

    /// Sequences in the batch.
    #[must_use]
    pub fn n_seqs(&self) -> usize {
        self.kv_lens.len()
    }

    /// Queried tokens in the batch.
    #[must_use]
    pub fn n_tokens(&self) -> usize {
        self.positions.len()
    }

    /// Position of each queried token, `[n_tokens]`. Token `t` sees positions `0..=positions[t]`.
    #[must_use]
    pub fn positions(&self) -> &[i32] {
        &self.positions
    }

    /// Cache slot that each queried token writes, `[n_tokens]`.
    #[must_use]
    pub fn slot_mapping(&self) -> &[i32] {
        &self.slot_mapping
    }

    /// Sequence of each queried token, `[n_tokens]`.
    #[must_use]
    pub fn token_to_seq(&self) -> &[i32] {
        &self.token_to_seq
    }

    /// Prefix sum of the query lengths, `[n_seqs + 1]`.
    #[must_use]
    pub fn cu_seqlens_q(&self) -> &[i32] {
        &self.cu_seqlens_q
    }

    /// Valid KV length of each sequence once this pass has written its tokens, `[n_seqs]`.
    #[must_use]
    pub fn kv_lens(&self) -> &[i32] {
        &self.kv_lens
    }

    /// Block tables padded with -1, row-major `[n_seqs, max_blocks]`.
    #[must_use]
    pub fn block_tables(&self) -> &[i32] {
        &self.block_tables
    }

    /// Width of the padded block table.
    #[must_use]
    pub fn max_blocks(&self) -> usize {
        self.max_blocks
    }

    /// Longest query of the batch.
    #[must_use]
    pub fn max_query_len(&self) -> usize {
        self.max_query_len
    }
}

fn to_i32(value: u64) -> i32 {
    i32::try_from(value).expect("positions and slots are below 2^31")
}

#[cfg(test)]
mod tests;

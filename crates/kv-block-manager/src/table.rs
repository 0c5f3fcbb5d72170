//! The blocks that hold one request's tokens.

use engine_types::BlockId;

/// One request's blocks: position `p` lies in block `blocks()[p / block_size]`.
///
/// Only a [`BlockPool`](crate::BlockPool) changes a table. Dropping a table that still holds blocks
/// leaks them, which `check_invariants` reports.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct BlockTable {
    pub(crate) blocks: Vec<BlockId>,
    /// How many blocks, from the front, have been published or come from the prefix cache.
    pub(crate) n_published: u32,
}

impl BlockTable {
    /// An empty table that grows to `n_blocks` blocks without an allocation.
    #[must_use]
    pub fn with_capacity(n_blocks: u32) -> Self {
        Self { blocks: Vec::with_capacity(n_blocks as usize), n_published: 0 }
    }

    /// The blocks, in the order of the positions.
    #[must_use]
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// How many blocks the table holds.
    #[must_use]
    pub fn n_blocks(&self) -> u32 {
        u32::try_from(self.blocks.len()).expect("block ids are u32")
    }
}

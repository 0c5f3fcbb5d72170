//! What changes in the prefix cache, for those who place requests by it.

use std::fmt;

use crate::ids::TokenId;

/// The SHA-256 hash that stands for a block and all blocks before it,
/// or, before the first block, for those who may share it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockKey(pub [u8; 32]);

impl fmt::Debug for BlockKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let start = self.0[..8].iter().fold(0, |n, byte| n << 8 | u64::from(*byte));
        write!(f, "BlockKey({start:016x}..)")
    }
}

/// One change of what the prefix cache holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvEvent {
    /// Counts up by one from 1. A reader that misses a number has missed a change. A snapshot has
    /// the number of the last change that it contains, 0 if there was none.
    pub sequence: u64,
    /// What has changed.
    pub change: KvChange,
}

/// What has changed. A block is in the cache from the `Stored` that names its key to the next
/// `Removed` that names it, or `Cleared`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KvChange {
    /// All that the cache holds, whatever was known before.
    Snapshot {
        /// The keys, in no order that means anything.
        keys: Vec<BlockKey>,
    },
    /// Blocks that the cache did not hold.
    Stored(StoredBlocks),
    /// Blocks that it has given up.
    Removed {
        /// Their keys, the first one to go first.
        keys: Vec<BlockKey>,
    },
    /// It holds nothing any more.
    Cleared,
}

/// Blocks of one sequence, each the successor of the one before it.
///
/// The key of a block is the SHA-256 hash of its parent's key and, as little-endian 32-bit numbers,
/// its tokens and the `n_lookahead` tokens behind it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredBlocks {
    /// The key of the block before the first one of these. That of a sequence's first block stands
    /// for the sequences that may share it: those of the same salt, and drafted for likewise.
    pub parent: BlockKey,
    /// How many blocks of the sequence lie before these.
    pub n_before: u32,
    /// The keys of the blocks.
    pub keys: Vec<BlockKey>,
    /// The tokens of all blocks and the `n_lookahead` tokens behind them.
    pub tokens: Vec<TokenId>,
    /// How many tokens a block has.
    pub block_size: u32,
    /// How many tokens behind a block its key depends on.
    pub n_lookahead: u32,
    /// Whether only sequences of one salt can use the blocks.
    pub is_salted: bool,
}

//! What changes in the prefix cache, for those who place requests by it.

use std::collections::VecDeque;
use std::ops::Range;

use engine_types::TokenId;

use crate::keys::{BlockKey, PrefixKeys};

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
    /// The key of the block before the first one of these. The parent of a sequence's first block
    /// stands for the sequence's [`PrefixSpace`](crate::PrefixSpace).
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

/// The changes that nobody has fetched yet, the oldest ones lost if there are too many.
#[derive(Debug, Default)]
pub(crate) struct EventLog {
    /// Most events kept; with 0 nothing is recorded, numbered or allocated.
    capacity: usize,
    events: VecDeque<KvEvent>,
    /// The number of the last event.
    last_sequence: u64,
    n_dropped: u64,
}

impl EventLog {
    /// Keeps the latest `capacity` events from now on; with 0 it stops and forgets those it has.
    pub(crate) fn set_capacity(&mut self, capacity: usize) {
        self.capacity = capacity;
        if capacity == 0 {
            self.events = VecDeque::new();
        }
        self.drop_oldest();
    }

    pub(crate) fn last_sequence(&self) -> u64 {
        self.last_sequence
    }

    pub(crate) fn n_dropped(&self) -> u64 {
        self.n_dropped
    }

    pub(crate) fn drain_into(&mut self, events: &mut Vec<KvEvent>) {
        events.extend(self.events.drain(..));
    }

    /// Some `blocks` of a sequence, by their place in it, are in the cache now.
    pub(crate) fn stored(
        &mut self,
        keys: &PrefixKeys,
        tokens: &[TokenId],
        block_size: u32,
        blocks: Range<usize>,
    ) {
        if self.capacity == 0 || blocks.is_empty() {
            return;
        }
        let at = |block_idx: usize| block_idx * block_size as usize;
        let end = at(blocks.end) + keys.n_lookahead() as usize;
        self.push(KvChange::Stored(StoredBlocks {
            parent: keys.parent(blocks.start),
            n_before: u32::try_from(blocks.start).expect("blocks are counted in u32"),
            tokens: tokens[at(blocks.start)..end].to_vec(),
            keys: keys.known()[blocks].to_vec(),
            block_size,
            n_lookahead: keys.n_lookahead(),
            is_salted: keys.is_salted(),
        }));
    }

    /// The block of `key` has gone. Blocks that go one after the other share an event.
    pub(crate) fn removed(&mut self, key: BlockKey) {
        if self.capacity == 0 {
            return;
        }
        match self.events.back_mut() {
            Some(KvEvent { change: KvChange::Removed { keys }, .. }) => keys.push(key),
            _ => self.push(KvChange::Removed { keys: vec![key] }),
        }
    }

    pub(crate) fn cleared(&mut self) {
        if self.capacity > 0 {
            self.push(KvChange::Cleared);
        }
    }

    fn push(&mut self, change: KvChange) {
        self.last_sequence += 1;
        self.events.push_back(KvEvent { sequence: self.last_sequence, change });
        self.drop_oldest();
    }

    fn drop_oldest(&mut self) {
        let n_surplus = self.events.len().saturating_sub(self.capacity);
        self.events.drain(..n_surplus);
        self.n_dropped += n_surplus as u64;
    }
}

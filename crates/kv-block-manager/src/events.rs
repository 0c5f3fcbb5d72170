//! The record of what changes in the prefix cache.

use std::collections::VecDeque;
use std::ops::Range;

use engine_types::{BlockKey, KvChange, KvEvent, StoredBlocks, TokenId};

use crate::keys::PrefixKeys;

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

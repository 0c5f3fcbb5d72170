//! The pool of blocks.

use std::collections::HashSet;

use engine_types::{BlockCopy, BlockId, KvChange, KvEvent, TokenId};

use crate::events::EventLog;
use crate::index::PrefixIndex;
use crate::keys::PrefixKeys;
use crate::lru::LruList;
use crate::table::BlockTable;

/// How many blocks of `block_size` tokens hold `n_tokens` tokens.
///
/// # Panics
///
/// If `block_size` is 0.
#[must_use]
pub fn blocks_for(n_tokens: u32, block_size: u32) -> u32 {
    n_tokens.div_ceil(block_size)
}

/// Counts of a pool's blocks; `n_free + n_cached + n_used == n_total`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolStats {
    /// Blocks that nobody holds and that hold nothing.
    pub n_free: u32,
    /// Blocks that nobody holds and that the prefix cache keeps until their room is needed.
    pub n_cached: u32,
    /// Blocks with at least one holder.
    pub n_used: u32,
    /// All blocks.
    pub n_total: u32,
    /// Blocks that the prefix cache gave up for their room, since the pool was made.
    pub n_evictions: u64,
}

/// The cached blocks of a sequence's prefix, as [`BlockPool::match_prefix`] found them.
///
/// The buffer is reused. It holds true until the pool changes.
#[derive(Debug, Default)]
pub struct PrefixMatch {
    blocks: Vec<BlockId>,
    n_idle: u32,
}

impl PrefixMatch {
    /// Forgets what was found.
    pub fn clear(&mut self) {
        self.blocks.clear();
        self.n_idle = 0;
    }

    /// How many blocks the prefix cache has.
    #[must_use]
    pub fn n_blocks(&self) -> u32 {
        to_u32(self.blocks.len())
    }

    /// How many of them nobody holds, so that holding them takes available blocks.
    #[must_use]
    pub fn n_idle(&self) -> u32 {
        self.n_idle
    }
}

/// What became of an empty table that asked to share the blocks of another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Fork {
    /// Too few blocks are available; nothing has changed.
    NoRoom,
    /// The table holds what it asked for.
    Done {
        /// What must be copied before anything is written to either block: from the source's block
        /// that is shared in part to the table's own. `None` if whole blocks are shared.
        copy: Option<BlockCopy>,
    },
}

/// A fixed number of KV blocks, each with a count of its holders, and the prefix cache over them.
///
/// Taking and releasing a block are O(1). Free blocks are taken before cached ones are evicted.
/// The free block released last is taken first; a fresh pool hands out the lowest id first. The
/// cached block released first is evicted first.
#[derive(Debug)]
pub struct BlockPool {
    block_size: u32,
    ref_counts: Vec<u32>,
    /// Blocks without holder and key, a stack whose top is taken first.
    free: Vec<BlockId>,
    /// Blocks without holder that have a key.
    cached: LruList,
    /// `None` without a prefix cache.
    index: Option<PrefixIndex>,
    events: EventLog,
    n_evictions: u64,
    scratch: Vec<u8>,
}

impl BlockPool {
    /// A pool of `num_blocks` free blocks of `block_size` tokens, without a prefix cache.
    ///
    /// # Panics
    ///
    /// If `block_size` is 0.
    #[must_use]
    pub fn new(num_blocks: u32, block_size: u32) -> Self {
        assert!(block_size > 0, "a block holds at least one token");
        Self {
            block_size,
            ref_counts: vec![0; num_blocks as usize],
            free: (0..num_blocks).rev().map(BlockId).collect(),
            cached: LruList::new(num_blocks),
            index: None,
            events: EventLog::default(),
            n_evictions: 0,
            scratch: vec![],
        }
    }

    /// The same with a prefix cache.
    ///
    /// # Panics
    ///
    /// If `block_size` is 0.
    #[must_use]
    pub fn with_prefix_cache(num_blocks: u32, block_size: u32) -> Self {
        Self { index: Some(PrefixIndex::new(num_blocks)), ..Self::new(num_blocks, block_size) }
    }

    /// How many blocks `n_tokens` tokens need.
    #[must_use]
    pub fn blocks_for(&self, n_tokens: u32) -> u32 {
        blocks_for(n_tokens, self.block_size)
    }

    /// Finds the longest cached prefix of a sequence, in whole blocks.
    ///
    /// At least one token stays behind it, so that there is one to query, and so do the tokens on
    /// which its last block's KV depends. Without a prefix cache nothing is found.
    pub fn match_prefix(
        &mut self,
        keys: &mut PrefixKeys,
        tokens: &[TokenId],
        found: &mut PrefixMatch,
    ) {
        found.blocks.clear();
        found.n_idle = 0;
        let Some(index) = &self.index else { return };
        let n_behind = keys.n_lookahead().max(1);
        let n_blocks = to_u32(tokens.len()).saturating_sub(n_behind) / self.block_size;
        for key in keys.of(tokens, self.block_size, n_blocks, &mut self.scratch) {
            let Some(block) = index.get(key) else { return };
            found.n_idle += u32::from(self.ref_counts[block.0 as usize] == 0);
            found.blocks.push(block);
        }
    }

    /// Gives an empty table the blocks of `found` and fresh ones behind, until it holds `n_tokens`
    /// tokens; or nothing, if that takes more blocks than are available. Says whether it did.
    ///
    /// # Panics
    ///
    /// If the table is not empty, or `found` holds more than `n_tokens` tokens.
    #[must_use]
    pub fn admit(&mut self, table: &mut BlockTable, found: &PrefixMatch, n_tokens: u32) -> bool {
        assert!(table.blocks.is_empty(), "only an empty table gets a prefix");
        let n_blocks = self.blocks_for(n_tokens);
        assert!(found.n_blocks() <= n_blocks, "a prefix is a part");
        if n_blocks - found.n_blocks() + found.n_idle > self.n_available() {
            return false;
        }
        for &block in &found.blocks {
            let count = &mut self.ref_counts[block.0 as usize];
            if *count == 0 {
                self.cached.remove(block);
            }
            *count += 1;
            table.blocks.push(block);
        }
        table.n_published = found.n_blocks();
        self.ensure_capacity(table, n_tokens)
    }

    /// How many available blocks [`fork`](Self::fork) takes.
    #[must_use]
    pub fn n_fresh_of_fork(&self, n_shared: u32, n_tokens: u32) -> u32 {
        self.blocks_for(n_tokens) - n_shared / self.block_size
    }

    /// Gives an empty table the KV of the first `n_shared` tokens of `source` and room behind it,
    /// until it holds `n_tokens` tokens; or nothing, if that takes more blocks than are available.
    ///
    /// Both tables then hold the blocks within `n_shared`, and neither writes there again. So the
    /// KV of these tokens is final, and it is the same for both sequences: they agree in the
    /// `n_lookahead` tokens behind `n_shared`, too, and in their [`PrefixSpace`]. A block that
    /// `n_shared` ends inside of is copied, by the caller.
    ///
    /// # Panics
    ///
    /// If the table is not empty, `source` holds fewer than `n_shared` tokens, or `n_tokens` is
    /// less.
    ///
    /// [`PrefixSpace`]: crate::PrefixSpace
    pub fn fork(
        &mut self,
        table: &mut BlockTable,
        source: &BlockTable,
        n_shared: u32,
        n_tokens: u32,
    ) -> Fork {
        assert!(table.blocks.is_empty(), "only an empty table is forked");
        assert!(self.blocks_for(n_shared) <= source.n_blocks(), "what is shared has blocks");
        assert!(n_shared <= n_tokens, "what is shared is a part");
        if self.n_fresh_of_fork(n_shared, n_tokens) > self.n_available() {
            return Fork::NoRoom;
        }
        let n_whole = n_shared / self.block_size;
        for &block in &source.blocks[..n_whole as usize] {
            self.ref_counts[block.0 as usize] += 1;
            table.blocks.push(block);
        }
        table.n_published = source.n_published.min(n_whole);
        let has_room = self.ensure_capacity(table, n_tokens);
        assert!(has_room, "fresh blocks are available");
        let is_partial = !n_shared.is_multiple_of(self.block_size);
        let copy = || {
            let part = n_whole as usize;
            BlockCopy { from: source.blocks[part], to: table.blocks[part] }
        };
        Fork::Done { copy: is_partial.then(copy) }
    }

    /// Grows `table` until it holds `n_tokens` tokens, by all the blocks that are missing or by
    /// none; says whether it holds them now. A table never shrinks.
    #[must_use]
    #[inline]
    pub fn ensure_capacity(&mut self, table: &mut BlockTable, n_tokens: u32) -> bool {
        let n_slots = u64::from(table.n_blocks()) * u64::from(self.block_size);
        u64::from(n_tokens) <= n_slots || self.grow(table, n_tokens)
    }

    fn grow(&mut self, table: &mut BlockTable, n_tokens: u32) -> bool {
        let n_missing = self.blocks_for(n_tokens).saturating_sub(table.n_blocks());
        if n_missing > self.n_available() {
            return false;
        }
        for _ in 0..n_missing {
            let block = self.take();
            let count = &mut self.ref_counts[block.0 as usize];
            assert_eq!(*count, 0, "{block} is available and held [INV-7]");
            *count = 1;
            table.blocks.push(block);
        }
        true
    }

    /// Takes a free block, or else the cached one that was released first.
    fn take(&mut self) -> BlockId {
        self.free.pop().unwrap_or_else(|| {
            let block = self.cached.pop_front().expect("a block is available");
            let index = self.index.as_mut().expect("cached blocks are indexed");
            self.events.removed(index.remove(block));
            self.n_evictions += 1;
            block
        })
    }

    /// Whether [`publish`](Self::publish) has anything to do.
    #[must_use]
    #[inline]
    pub fn has_unpublished(&self, table: &BlockTable, n_settled: u32) -> bool {
        let n_published = u64::from(table.n_published) * u64::from(self.block_size);
        self.index.is_some() && n_published + u64::from(self.block_size) <= u64::from(n_settled)
    }

    /// Computes the keys that [`publish`](Self::publish) needs, ahead of it.
    pub fn hash_blocks(&mut self, keys: &mut PrefixKeys, tokens: &[TokenId], n_settled: u32) {
        let n_blocks = n_settled / self.block_size;
        keys.of(tokens, self.block_size, n_blocks, &mut self.scratch);
    }

    /// Reads what [`publish`](Self::publish) will, so that it does not wait for memory: a caller
    /// with many tables touches all of them first.
    pub fn touch(&self, table: &BlockTable, keys: &PrefixKeys) {
        let Some(index) = &self.index else { return };
        let new = table.n_published as usize..;
        let (keys, blocks) = (keys.known().get(new.clone()), table.blocks.get(new));
        for (key, block) in keys.unwrap_or_default().iter().zip(blocks.unwrap_or_default()) {
            index.touch(key, *block);
        }
    }

    /// Lets other sequences find the full blocks within the first `n_settled` tokens of a
    /// sequence: tokens that are committed, as are the `n_lookahead` tokens behind them, and whose
    /// KV is written for good. A block whose content is cached already stays the table's own.
    ///
    /// # Panics
    ///
    /// If `tokens` or the table is too short for `n_settled`.
    pub fn publish(
        &mut self,
        table: &mut BlockTable,
        keys: &mut PrefixKeys,
        tokens: &[TokenId],
        n_settled: u32,
    ) {
        if !self.has_unpublished(table, n_settled) {
            return;
        }
        self.hash_blocks(keys, tokens, n_settled);
        let Some(index) = &mut self.index else { return };
        let n_blocks = n_settled / self.block_size;
        let new = table.n_published as usize..n_blocks as usize;
        let mut run_start = new.start;
        for block_idx in new.clone() {
            if !index.insert(&keys.known()[block_idx], table.blocks[block_idx]) {
                self.events.stored(keys, tokens, self.block_size, run_start..block_idx);
                run_start = block_idx + 1;
            }
        }
        self.events.stored(keys, tokens, self.block_size, run_start..new.end);
        table.n_published = n_blocks;
    }

    /// Empties the prefix cache: no sequence finds any block that was published up to now. Those
    /// that hold such blocks keep them. O(blocks).
    pub fn clear_prefix_cache(&mut self) {
        let Some(index) = &mut self.index else { return };
        index.clear();
        while let Some(block) = self.cached.pop_front() {
            self.free.push(block);
        }
        self.events.cleared();
    }

    /// Records what changes in the prefix cache: keeps the latest `capacity` events for
    /// [`drain_events`](Self::drain_events). With 0, which is how a pool starts, it stops, and
    /// recording costs nothing.
    pub fn record_events(&mut self, capacity: usize) {
        self.events.set_capacity(capacity);
    }

    /// Moves the events that were recorded since the last call to the end of `events`.
    pub fn drain_events(&mut self, events: &mut Vec<KvEvent>) {
        self.events.drain_into(events);
    }

    /// How many events were lost since nobody fetched them in time.
    #[must_use]
    pub fn n_dropped_events(&self) -> u64 {
        self.events.n_dropped()
    }

    /// What the prefix cache holds, as the event that a reader starts from: the next one recorded
    /// has the next number. O(blocks).
    #[must_use]
    pub fn snapshot(&self) -> KvEvent {
        let keys = self.index.iter().flat_map(PrefixIndex::keys).collect();
        KvEvent { sequence: self.events.last_sequence(), change: KvChange::Snapshot { keys } }
    }

    /// Gives up every block of `table`, the last one first, and empties it. So a sequence's tail is
    /// evicted before the prefix, without which nobody could find it.
    ///
    /// # Panics
    ///
    /// If a block has no holder left: it was released twice.
    pub fn release_table(&mut self, table: &mut BlockTable) {
        table.n_published = 0;
        for block in table.blocks.drain(..).rev() {
            let count = &mut self.ref_counts[block.0 as usize];
            assert!(*count > 0, "{block} is released more often than held [INV-7]");
            *count -= 1;
            if *count > 0 {
                continue;
            }
            if self.index.as_ref().is_some_and(|index| index.has(block)) {
                self.cached.push_back(block);
            } else {
                self.free.push(block);
            }
        }
    }

    /// Blocks that nobody holds, cached ones included.
    #[must_use]
    pub fn n_available(&self) -> u32 {
        to_u32(self.free.len()) + self.cached.len()
    }

    /// Counts of the blocks.
    #[must_use]
    pub fn stats(&self) -> PoolStats {
        let n_total = to_u32(self.ref_counts.len());
        PoolStats {
            n_free: to_u32(self.free.len()),
            n_cached: self.cached.len(),
            n_used: n_total - self.n_available(),
            n_total,
            n_evictions: self.n_evictions,
        }
    }

    /// Checks the pool against all tables that hold blocks of it. O(blocks); for tests.
    ///
    /// # Panics
    ///
    /// If a count differs from the number of tables that hold the block; if a block without holder
    /// is not listed exactly once, as cached if it has a key and as free if not; or if keys and
    /// blocks do not name each other.
    pub fn check_invariants<'a>(&self, tables: impl IntoIterator<Item = &'a BlockTable>) {
        let mut n_holders = vec![0; self.ref_counts.len()];
        for table in tables {
            let blocks: HashSet<_> = table.blocks().iter().collect();
            assert_eq!(blocks.len(), table.blocks.len(), "a table holds a block once");
            blocks.iter().for_each(|block| n_holders[block.0 as usize] += 1);
        }
        assert_eq!(self.ref_counts, n_holders, "counts equal holders [INV-7]");
        let has_key = |block| self.index.as_ref().is_some_and(|index| index.has(block));
        let mut is_listed = vec![false; self.ref_counts.len()];
        let free = self.free.iter().map(|block| (*block, false));
        for (block, is_cached) in free.chain(self.cached.iter().map(|block| (block, true))) {
            let seen = std::mem::replace(&mut is_listed[block.0 as usize], true);
            assert!(!seen, "{block} is available twice [INV-7]");
            assert_eq!(has_key(block), is_cached, "{block} is cached exactly if it has a key");
        }
        for (n, is_listed) in self.ref_counts.iter().zip(is_listed) {
            assert_eq!(*n == 0, is_listed, "exactly the blocks without a holder are available");
        }
        if let Some(index) = &self.index {
            index.check_invariants();
        }
    }
}

fn to_u32(n: usize) -> u32 {
    u32::try_from(n).expect("blocks and tokens are counted in u32")
}

#[cfg(test)]
mod tests;

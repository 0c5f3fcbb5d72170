//! The pool of blocks.

use engine_types::BlockId;

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

/// Counts of a pool's blocks; `n_free + n_used == n_total`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolStats {
    /// Blocks that nobody holds.
    pub n_free: u32,
    /// Blocks with at least one holder.
    pub n_used: u32,
    /// All blocks.
    pub n_total: u32,
}

/// A fixed number of KV blocks, each with a count of its holders.
///
/// Taking and releasing a block are O(1). The block released last is taken first; a fresh pool
/// hands out the lowest id first.
#[derive(Debug)]
pub struct BlockPool {
    block_size: u32,
    ref_counts: Vec<u32>,
    /// A stack whose top is taken first.
    free: Vec<BlockId>,
}

impl BlockPool {
    /// A pool of `num_blocks` free blocks of `block_size` tokens.
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
        }
    }

    /// How many blocks `n_tokens` tokens need.
    #[must_use]
    pub fn blocks_for(&self, n_tokens: u32) -> u32 {
        blocks_for(n_tokens, self.block_size)
    }

    /// Grows `table` until it holds `n_tokens` tokens, by all the blocks that are missing or by
    /// none; says whether it holds them now. A table never shrinks.
    #[must_use]
    pub fn ensure_capacity(&mut self, table: &mut BlockTable, n_tokens: u32) -> bool {
        let n_missing = self.blocks_for(n_tokens).saturating_sub(table.n_blocks());
        let Some(n_left) = self.free.len().checked_sub(n_missing as usize) else {
            return false;
        };
        for block in self.free.drain(n_left..).rev() {
            let count = &mut self.ref_counts[block.0 as usize];
            assert_eq!(*count, 0, "{block} is free and held [INV-7]");
            *count = 1;
            table.blocks.push(block);
        }
        true
    }

    /// Gives up every block of `table`, the last one first, and empties it.
    ///
    /// # Panics
    ///
    /// If a block has no holder left: it was released twice.
    pub fn release_table(&mut self, table: &mut BlockTable) {
        for block in table.blocks.drain(..).rev() {
            let count = &mut self.ref_counts[block.0 as usize];
            assert!(*count > 0, "{block} is released more often than held [INV-7]");
            *count -= 1;
            if *count == 0 {
                self.free.push(block);
            }
        }
    }

    /// Blocks that nobody holds.
    #[must_use]
    pub fn n_free(&self) -> u32 {
        u32::try_from(self.free.len()).expect("block ids are u32")
    }

    /// Counts of the blocks.
    #[must_use]
    pub fn stats(&self) -> PoolStats {
        let n_total = u32::try_from(self.ref_counts.len()).expect("block ids are u32");
        let n_free = self.n_free();
        PoolStats { n_free, n_used: n_total - n_free, n_total }
    }

    /// Checks the pool against all tables that hold blocks of it. O(blocks); for tests.
    ///
    /// # Panics
    ///
    /// If a count differs from the number of tables that hold the block, or a free block is held,
    /// listed twice or missing.
    pub fn check_invariants<'a>(&self, tables: impl IntoIterator<Item = &'a BlockTable>) {
        let mut n_holders = vec![0; self.ref_counts.len()];
        for block in tables.into_iter().flat_map(BlockTable::blocks) {
            n_holders[block.0 as usize] += 1;
        }
        assert_eq!(self.ref_counts, n_holders, "counts equal holders [INV-7]");
        let mut is_free = vec![false; self.ref_counts.len()];
        for block in &self.free {
            let seen = std::mem::replace(&mut is_free[block.0 as usize], true);
            assert!(!seen, "{block} is free twice [INV-7]");
        }
        for (n, free) in self.ref_counts.iter().zip(is_free) {
            assert_eq!(*n == 0, free, "exactly the blocks without a holder are free [INV-7]");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(table: &BlockTable) -> Vec<u32> {
        table.blocks().iter().map(|block| block.0).collect()
    }

    #[test]
    fn blocks_for_rounds_up() {
        let table = [(0, 4, 0), (1, 4, 1), (4, 4, 1), (5, 4, 2), (3, 1, 3), (64, 64, 1)];
        for (n_tokens, block_size, expected) in table {
            assert_eq!(blocks_for(n_tokens, block_size), expected, "{n_tokens} by {block_size}");
        }
    }

    #[test]
    fn growth_is_all_or_nothing() {
        let mut pool = BlockPool::new(6, 4);
        let (mut a, mut b) = (BlockTable::default(), BlockTable::default());
        assert!(pool.ensure_capacity(&mut a, 14));
        assert!(!pool.ensure_capacity(&mut b, 9));
        assert!(b.blocks().is_empty());
        assert!(pool.ensure_capacity(&mut a, 19));
        assert_eq!(ids(&a), [0, 1, 2, 3, 4]);
        assert!(pool.ensure_capacity(&mut b, 4));
        assert!(!pool.ensure_capacity(&mut b, 5));
        pool.check_invariants([&a, &b]);
        assert_eq!(pool.stats(), PoolStats { n_free: 0, n_used: 6, n_total: 6 });
    }

    #[test]
    fn capacity_at_hand_takes_nothing() {
        let mut pool = BlockPool::new(2, 4);
        let mut table = BlockTable::default();
        assert!(pool.ensure_capacity(&mut table, 8));
        assert!(pool.ensure_capacity(&mut table, 3));
        assert_eq!(ids(&table), [0, 1]);
    }

    #[test]
    fn released_blocks_come_back_front_first() {
        let mut pool = BlockPool::new(4, 4);
        let (mut a, mut b) = (BlockTable::default(), BlockTable::default());
        assert!(pool.ensure_capacity(&mut a, 12));
        pool.release_table(&mut a);
        assert!(pool.ensure_capacity(&mut b, 16));
        assert_eq!(ids(&b), [0, 1, 2, 3]);
        pool.check_invariants([&a, &b]);
    }

    #[test]
    #[should_panic(expected = "released more often than held")]
    fn a_second_release_panics() {
        let mut pool = BlockPool::new(1, 4);
        let mut table = BlockTable::default();
        assert!(pool.ensure_capacity(&mut table, 1));
        let mut copy = BlockTable { blocks: table.blocks.clone() };
        pool.release_table(&mut table);
        pool.release_table(&mut copy);
    }

    #[test]
    #[should_panic(expected = "counts equal holders")]
    fn a_leaked_table_is_noticed() {
        let mut pool = BlockPool::new(2, 4);
        let mut table = BlockTable::default();
        assert!(pool.ensure_capacity(&mut table, 5));
        pool.check_invariants([]);
    }
}

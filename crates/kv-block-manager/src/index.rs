//! From keys to blocks.

use std::hint::black_box;

use engine_types::{BlockId, BlockKey};

/// The end of a bucket, and the place of a block that is in none.
const NONE: u32 = u32::MAX;

/// Which block holds the KV of a key; a block has at most one key and a key at most one block.
///
/// A hash table whose entries lie at their blocks: there are never more of them than blocks, so it
/// is made once and neither grows nor tidies itself up while steps wait.
#[derive(Debug)]
pub(crate) struct PrefixIndex {
    /// The first block of each bucket; a power of two of them, so many that most are empty even
    /// if all blocks have keys: each block on the way to another is a wait for memory.
    buckets: Vec<u32>,
    /// By block.
    entries: Vec<Entry>,
    len: u32,
}

#[derive(Clone, Debug)]
struct Entry {
    key: Option<BlockKey>,
    /// The next block of the same bucket.
    next: u32,
}

impl PrefixIndex {
    /// An empty index of `num_blocks` blocks.
    pub(crate) fn new(num_blocks: u32) -> Self {
        let num_blocks = num_blocks as usize;
        Self {
            buckets: vec![NONE; 4 * num_blocks.next_power_of_two()],
            entries: vec![Entry { key: None, next: NONE }; num_blocks],
            len: 0,
        }
    }

    /// A part of a key is as good as another hash of it: a key is a cryptographic hash already.
    fn bucket(&self, key: &BlockKey) -> usize {
        let (start, _) = key.0.split_first_chunk().expect("a key is longer");
        u32::from_le_bytes(*start) as usize & (self.buckets.len() - 1)
    }

    pub(crate) fn get(&self, key: &BlockKey) -> Option<BlockId> {
        let mut block = self.buckets[self.bucket(key)];
        while block != NONE {
            let entry = &self.entries[block as usize];
            if entry.key.as_ref() == Some(key) {
                return Some(BlockId(block));
            }
            block = entry.next;
        }
        None
    }

    /// Reads what entering `block` under `key` reads.
    pub(crate) fn touch(&self, key: &BlockKey, block: BlockId) {
        let first = self.entries.get(self.buckets[self.bucket(key)] as usize);
        for entry in first.into_iter().chain(&self.entries[block.0 as usize..][..1]) {
            // These lie at its two ends.
            black_box((entry.key.is_some(), entry.next));
        }
    }

    /// Enters `block` under `key` unless the key has a block already; says whether it did.
    pub(crate) fn insert(&mut self, key: &BlockKey, block: BlockId) -> bool {
        if self.get(key).is_some() {
            return false;
        }
        let bucket = self.bucket(key);
        let entry = &mut self.entries[block.0 as usize];
        assert!(entry.key.is_none(), "{block} has one key");
        *entry = Entry { key: Some(*key), next: self.buckets[bucket] };
        self.buckets[bucket] = block.0;
        self.len += 1;
        true
    }

    /// Forgets the key of `block`, which has one, and yields it.
    pub(crate) fn remove(&mut self, block: BlockId) -> BlockKey {
        let key = self.entries[block.0 as usize].key.take().expect("a block with a key");
        let next = self.entries[block.0 as usize].next;
        let bucket = self.bucket(&key);
        let mut previous = self.buckets[bucket];
        if previous == block.0 {
            self.buckets[bucket] = next;
        } else {
            while self.entries[previous as usize].next != block.0 {
                previous = self.entries[previous as usize].next;
            }
            self.entries[previous as usize].next = next;
        }
        self.len -= 1;
        key
    }

    /// Forgets all keys. O(blocks).
    pub(crate) fn clear(&mut self) {
        self.buckets.fill(NONE);
        self.entries.fill(Entry { key: None, next: NONE });
        self.len = 0;
    }

    /// All keys, in the order of their blocks.
    pub(crate) fn keys(&self) -> impl Iterator<Item = BlockKey> {
        self.entries.iter().filter_map(|entry| entry.key)
    }

    pub(crate) fn has(&self, block: BlockId) -> bool {
        self.entries[block.0 as usize].key.is_some()
    }

    /// Checks that each key leads to its block. O(blocks).
    pub(crate) fn check_invariants(&self) {
        let mut n_keys = 0;
        for (block, entry) in (0..).map(BlockId).zip(&self.entries) {
            if let Some(key) = &entry.key {
                assert_eq!(self.get(key), Some(block), "a key leads to its block");
                n_keys += 1;
            }
        }
        assert_eq!(n_keys, self.len, "each key is counted");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(first: u8, last: u8) -> BlockKey {
        let mut bytes = [7; 32];
        (bytes[0], bytes[31]) = (first, last);
        BlockKey(bytes)
    }

    #[test]
    fn l11_keys_are_compared_whole_when_their_buckets_collide() {
        let mut index = PrefixIndex::new(4);
        // These differ in their last byte only.
        let keys = [0, 1, 2, 3].map(|last| key(0, last));
        for (block, key) in (0..3).map(BlockId).zip(&keys) {
            assert_eq!(index.get(key), None);
            assert!(index.insert(key, block));
            index.check_invariants();
        }
        let found = |index: &PrefixIndex| keys.map(|key| index.get(&key).map(|block| block.0));
        assert_eq!(found(&index), [Some(0), Some(1), Some(2), None]);
        assert_eq!(index.remove(BlockId(1)), keys[1]);
        assert_eq!(found(&index), [Some(0), None, Some(2), None]);
        assert_eq!(index.remove(BlockId(2)), keys[2]);
        assert!(index.insert(&keys[3], BlockId(1)));
        assert_eq!(found(&index), [Some(0), None, None, Some(1)]);
        assert_eq!(index.keys().collect::<Vec<_>>(), [keys[0], keys[3]]);
        index.check_invariants();
        index.clear();
        assert_eq!(found(&index), [None; 4]);
        index.check_invariants();
    }

    #[test]
    fn the_first_block_of_a_key_stays() {
        let mut index = PrefixIndex::new(2);
        assert!(index.insert(&key(1, 1), BlockId(1)));
        assert!(!index.insert(&key(1, 1), BlockId(0)));
        assert_eq!(index.get(&key(1, 1)), Some(BlockId(1)));
        assert!(!index.has(BlockId(0)));
        index.check_invariants();
    }
}

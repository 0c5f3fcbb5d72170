//! From keys to blocks.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::{BuildHasher, BuildHasherDefault, Hash, Hasher};

use engine_types::BlockId;

use crate::keys::BlockKey;

/// Which block holds the KV of a key; a block has at most one key and a key at most one block.
#[derive(Debug)]
pub(crate) struct PrefixIndex<S = BuildHasherDefault<KeyHasher>> {
    by_key: HashMap<BlockKey, BlockId, S>,
    /// The key of each block.
    keys: Vec<Option<BlockKey>>,
}

impl<S: BuildHasher + Default> PrefixIndex<S> {
    /// An empty index of `num_blocks` blocks.
    pub(crate) fn new(num_blocks: u32) -> Self {
        let num_blocks = num_blocks as usize;
        // A map that is at most half full tidies itself up in place, without an allocation.
        let by_key = HashMap::with_capacity_and_hasher(2 * num_blocks, S::default());
        Self { by_key, keys: vec![None; num_blocks] }
    }

    pub(crate) fn get(&self, key: &BlockKey) -> Option<BlockId> {
        self.by_key.get(key).copied()
    }

    /// Enters `block` under `key` unless the key has a block already.
    pub(crate) fn insert(&mut self, key: BlockKey, block: BlockId) {
        if let Entry::Vacant(entry) = self.by_key.entry(key) {
            let previous = self.keys[block.0 as usize].replace(key);
            assert_eq!(previous, None, "{block} has one key");
            entry.insert(block);
        }
    }

    pub(crate) fn remove(&mut self, block: BlockId) {
        if let Some(key) = self.keys[block.0 as usize].take() {
            self.by_key.remove(&key);
        }
    }

    pub(crate) fn has(&self, block: BlockId) -> bool {
        self.keys[block.0 as usize].is_some()
    }

    /// Checks that keys and blocks name each other. O(blocks).
    pub(crate) fn check_invariants(&self) {
        let named = self
            .by_key
            .iter()
            .filter(|(key, block)| self.keys[block.0 as usize].is_some_and(|other| other == **key));
        assert_eq!(named.count(), self.by_key.len(), "an indexed block knows its key");
        let n_keys = self.keys.iter().flatten().count();
        assert_eq!(n_keys, self.by_key.len(), "a block's key is indexed");
    }
}

impl Hash for BlockKey {
    /// A part of a key is as good as the whole: it is a cryptographic hash already.
    fn hash<H: Hasher>(&self, state: &mut H) {
        let (start, _) = self.0.split_first_chunk().expect("a key is longer");
        state.write_u64(u64::from_le_bytes(*start));
    }
}

/// Takes the number of a [`BlockKey`] as it is.
#[derive(Debug, Default)]
pub(crate) struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn write(&mut self, _: &[u8]) {
        unreachable!("a key writes one number");
    }

    fn write_u64(&mut self, n: u64) {
        self.0 = n;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sends every key to the same bucket.
    #[derive(Debug, Default)]
    struct Colliding;

    impl Hasher for Colliding {
        fn write(&mut self, _: &[u8]) {}

        fn finish(&self) -> u64 {
            0
        }
    }

    #[test]
    fn l11_keys_are_compared_whole_when_their_buckets_collide() {
        let mut index = PrefixIndex::<BuildHasherDefault<Colliding>>::new(4);
        let key = |last| {
            let mut bytes = [7; 32];
            bytes[31] = last;
            BlockKey(bytes)
        };
        index.insert(key(0), BlockId(0));
        assert_eq!(index.get(&key(1)), None);
        index.insert(key(1), BlockId(1));
        assert_eq!((index.get(&key(0)), index.get(&key(1))), (Some(BlockId(0)), Some(BlockId(1))));
        index.remove(BlockId(0));
        assert_eq!((index.get(&key(0)), index.get(&key(1))), (None, Some(BlockId(1))));
        index.check_invariants();
    }

    #[test]
    fn the_first_block_of_a_key_stays() {
        let mut index = PrefixIndex::<BuildHasherDefault<KeyHasher>>::new(2);
        index.insert(BlockKey([1; 32]), BlockId(1));
        index.insert(BlockKey([1; 32]), BlockId(0));
        assert_eq!(index.get(&BlockKey([1; 32])), Some(BlockId(1)));
        assert!(!index.has(BlockId(0)));
        index.check_invariants();
    }
}

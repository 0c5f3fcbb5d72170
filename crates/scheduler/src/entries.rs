//! The unfinished requests, by slot and by id.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::ops::{Index, IndexMut};

use engine_types::RequestId;

use crate::entry::Entry;

/// Where an entry lies; valid until the entry is removed.
pub(crate) type Slot = usize;

/// A slab of entries with an index by request id.
#[derive(Debug, Default)]
pub(crate) struct Entries {
    slots: Vec<Option<Entry>>,
    vacant: Vec<Slot>,
    by_id: HashMap<RequestId, Slot, BuildHasherDefault<IdHasher>>,
}

impl Entries {
    pub(crate) fn len(&self) -> usize {
        self.by_id.len()
    }

    pub(crate) fn slot(&self, id: RequestId) -> Option<Slot> {
        self.by_id.get(&id).copied()
    }

    pub(crate) fn insert(&mut self, entry: Entry) -> Slot {
        let slot = self.vacant.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() - 1
        });
        let previous = self.by_id.insert(entry.id, slot);
        assert!(previous.is_none(), "an id names one unfinished request");
        self.slots[slot] = Some(entry);
        slot
    }

    pub(crate) fn remove(&mut self, slot: Slot) -> Entry {
        let entry = self.slots[slot].take().expect("a slot in use");
        self.by_id.remove(&entry.id);
        self.vacant.push(slot);
        entry
    }

    pub(crate) fn get(&self, slot: Slot) -> Option<&Entry> {
        self.slots[slot].as_ref()
    }

    /// The entry in `slot` if it still is the one of `id`.
    pub(crate) fn is_at(&self, slot: Slot, id: RequestId) -> bool {
        self.slots[slot].as_ref().is_some_and(|entry| entry.id == id)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Entry> {
        self.slots.iter().flatten()
    }
}

impl Index<Slot> for Entries {
    type Output = Entry;

    fn index(&self, slot: Slot) -> &Entry {
        self.slots[slot].as_ref().expect("a slot in use")
    }
}

impl IndexMut<Slot> for Entries {
    fn index_mut(&mut self, slot: Slot) -> &mut Entry {
        self.slots[slot].as_mut().expect("a slot in use")
    }
}

/// Spreads ids by one multiplication. Ids are the engine's own counters, so nobody can choose
/// them to collide.
#[derive(Default)]
struct IdHasher(u64);

impl Hasher for IdHasher {
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u64(&mut self, n: u64) {
        let mixed = (self.0 ^ n).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = mixed ^ (mixed >> 32);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

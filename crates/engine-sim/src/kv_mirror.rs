//! A reader of the prefix cache's events, who must always know what the cache holds.

use std::collections::BTreeSet;

use engine_types::{BlockKey, KvChange, KvEvent, StoredBlocks};
use scheduler::Scheduler;

/// More events than one call makes.
const CAPACITY: usize = 10_000;

/// What the events so far amount to.
#[derive(Debug, Default)]
pub(crate) struct KvMirror {
    keys: BTreeSet<BlockKey>,
    sequence: u64,
    events: Vec<KvEvent>,
}

impl KvMirror {
    pub(crate) fn new(scheduler: &mut Scheduler) -> Self {
        scheduler.record_kv_events(CAPACITY);
        Self::default()
    }

    /// Reads what is new, and compares.
    pub(crate) fn check(&mut self, scheduler: &mut Scheduler) {
        scheduler.drain_kv_events(&mut self.events);
        for event in std::mem::take(&mut self.events) {
            self.sequence += 1;
            assert_eq!(event.sequence, self.sequence, "an event is missing");
            match event.change {
                KvChange::Snapshot { .. } => panic!("only who asks gets a snapshot"),
                KvChange::Stored(blocks) => self.store(&blocks),
                KvChange::Removed { keys } => {
                    let was_held = keys.iter().all(|key| self.keys.remove(key));
                    assert!(was_held, "a block is removed that was not stored");
                }
                KvChange::Cleared => self.keys.clear(),
            }
        }
        let KvEvent { sequence, change } = scheduler.kv_snapshot();
        assert_eq!(sequence, self.sequence, "the snapshot's number");
        let KvChange::Snapshot { keys } = change else { panic!("{change:?} is no snapshot") };
        assert!(self.keys.iter().eq(&BTreeSet::from_iter(keys)), "the events tell another cache");
    }

    fn store(&mut self, blocks: &StoredBlocks) {
        let n_tokens = blocks.keys.len() * blocks.block_size as usize;
        assert_eq!(blocks.tokens.len(), n_tokens + blocks.n_lookahead as usize);
        let are_new = blocks.keys.iter().all(|key| self.keys.insert(*key));
        assert!(are_new, "a block is stored twice");
    }
}

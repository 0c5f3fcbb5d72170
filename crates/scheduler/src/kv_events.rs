//! The prefix cache as others see it.

use engine_types::KvEvent;

use crate::scheduler::Scheduler;

impl Scheduler {
    /// Records what changes in the prefix cache, at most `capacity` events until they are drained,
    /// the oldest ones lost; with 0, as at first, it stops.
    pub fn record_kv_events(&mut self, capacity: usize) {
        self.pool.record_events(capacity);
    }

    /// Moves the events that were recorded since the last call to the end of `events`.
    pub fn drain_kv_events(&mut self, events: &mut Vec<KvEvent>) {
        self.pool.drain_events(events);
    }

    /// What the prefix cache holds, as the event that a reader starts from. O(blocks).
    #[must_use]
    pub fn kv_snapshot(&self) -> KvEvent {
        self.pool.snapshot()
    }

    /// Empties the prefix cache; requests keep the blocks that they hold. O(blocks).
    pub fn clear_prefix_cache(&mut self) {
        self.pool.clear_prefix_cache();
    }
}

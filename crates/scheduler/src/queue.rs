//! Ranks, and lists of requests in their order.

use std::collections::VecDeque;

use crate::config::SchedulingPolicy;
use crate::entries::{Entries, Slot};

/// A request's place among all others; lower goes first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Rank {
    /// A step count, moved by the priority.
    due: i64,
    /// The order of submission.
    order: u64,
}

impl Rank {
    /// The rank of the `order`-th request, submitted when `n_steps` steps had been planned.
    pub(crate) fn new(policy: SchedulingPolicy, n_steps: u64, priority: i32, order: u64) -> Self {
        let due = match policy {
            SchedulingPolicy::Fcfs => 0,
            SchedulingPolicy::Priority { aging_steps } => i64::try_from(n_steps)
                .unwrap_or(i64::MAX)
                .saturating_add(i64::from(priority) * i64::from(aging_steps)),
        };
        Self { due, order }
    }
}

/// Requests in the order of their ranks, none twice. It allocates only when it outgrows its buffer.
#[derive(Debug, Default)]
pub(crate) struct RankedQueue {
    slots: VecDeque<Slot>,
}

impl RankedQueue {
    pub(crate) fn len(&self) -> usize {
        self.slots.len()
    }

    pub(crate) fn front(&self) -> Option<Slot> {
        self.slots.front().copied()
    }

    pub(crate) fn iter(&self) -> impl DoubleEndedIterator<Item = Slot> {
        self.slots.iter().copied()
    }

    /// How many of the requests have a rank below `rank`.
    pub(crate) fn n_before(&self, entries: &Entries, rank: Rank) -> usize {
        self.slots.partition_point(|slot| entries[*slot].rank < rank)
    }

    pub(crate) fn insert(&mut self, entries: &Entries, slot: Slot) {
        let at = self.n_before(entries, entries[slot].rank);
        self.slots.insert(at, slot);
    }

    /// # Panics
    ///
    /// If the request is not listed.
    pub(crate) fn remove(&mut self, entries: &Entries, slot: Slot) {
        let at = self.n_before(entries, entries[slot].rank);
        let removed = self.slots.remove(at);
        assert_eq!(removed, Some(slot), "{} is listed", entries[slot].id);
    }
}

//! When requests that are not done have to end.

use std::collections::BTreeSet;
use std::time::Instant;

use engine_types::RequestId;

/// What is over at a request's time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Limit {
    /// Its time to start.
    Wait,
    /// All its time.
    Whole,
}

/// The times of unfinished requests, the next one first; at most two for each request.
#[derive(Debug, Default)]
pub(crate) struct Deadlines {
    due: BTreeSet<(Instant, RequestId, Limit)>,
}

impl Deadlines {
    pub(crate) fn insert(&mut self, at: Instant, id: RequestId, limit: Limit) {
        self.due.insert((at, id, limit));
    }

    /// Forgets a time, if it has not come.
    pub(crate) fn remove(&mut self, at: Instant, id: RequestId, limit: Limit) {
        self.due.remove(&(at, id, limit));
    }

    /// Takes a time that has come. Does not ask the clock while there is none.
    pub(crate) fn pop_due(&mut self) -> Option<(RequestId, Limit)> {
        let (at, id, limit) = *self.due.first()?;
        if at > Instant::now() {
            return None;
        }
        self.due.pop_first();
        Some((id, limit))
    }
}

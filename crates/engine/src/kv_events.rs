//! What changes in the prefix cache, from the engine thread to those who subscribe.

use std::mem;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use engine_types::KvEvent;
use scheduler::Scheduler;

use crate::error::SubscribeError;

/// Most subscribers at a time.
const MAX_SUBSCRIBERS: usize = 32;
/// Most events of one step. One row makes a few.
const MAX_EVENTS_PER_STEP: usize = 1 << 16;

/// Takes the events of the prefix cache, on the engine thread: it must not block.
///
/// The first event is a snapshot. A sink without room loses an event, whichever it likes; its
/// reader sees that by the gap in the numbers, and subscribes again to know where it stands. The
/// engine drops the sink when it stops.
pub trait KvEventSink: Send {
    /// Takes one event, if there is room.
    fn send(&mut self, event: Arc<KvEvent>);

    /// Whether nobody reads any more; the engine then drops the sink.
    fn is_closed(&self) -> bool;
}

/// A [`KvEventSink`] of the standard library's bounded channel. Without room it loses the event
/// that comes.
#[derive(Debug)]
pub struct KvChannelSink {
    sender: SyncSender<Arc<KvEvent>>,
    reader: Weak<()>,
}

/// The reading end of a [`KvChannelSink`]: an iterator over the events, which waits for each and
/// ends when the engine stops.
#[derive(Debug)]
pub struct KvEvents {
    receiver: Receiver<Arc<KvEvent>>,
    _reader: Arc<()>,
}

/// A sink with room for `capacity` events, and its reading end.
#[must_use]
pub fn kv_event_channel(capacity: usize) -> (KvChannelSink, KvEvents) {
    let (sender, receiver) = sync_channel(capacity);
    let reader = Arc::new(());
    (
        KvChannelSink { sender, reader: Arc::downgrade(&reader) },
        KvEvents { receiver, _reader: reader },
    )
}

impl KvEventSink for KvChannelSink {
    fn send(&mut self, event: Arc<KvEvent>) {
        // Who has no room sees a gap; who has gone is found by `is_closed`.
        let _ = self.sender.try_send(event);
    }

    fn is_closed(&self) -> bool {
        self.reader.strong_count() == 0
    }
}

impl Iterator for KvEvents {
    type Item = Arc<KvEvent>;

    fn next(&mut self) -> Option<Arc<KvEvent>> {
        self.receiver.recv().ok()
    }
}

/// Who gets the events. Handles add to it, the engine thread reads it.
#[derive(Default)]
pub(crate) struct KvSubscribers {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Those who have got their snapshot.
    known: Vec<Box<dyn KvEventSink>>,
    new: Vec<Box<dyn KvEventSink>>,
    has_stopped: bool,
    /// Reused.
    events: Vec<KvEvent>,
}

impl KvSubscribers {
    /// The state is valid between any two statements that can panic, so poisoning is ignored.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn add(&self, sink: Box<dyn KvEventSink>) -> Result<(), SubscribeError> {
        let mut state = self.lock();
        if state.has_stopped {
            return Err(SubscribeError::Stopped);
        }
        state.known.retain(|sink| !sink.is_closed());
        state.new.retain(|sink| !sink.is_closed());
        if state.known.len() + state.new.len() >= MAX_SUBSCRIBERS {
            return Err(SubscribeError::TooMany { limit: MAX_SUBSCRIBERS });
        }
        state.new.push(sink);
        Ok(())
    }

    /// Sends what the scheduler has recorded, greets new subscribers with a snapshot, and forgets
    /// those who have gone. The scheduler records as long as there is a subscriber.
    pub(crate) fn serve(&self, scheduler: &mut Scheduler) {
        let state = &mut *self.lock();
        scheduler.drain_kv_events(&mut state.events);
        for event in state.events.drain(..).map(Arc::new) {
            state.known.iter_mut().for_each(|sink| sink.send(Arc::clone(&event)));
        }
        if !state.new.is_empty() {
            scheduler.record_kv_events(MAX_EVENTS_PER_STEP);
            let snapshot = Arc::new(scheduler.kv_snapshot());
            for mut sink in state.new.drain(..) {
                sink.send(Arc::clone(&snapshot));
                state.known.push(sink);
            }
        }
        state.known.retain(|sink| !sink.is_closed());
        if state.known.is_empty() {
            scheduler.record_kv_events(0);
        }
    }

    /// Ends all subscriptions for good.
    pub(crate) fn stop(&self) {
        let mut state = self.lock();
        state.has_stopped = true;
        let sinks = (mem::take(&mut state.known), mem::take(&mut state.new));
        // Sinks are the subscribers' code: not under the lock.
        drop(state);
        drop(sinks);
    }
}

#[cfg(test)]
mod tests;

//! Where a request's events go.

use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};

use engine_types::RequestEvent;

/// What became of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// It was taken.
    Ok,
    /// Nobody reads any more; the engine aborts the request.
    Closed,
    /// The reader is too far behind and the event is lost; the engine aborts the request.
    Full,
}

/// Takes a request's events, on the engine thread: it must not block.
///
/// `Finished` is the last event and comes exactly once; a sink that counts its room must keep some
/// for it. The engine drops the sink after it.
pub trait EventSink: Send {
    /// Takes one event.
    fn send(&mut self, event: RequestEvent) -> Delivery;
}

/// An [`EventSink`] of the standard library's bounded channel.
#[derive(Debug)]
pub struct ChannelSink {
    sender: SyncSender<RequestEvent>,
    /// Keeps room for `Finished` apart from the events before it.
    finished: SyncSender<RequestEvent>,
}

/// The reading end of a [`ChannelSink`]: an iterator over the events, which waits for each and
/// ends after `Finished`.
#[derive(Debug)]
pub struct Events {
    receiver: Receiver<RequestEvent>,
    finished: Receiver<RequestEvent>,
}

/// A sink with room for `capacity` events besides the request's start and end, and its reading end.
///
/// A reader that lets more than that pile up has its request aborted.
#[must_use]
pub fn channel(capacity: usize) -> (ChannelSink, Events) {
    let (sender, receiver) = sync_channel(capacity + 1);
    let (finished_sender, finished) = sync_channel(1);
    (ChannelSink { sender, finished: finished_sender }, Events { receiver, finished })
}

impl EventSink for ChannelSink {
    fn send(&mut self, event: RequestEvent) -> Delivery {
        let channel = match event {
            RequestEvent::Finished { .. } => &self.finished,
            _ => &self.sender,
        };
        match channel.try_send(event) {
            Ok(()) => Delivery::Ok,
            Err(TrySendError::Full(_)) => Delivery::Full,
            Err(TrySendError::Disconnected(_)) => Delivery::Closed,
        }
    }
}

impl Iterator for Events {
    type Item = RequestEvent;

    fn next(&mut self) -> Option<RequestEvent> {
        // The sink is dropped after `Finished`, which ends the first channel.
        self.receiver.recv().or_else(|_| self.finished.recv()).ok()
    }
}

//! The stream of what changes in the prefix cache.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use engine::{EngineHandle, KvEventSink, SubscribeError};
use engine_types::{BlockKey, KvChange, KvEvent, StoredBlocks};
use grpc_api::control::v1 as pb;
use grpc_api::control::v1::subscribe_kv_events_response::Change;
use tokio::sync::broadcast;
use tokio_stream::Stream;
use tokio_stream::wrappers::BroadcastStream;
use tonic::Status;

use crate::status;

/// Most keys of a snapshot in a message, which thus stays below the 4 MiB that clients take.
const MAX_SNAPSHOT_KEYS: usize = 1 << 16;

/// The engine's end: a channel that loses its oldest event for a new one.
struct Sink(broadcast::Sender<Arc<KvEvent>>);

impl KvEventSink for Sink {
    fn send(&mut self, event: Arc<KvEvent>) {
        // It fails only if the reader has gone, which `is_closed` says.
        let _ = self.0.send(event);
    }

    fn is_closed(&self) -> bool {
        self.0.receiver_count() == 0
    }
}

/// The messages of a subscription. A reader that has missed an event is subscribed anew.
pub(crate) struct KvEventStream {
    engine: EngineHandle,
    max_buffered_events: usize,
    /// `None` once an error is out.
    events: Option<BroadcastStream<Arc<KvEvent>>>,
    /// The number of the last event that was taken.
    last_sequence: u64,
    /// What the last event has become.
    messages: VecDeque<pb::SubscribeKvEventsResponse>,
}

impl KvEventStream {
    /// Subscribes; at most `max_buffered_events` (more than 0) may wait for the reader.
    pub(crate) fn new(engine: EngineHandle, max_buffered_events: usize) -> Result<Self, Status> {
        let messages = VecDeque::new();
        let mut stream =
            Self { engine, max_buffered_events, events: None, last_sequence: 0, messages };
        stream.subscribe()?;
        Ok(stream)
    }

    /// Starts from a snapshot, whatever came before.
    fn subscribe(&mut self) -> Result<(), Status> {
        // First, so that a former subscription does not count any more.
        self.events = None;
        let (sender, receiver) = broadcast::channel(self.max_buffered_events);
        self.engine
            .subscribe_kv_events(Box::new(Sink(sender)))
            .map_err(|error| status::unsubscribed(&error))?;
        self.events = Some(BroadcastStream::new(receiver));
        Ok(())
    }

    /// Turns an event into messages; or subscribes anew, if others are missing before it.
    fn take(&mut self, event: &KvEvent) -> Result<(), Status> {
        let is_snapshot = matches!(event.change, KvChange::Snapshot { .. });
        if !is_snapshot && event.sequence != self.last_sequence + 1 {
            return self.subscribe();
        }
        self.last_sequence = event.sequence;
        let message = |change| pb::SubscribeKvEventsResponse {
            sequence: event.sequence,
            change: Some(change),
        };
        self.messages.extend(changes(&event.change).into_iter().map(message));
        Ok(())
    }
}

impl Stream for KvEventStream {
    type Item = Result<pb::SubscribeKvEventsResponse, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            if let Some(message) = self.messages.pop_front() {
                return Poll::Ready(Some(Ok(message)));
            }
            let Some(events) = &mut self.events else { return Poll::Ready(None) };
            let taken = match ready!(Pin::new(events).poll_next(cx)) {
                Some(Ok(event)) => self.take(&event),
                // The reader was too slow.
                Some(Err(_)) => self.subscribe(),
                None => Err(status::unsubscribed(&SubscribeError::Stopped)),
            };
            if let Err(status) = taken {
                self.events = None;
                return Poll::Ready(Some(Err(status)));
            }
        }
    }
}

/// The proto form of a change: several ones, if it is a large snapshot.
fn changes(change: &KvChange) -> Vec<Change> {
    match change {
        KvChange::Snapshot { keys } => snapshots(keys, MAX_SNAPSHOT_KEYS),
        KvChange::Stored(blocks) => vec![Change::Stored(stored(blocks))],
        KvChange::Removed { keys } => {
            vec![Change::Removed(pb::KvBlocksRemoved { keys: bytes(keys) })]
        }
        KvChange::Cleared => vec![Change::Cleared(pb::KvCacheCleared {})],
    }
}

fn snapshots(keys: &[BlockKey], n_keys_max: usize) -> Vec<Change> {
    let n_parts = keys.len().div_ceil(n_keys_max).max(1);
    let part = |idx: usize| {
        let start = idx * n_keys_max;
        let end = keys.len().min(start + n_keys_max);
        let has_more = end < keys.len();
        Change::Snapshot(pb::KvSnapshot { keys: bytes(&keys[start..end]), has_more })
    };
    (0..n_parts).map(part).collect()
}

fn stored(blocks: &StoredBlocks) -> pb::KvBlocksStored {
    pb::KvBlocksStored {
        parent_key: blocks.parent.0.to_vec(),
        blocks_before: blocks.n_before,
        keys: bytes(&blocks.keys),
        token_ids: blocks.tokens.clone(),
        block_size: blocks.block_size,
        lookahead: blocks.n_lookahead,
        salted: blocks.is_salted,
    }
}

fn bytes(keys: &[BlockKey]) -> Vec<Vec<u8>> {
    keys.iter().map(|key| key.0.to_vec()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_large_snapshot_comes_in_parts() {
        let keys: Vec<_> = (0..7).map(|n| BlockKey([n; 32])).collect();
        for (n_keys, parts) in
            [(0, vec![0]), (1, vec![1]), (3, vec![3]), (4, vec![3, 1]), (7, vec![3, 3, 1])]
        {
            let changes = snapshots(&keys[..n_keys], 3);
            let mut seen = vec![];
            for (idx, (change, n_keys)) in changes.iter().zip(&parts).enumerate() {
                let Change::Snapshot(part) = change else { panic!("{change:?}") };
                assert_eq!(part.keys.len(), *n_keys);
                assert_eq!(part.has_more, idx + 1 < parts.len());
                seen.extend(part.keys.clone());
            }
            assert_eq!(changes.len(), parts.len());
            assert_eq!(seen, bytes(&keys[..n_keys]));
        }
    }
}

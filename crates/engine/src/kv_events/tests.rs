//! Subscribers of the prefix cache's events. A request has the prompt `[1, 2]`; a block has 4
//! tokens, and the last token of a request has no KV.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;

use engine_types::{BlockKey, FinishReason, KvChange, KvEvent, OutputMode};
use scheduler::SchedulerConfig;

use super::{KvEvents, MAX_SUBSCRIBERS, kv_event_channel};
use crate::tests::{ENDLESS, FAIL_FOR_GOOD, PANIC, read, start, start_with, submit, wait_until};
use crate::{EngineHandle, SubscribeError};

fn subscribe(handle: &EngineHandle, capacity: usize) -> KvEvents {
    let (sink, events) = kv_event_channel(capacity);
    handle.subscribe_kv_events(Box::new(sink)).unwrap();
    events
}

fn refusal(handle: &EngineHandle) -> SubscribeError {
    handle.subscribe_kv_events(Box::new(kv_event_channel(1).0)).unwrap_err()
}

/// Runs a request to its end.
fn run(handle: &EngineHandle, max_tokens: u32) {
    assert_eq!(read(submit(handle, max_tokens).1).1, FinishReason::MaxTokens);
}

/// What a snapshot holds, and its number.
fn snapshot(event: &KvEvent) -> (u64, BTreeSet<BlockKey>) {
    let KvChange::Snapshot { keys } = &event.change else { panic!("{event:?}") };
    (event.sequence, keys.iter().copied().collect())
}

/// The keys of the one block that an event stores, and its number.
fn stored(event: &KvEvent) -> (u64, BlockKey) {
    let KvChange::Stored(blocks) = &event.change else { panic!("{event:?}") };
    assert_eq!((blocks.keys.len(), blocks.block_size), (1, 4));
    (event.sequence, blocks.keys[0])
}

#[test]
fn a_subscriber_starts_from_a_snapshot_and_sees_each_change() {
    let (handle, thread, _) = start(8, OutputMode::Immediate);
    // An idle engine greets, too.
    let mut first = subscribe(&handle, 64);
    assert_eq!(snapshot(&first.next().unwrap()), (0, BTreeSet::new()));
    run(&handle, 8);
    let events: Vec<_> = first.by_ref().take(2).collect();
    let keys: Vec<_> = events.iter().map(|event| stored(event).1).collect();
    let KvChange::Stored(second_block) = &events[1].change else { unreachable!() };
    assert_eq!((second_block.parent, second_block.n_before), (keys[0], 1));
    assert_eq!(second_block.tokens, [5, 6, 7, 8]);
    assert_eq!(events.iter().map(|event| event.sequence).collect::<Vec<_>>(), [1, 2]);

    let mut second = subscribe(&handle, 64);
    let (sequence, held) = snapshot(&second.next().unwrap());
    assert_eq!((sequence, held), (2, keys.into_iter().collect()));
    // The first two blocks of the same request are known already.
    run(&handle, 12);
    for events in [&mut first, &mut second] {
        assert_eq!(stored(&events.next().unwrap()).0, 3);
    }
    handle.clear_prefix_cache();
    for events in [&mut first, &mut second] {
        let event = events.next().unwrap();
        assert_eq!((event.sequence, &event.change), (4, &KvChange::Cleared));
    }
    wait_until(|| handle.stats().scheduler.blocks.n_cached == 0);
    run(&handle, 4);
    thread.drain();
    // The last step's event comes, too; then the stream ends.
    for events in [first, second] {
        assert_eq!(events.map(|event| stored(&event).0).collect::<Vec<_>>(), [5]);
    }
}

#[test]
fn a_slow_subscriber_sees_a_gap_and_delays_nobody() {
    let (handle, thread, _) = start(8, OutputMode::Immediate);
    let (slow, fast) = (subscribe(&handle, 2), subscribe(&handle, 64));
    run(&handle, 12);
    run(&handle, 20);
    thread.drain();
    let numbers = |events: KvEvents| events.map(|event| event.sequence).collect::<Vec<_>>();
    assert_eq!(numbers(fast), [0, 1, 2, 3, 4, 5]);
    assert_eq!(numbers(slow), [0, 1]);
}

#[test]
fn who_has_gone_is_forgotten_and_nothing_is_recorded_for_nobody() {
    let (handle, _thread, _) = start(8, OutputMode::Immediate);
    let mut events = subscribe(&handle, 64);
    run(&handle, 8);
    let last = events.by_ref().take(3).last().unwrap();
    assert_eq!(last.sequence, 2);
    drop(events);
    run(&handle, 12);
    run(&handle, 16);
    // What was stored meanwhile is known, though it has no number.
    let (sequence, held) = snapshot(&subscribe(&handle, 64).next().unwrap());
    assert_eq!(held.len(), 4);
    assert!(sequence <= 3, "at most the step in which the reader's going was seen: {sequence}");
}

#[test]
fn there_are_only_so_many_subscribers() {
    let (handle, _thread, _) = start(8, OutputMode::Immediate);
    let mut all: Vec<_> = (0..MAX_SUBSCRIBERS).map(|_| subscribe(&handle, 1)).collect();
    assert_eq!(refusal(&handle), SubscribeError::TooMany { limit: MAX_SUBSCRIBERS });
    // Room is there as soon as one has gone, though the engine has nothing to do.
    all.pop();
    all.push(subscribe(&handle, 1));
    for mut events in all {
        assert_eq!(snapshot(&events.next().unwrap()).0, 0);
    }
}

#[test]
fn an_engine_that_ends_ends_its_subscriptions() {
    for how in [FAIL_FOR_GOOD, PANIC] {
        let (handle, _thread, fault) = start(8, OutputMode::Immediate);
        let events = subscribe(&handle, 64);
        let (_, tokens) = submit(&handle, ENDLESS);
        wait_until(|| handle.stats().n_steps > 8);
        fault.store(how, Ordering::SeqCst);
        assert!(matches!(read(tokens).1, FinishReason::Failed(_)));
        assert!(events.count() >= 2);
        assert_eq!(refusal(&handle), SubscribeError::Stopped);
    }
}

#[test]
fn without_a_prefix_cache_there_is_nothing_to_subscribe_to() {
    let config = SchedulerConfig { enable_prefix_caching: false, ..SchedulerConfig::default() };
    let (handle, _thread, _) = start_with(config);
    assert_eq!(refusal(&handle), SubscribeError::NoPrefixCache);
    handle.clear_prefix_cache();
    run(&handle, 4);
}

//! Events of the prefix cache, and emptying it. Blocks of 4 tokens.

use engine_types::{BlockKey, KvChange, KvEvent, StoredBlocks};

use super::prefix::{DRAFTED, Holder, PLAIN, n_hits, run};
use crate::{BlockPool, BlockTable, PrefixKeys, PrefixSpace};

/// A pool of 8 blocks that records.
fn recording() -> BlockPool {
    let mut pool = BlockPool::with_prefix_cache(8, 4);
    pool.record_events(64);
    pool
}

fn drain(pool: &mut BlockPool) -> Vec<KvEvent> {
    let mut events = vec![];
    pool.drain_events(&mut events);
    events
}

/// The changes since the last call, which are numbered from `first` on.
fn changes(pool: &mut BlockPool, first: u64) -> Vec<KvChange> {
    let events = drain(pool);
    for (sequence, event) in (first..).zip(&events) {
        assert_eq!(event.sequence, sequence);
    }
    events.into_iter().map(|event| event.change).collect()
}

/// The keys of the first `n_blocks` blocks, as a reader computes them.
fn keys_of(space: PrefixSpace<'_>, tokens: &[u32], n_blocks: u32) -> Vec<BlockKey> {
    PrefixKeys::new(space).of(tokens, 4, n_blocks, &mut vec![]).to_vec()
}

fn root(space: PrefixSpace<'_>) -> BlockKey {
    PrefixKeys::new(space).parent(0)
}

fn held_by_snapshot(pool: &BlockPool) -> Vec<BlockKey> {
    let KvChange::Snapshot { mut keys } = pool.snapshot().change else { unreachable!() };
    keys.sort_unstable();
    keys
}

#[test]
fn new_blocks_of_a_publication_are_one_event() {
    let mut pool = recording();
    let a: Vec<_> = (1..=9).collect();
    let keys = keys_of(PLAIN, &a, 2);
    run(&mut pool, PLAIN, &a);
    let stored = StoredBlocks {
        parent: root(PLAIN),
        n_before: 0,
        keys: keys.clone(),
        tokens: a[..8].to_vec(),
        block_size: 4,
        n_lookahead: 0,
        is_salted: false,
    };
    assert_eq!(changes(&mut pool, 1), [KvChange::Stored(stored.clone())]);
    // Fetched is gone, and a sequence that finds all its blocks stores none.
    assert!(drain(&mut pool).is_empty());
    run(&mut pool, PLAIN, &a);
    assert!(drain(&mut pool).is_empty());

    // One that finds two of three stores the third.
    let b: Vec<_> = (1..=13).collect();
    run(&mut pool, PLAIN, &b);
    let stored = StoredBlocks {
        parent: keys[1],
        n_before: 2,
        keys: keys_of(PLAIN, &b, 3)[2..].to_vec(),
        tokens: b[8..12].to_vec(),
        ..stored
    };
    assert_eq!(changes(&mut pool, 2), [KvChange::Stored(stored)]);
    assert_eq!(held_by_snapshot(&pool).len(), 3);
}

#[test]
fn a_stored_block_names_its_successors_and_its_space() {
    let mut pool = recording();
    let salted = PrefixSpace { salt: Some(b"a"), n_lookahead: 2, ..DRAFTED };
    let tokens: Vec<_> = (1..=10).collect();
    run(&mut pool, salted, &tokens);
    let events = changes(&mut pool, 1);
    let [KvChange::Stored(stored)] = &events[..] else { panic!("{events:?}") };
    assert_eq!((stored.n_lookahead, stored.is_salted), (2, true));
    assert_eq!((&stored.tokens, stored.keys.len()), (&tokens, 2));
    assert_ne!(stored.parent, root(DRAFTED));
    assert_eq!(stored.parent, root(salted));
}

/// What a reader needs to know to compute keys; routers depend on it.
#[test]
fn keys_are_hashes_of_what_the_documentation_says() {
    use sha2::{Digest, Sha256};
    let tokens = [1_u32, 2, 3, 4, 70_000, 6, 7, 8, 9];
    let mut parent: [u8; 32] =
        Sha256::digest(b"kv prefix space 1\x01\x01\x01\x00\x00\x00pepper").into();
    let keys = keys_of(PrefixSpace { salt: Some(b"pepper"), ..DRAFTED }, &tokens, 2);
    for (key, tokens) in keys.iter().zip([&tokens[..5], &tokens[4..]]) {
        let bytes = tokens.iter().flat_map(|token| token.to_le_bytes());
        parent = Sha256::digest(parent.into_iter().chain(bytes).collect::<Vec<_>>()).into();
        assert_eq!(key.0, parent);
    }
}

#[test]
fn evicted_blocks_are_removed_tail_first_and_using_one_again_is_no_event() {
    let mut pool = recording();
    let tokens: Vec<_> = (1..=17).collect();
    let keys = keys_of(PLAIN, &tokens, 4);
    run(&mut pool, PLAIN, &tokens);
    drain(&mut pool);
    let mut table = BlockTable::default();
    // Four free blocks, then three cached ones.
    assert!(pool.ensure_capacity(&mut table, 16));
    assert!(drain(&mut pool).is_empty());
    assert!(pool.ensure_capacity(&mut table, 28));
    let removed = KvChange::Removed { keys: vec![keys[3], keys[2], keys[1]] };
    assert_eq!(changes(&mut pool, 2), [removed]);
    // The blocks go back empty and are taken again.
    pool.release_table(&mut table);
    assert!(pool.ensure_capacity(&mut table, 28));
    assert!(drain(&mut pool).is_empty());
    assert_eq!(held_by_snapshot(&pool), [keys[0]]);
    pool.check_invariants([&table]);
}

/// A second copy in the middle parts what is new in two, so that each parent is right.
#[test]
fn a_block_that_is_known_parts_the_new_ones() {
    let mut pool = recording();
    let tokens: Vec<_> = (1..=13).collect();
    let keys = keys_of(PLAIN, &tokens, 3);
    // Both start before either publishes; the second publishes the second block alone.
    let mut first = Holder::admit(&mut pool, PLAIN, &tokens).expect("room");
    let mut second = Holder::admit(&mut pool, PLAIN, &tokens).expect("room");
    second.table.n_published = 1;
    let mut prefix_keys = PrefixKeys::new(PLAIN);
    pool.publish(&mut second.table, &mut prefix_keys, &tokens, 8);
    first.publish(&mut pool);
    let stored = |n_before: usize| {
        let parent = if n_before == 0 { root(PLAIN) } else { keys[n_before - 1] };
        KvChange::Stored(StoredBlocks {
            parent,
            n_before: n_before as u32,
            keys: vec![keys[n_before]],
            tokens: tokens[4 * n_before..4 * n_before + 4].to_vec(),
            block_size: 4,
            n_lookahead: 0,
            is_salted: false,
        })
    };
    assert_eq!(changes(&mut pool, 1), [1, 0, 2].map(stored));
    pool.check_invariants([&first.table, &second.table]);
}

#[test]
fn clearing_empties_the_index_and_takes_nothing_from_holders() {
    let mut pool = recording();
    let (held, idle): (Vec<_>, Vec<_>) = ((1..=9).collect(), (21..=29).collect());
    run(&mut pool, PLAIN, &idle);
    let mut holder = Holder::admit(&mut pool, PLAIN, &held).expect("room");
    holder.publish(&mut pool);
    drain(&mut pool);
    pool.clear_prefix_cache();
    assert_eq!(changes(&mut pool, 3), [KvChange::Cleared]);
    pool.check_invariants([&holder.table]);
    for tokens in [&held, &idle] {
        assert_eq!(n_hits(&mut pool, PLAIN, tokens), 0);
    }
    let stats = pool.stats();
    assert_eq!((stats.n_free, stats.n_cached, stats.n_used), (5, 0, 3));
    assert_eq!(stats.n_evictions, 0);

    // The holder goes on from where it is: only what it publishes from now on is known, which
    // nobody finds without what lies before it.
    let longer: Vec<_> = (1..=13).collect();
    assert!(pool.ensure_capacity(&mut holder.table, 13));
    holder.tokens.clone_from(&longer);
    holder.publish(&mut pool);
    let events = changes(&mut pool, 4);
    assert!(matches!(&events[..], [KvChange::Stored(blocks)] if blocks.n_before == 2));
    assert_eq!(n_hits(&mut pool, PLAIN, &longer), 0);
    pool.release_table(&mut holder.table);
    pool.check_invariants([]);
    // Until another one has published that.
    run(&mut pool, PLAIN, &held);
    assert_eq!(n_hits(&mut pool, PLAIN, &longer), 3);
}

#[test]
fn nobody_who_listens_costs_nothing() {
    let mut pool = BlockPool::with_prefix_cache(2, 4);
    for turn in 0..3 {
        run(&mut pool, PLAIN, &[turn; 5]);
    }
    pool.clear_prefix_cache();
    assert!(drain(&mut pool).is_empty());
    assert_eq!((pool.snapshot().sequence, pool.n_dropped_events()), (0, 0));

    // Neither does a pool without a cache, though it be asked.
    let mut pool = BlockPool::new(2, 4);
    pool.record_events(8);
    run(&mut pool, PLAIN, &[1; 5]);
    pool.clear_prefix_cache();
    assert!(drain(&mut pool).is_empty());
    assert!(held_by_snapshot(&pool).is_empty());
}

#[test]
fn the_oldest_events_are_dropped_and_leave_a_gap() {
    let mut pool = BlockPool::with_prefix_cache(16, 4);
    pool.record_events(2);
    for turn in 0..5 {
        run(&mut pool, PLAIN, &[turn; 5]);
    }
    let numbers: Vec<_> = drain(&mut pool).iter().map(|event| event.sequence).collect();
    assert_eq!((numbers, pool.n_dropped_events()), (vec![4, 5], 3));
    // A snapshot says where it stands, and the next event goes on from there.
    assert_eq!(pool.snapshot().sequence, 5);
    run(&mut pool, PLAIN, &[5; 5]);
    assert_eq!(changes(&mut pool, 6).len(), 1);

    // Stopping forgets what nobody fetched; the numbers go on.
    run(&mut pool, PLAIN, &[6; 5]);
    pool.record_events(0);
    pool.record_events(2);
    assert!(drain(&mut pool).is_empty());
    run(&mut pool, PLAIN, &[7; 5]);
    assert_eq!(changes(&mut pool, 8).len(), 1);
}

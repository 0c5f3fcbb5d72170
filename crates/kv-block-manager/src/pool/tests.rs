//! Blocks, holders and the prefix cache.

use super::*;

fn ids(table: &BlockTable) -> Vec<u32> {
    table.blocks().iter().map(|block| block.0).collect()
}

#[test]
fn blocks_for_rounds_up() {
    let table = [(0, 4, 0), (1, 4, 1), (4, 4, 1), (5, 4, 2), (3, 1, 3), (64, 64, 1)];
    for (n_tokens, block_size, expected) in table {
        assert_eq!(blocks_for(n_tokens, block_size), expected, "{n_tokens} by {block_size}");
    }
}

#[test]
fn growth_is_all_or_nothing() {
    let mut pool = BlockPool::new(6, 4);
    let (mut a, mut b) = (BlockTable::default(), BlockTable::default());
    assert!(pool.ensure_capacity(&mut a, 14));
    assert!(!pool.ensure_capacity(&mut b, 9));
    assert!(b.blocks().is_empty());
    assert!(pool.ensure_capacity(&mut a, 19));
    assert_eq!(ids(&a), [0, 1, 2, 3, 4]);
    assert!(pool.ensure_capacity(&mut b, 4));
    assert!(!pool.ensure_capacity(&mut b, 5));
    pool.check_invariants([&a, &b]);
    assert_eq!(pool.stats(), PoolStats { n_used: 6, n_total: 6, ..PoolStats::default() });
}

#[test]
fn a_pool_fills_to_the_last_block_and_gets_all_back() {
    let mut pool = BlockPool::new(10, 4);
    let mut tables: Vec<_> = (0..10).map(|_| BlockTable::default()).collect();
    for table in &mut tables {
        assert!(pool.ensure_capacity(table, 1));
    }
    assert_eq!(pool.n_available(), 0);
    assert!(!pool.ensure_capacity(&mut tables[0], 5));
    tables.iter_mut().for_each(|table| pool.release_table(table));
    pool.check_invariants(&tables);
    assert_eq!(pool.n_available(), 10);
}

#[test]
fn a_table_grows_where_a_block_ends() {
    // Block size, tokens held, tokens wanted, blocks then.
    for (block_size, n_held, n_wanted, n_blocks) in [
        (4, 14, 16, 4),
        (4, 16, 17, 5),
        (4, 14, 19, 5),
        (4, 5, 8, 2),
        (1, 2, 3, 3),
        (64, 64, 65, 2),
    ] {
        let mut pool = BlockPool::new(6, block_size);
        let mut table = BlockTable::default();
        assert!(pool.ensure_capacity(&mut table, n_held));
        assert!(pool.ensure_capacity(&mut table, n_wanted));
        assert_eq!(table.n_blocks(), n_blocks, "{n_held} to {n_wanted} by {block_size}");
    }
}

#[test]
fn capacity_at_hand_takes_nothing() {
    let mut pool = BlockPool::new(2, 4);
    let mut table = BlockTable::default();
    assert!(pool.ensure_capacity(&mut table, 8));
    assert!(pool.ensure_capacity(&mut table, 3));
    assert_eq!(ids(&table), [0, 1]);
}

/// Other engines hand out the lowest free id. Ours takes what was released last, in O(1), whose
/// slots are likeliest to be in the processor's caches.
#[test]
fn released_blocks_come_back_front_first() {
    let mut pool = BlockPool::new(4, 4);
    let (mut a, mut b) = (BlockTable::default(), BlockTable::default());
    assert!(pool.ensure_capacity(&mut a, 12));
    pool.release_table(&mut a);
    assert!(pool.ensure_capacity(&mut b, 16));
    assert_eq!(ids(&b), [0, 1, 2, 3]);
    pool.check_invariants([&a, &b]);
}

#[test]
#[should_panic(expected = "released more often than held")]
fn a_second_release_panics() {
    let mut pool = BlockPool::new(1, 4);
    let mut table = BlockTable::default();
    assert!(pool.ensure_capacity(&mut table, 1));
    let mut copy = BlockTable { blocks: table.blocks.clone(), n_published: 0 };
    pool.release_table(&mut table);
    pool.release_table(&mut copy);
}

#[test]
#[should_panic(expected = "counts equal holders")]
fn a_leaked_table_is_noticed() {
    let mut pool = BlockPool::new(2, 4);
    let mut table = BlockTable::default();
    assert!(pool.ensure_capacity(&mut table, 5));
    pool.check_invariants([]);
}

mod events;
mod fork;
mod prefix;

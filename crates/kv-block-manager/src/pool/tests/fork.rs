//! Tables that share the blocks of another. Blocks of 4 tokens.

use crate::{BlockPool, BlockTable, Fork, PrefixKeys, PrefixMatch, PrefixSpace};

fn ids(table: &BlockTable) -> Vec<u32> {
    table.blocks().iter().map(|block| block.0).collect()
}

/// A table of `pool` that holds `n_tokens` tokens.
fn table(pool: &mut BlockPool, n_tokens: u32) -> BlockTable {
    let mut table = BlockTable::default();
    assert!(pool.ensure_capacity(&mut table, n_tokens));
    table
}

/// Forks `source` and returns the new table's blocks and the copy, or `None` without room.
fn fork(
    pool: &mut BlockPool,
    source: &BlockTable,
    n_shared: u32,
    n_tokens: u32,
) -> Option<(BlockTable, Option<(u32, u32)>)> {
    let n_available = pool.n_available();
    let n_fresh = pool.n_fresh_of_fork(n_shared, n_tokens);
    let mut table = BlockTable::default();
    match pool.fork(&mut table, source, n_shared, n_tokens) {
        Fork::NoRoom => {
            assert!(n_fresh > n_available);
            assert_eq!((&table, pool.n_available()), (&BlockTable::default(), n_available));
            None
        }
        Fork::Done { copy } => {
            assert_eq!(pool.n_available(), n_available - n_fresh);
            Some((table, copy.map(|copy| (copy.from.0, copy.to.0))))
        }
    }
}

#[test]
fn whole_blocks_are_shared_and_a_part_is_copied() {
    let cases = [
        // n_shared, n_tokens, blocks, copy
        (0, 0, vec![], None),
        (0, 5, vec![3, 4], None),
        (3, 3, vec![3], Some((0, 3))),
        (4, 4, vec![0], None),
        (4, 9, vec![0, 3, 4], None),
        (5, 8, vec![0, 3], Some((1, 3))),
        (8, 9, vec![0, 1, 3], None),
        (11, 20, vec![0, 1, 3, 4, 5], Some((2, 3))),
        (12, 12, vec![0, 1, 2], None),
    ];
    for (n_shared, n_tokens, blocks, copy) in cases {
        let mut pool = BlockPool::new(8, 4);
        let mut source = table(&mut pool, 12);
        let (mut forked, said) = fork(&mut pool, &source, n_shared, n_tokens).expect("room");
        assert_eq!((ids(&forked), said), (blocks, copy), "{n_shared} of {n_tokens}");
        pool.check_invariants([&source, &forked]);
        pool.release_table(&mut source);
        pool.check_invariants([&forked]);
        pool.release_table(&mut forked);
        pool.check_invariants([]);
        assert_eq!(pool.stats().n_free, 8);
    }
}

#[test]
fn a_fork_is_all_or_nothing() {
    let mut pool = BlockPool::new(4, 4);
    let source = table(&mut pool, 10);
    // One block is left: two more do not fit, nor does a copy and a block behind it.
    assert!(fork(&mut pool, &source, 8, 13).is_none());
    assert!(fork(&mut pool, &source, 10, 13).is_none());
    pool.check_invariants([&source]);
    let (first, copy) = fork(&mut pool, &source, 10, 12).expect("room");
    assert_eq!((ids(&first), copy), (vec![0, 1, 3], Some((2, 3))));
    assert!(fork(&mut pool, &source, 10, 12).is_none());
    // Sharing whole blocks takes none.
    let (second, _) = fork(&mut pool, &first, 8, 8).expect("room");
    pool.check_invariants([&source, &first, &second]);
}

#[test]
fn what_is_published_is_known_to_the_fork() {
    let space = PrefixSpace { salt: None, drafted: true, n_lookahead: 1 };
    let mut pool = BlockPool::with_prefix_cache(12, 4);
    let mut keys = PrefixKeys::new(space);
    let prompt: Vec<_> = (1..=10).collect();
    let mut source = table(&mut pool, 12);
    for (n_settled, n_published) in [(4, 1), (8, 2)] {
        pool.publish(&mut source, &mut keys, &prompt, n_settled);
        for (n_shared, expected) in [(3, 0), (7, 1), (9, n_published)] {
            let (mut forked, _) = fork(&mut pool, &source, n_shared, 12).expect("room");
            assert_eq!(forked.n_published, expected);
            pool.release_table(&mut forked);
        }
    }

    // Source and fork go on differently; each publishes its own blocks behind the shared ones.
    let (mut forked, _) = fork(&mut pool, &source, 9, 13).expect("room");
    let tails = [[11, 12, 13], [21, 22, 23]];
    let mut found = PrefixMatch::default();
    for (table, tail) in [&mut source, &mut forked].into_iter().zip(tails) {
        let tokens = [&prompt[..], &tail].concat();
        pool.publish(table, &mut keys.clone(), &tokens, 12);
        pool.match_prefix(&mut PrefixKeys::new(space), &tokens, &mut found);
        assert_eq!(found.blocks, table.blocks()[..3]);
    }
    pool.check_invariants([&source, &forked]);
    pool.release_table(&mut source);
    pool.release_table(&mut forked);
    pool.check_invariants([]);
    assert_eq!(pool.stats().n_cached, 4);
}

/// What the source shares before it is published becomes known once, whoever publishes it first.
#[test]
fn shared_blocks_are_published_once() {
    let space = PrefixSpace::default();
    let mut pool = BlockPool::with_prefix_cache(8, 4);
    let tokens: Vec<_> = (1..=9).collect();
    let mut source = table(&mut pool, 9);
    let (mut forked, _) = fork(&mut pool, &source, 8, 9).expect("room");
    assert_eq!(forked.n_published, 0);
    for table in [&mut forked, &mut source] {
        pool.publish(table, &mut PrefixKeys::new(space), &tokens, 8);
        assert_eq!(table.n_published, 2);
    }
    pool.check_invariants([&source, &forked]);
    pool.release_table(&mut source);
    assert_eq!(pool.stats().n_cached, 0, "the fork holds them");
    pool.release_table(&mut forked);
    assert_eq!(pool.stats().n_cached, 2);
    pool.check_invariants([]);
}

#[test]
#[should_panic(expected = "only an empty table is forked")]
fn a_table_in_use_is_not_forked() {
    let mut pool = BlockPool::new(4, 4);
    let (source, mut busy) = (table(&mut pool, 4), table(&mut pool, 4));
    let _ = pool.fork(&mut busy, &source, 4, 4);
}

#[test]
#[should_panic(expected = "what is shared has blocks")]
fn more_than_the_source_holds_is_not_shared() {
    let mut pool = BlockPool::new(4, 4);
    let source = table(&mut pool, 4);
    let _ = pool.fork(&mut BlockTable::default(), &source, 5, 8);
}

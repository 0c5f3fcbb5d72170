//! The prefix cache. Blocks of 4 tokens; each sequence is drafted for by `n_lookahead` layers.

use crate::{BlockPool, BlockTable, PrefixKeys, PrefixMatch, PrefixSpace};

pub(super) const PLAIN: PrefixSpace = PrefixSpace { salt: None, drafted: false, n_lookahead: 0 };
pub(super) const DRAFTED: PrefixSpace = PrefixSpace { salt: None, drafted: true, n_lookahead: 1 };

/// A sequence with blocks.
pub(super) struct Holder {
    pub(super) tokens: Vec<u32>,
    keys: PrefixKeys,
    pub(super) table: BlockTable,
    n_hits: u32,
}

impl Holder {
    /// Takes blocks for all `tokens`, those in the cache included; `None` if there is no room.
    pub(super) fn admit(
        pool: &mut BlockPool,
        space: PrefixSpace<'_>,
        tokens: &[u32],
    ) -> Option<Self> {
        let (mut table, mut keys) = (BlockTable::default(), PrefixKeys::new(space));
        let mut found = PrefixMatch::default();
        pool.match_prefix(&mut keys, tokens, &mut found);
        let has_room = pool.admit(&mut table, &found, tokens.len() as u32);
        let tokens = tokens.to_vec();
        has_room.then(|| Self { tokens, keys, table, n_hits: found.n_blocks() })
    }

    /// Publishes what is settled once all tokens but the last have KV.
    pub(super) fn publish(&mut self, pool: &mut BlockPool) {
        let n_behind = self.keys.n_lookahead().max(1);
        let n_settled = (self.tokens.len() as u32).saturating_sub(n_behind);
        pool.publish(&mut self.table, &mut self.keys, &self.tokens, n_settled);
    }

    fn ids(&self) -> Vec<u32> {
        self.table.blocks().iter().map(|block| block.0).collect()
    }
}

/// Runs a sequence from start to end and returns how many blocks it found.
pub(super) fn run(pool: &mut BlockPool, space: PrefixSpace<'_>, tokens: &[u32]) -> u32 {
    let mut holder = Holder::admit(pool, space, tokens).expect("room");
    holder.publish(pool);
    pool.check_invariants([&holder.table]);
    pool.release_table(&mut holder.table);
    pool.check_invariants([]);
    holder.n_hits
}

/// How many blocks of `tokens` the cache has; nothing changes.
pub(super) fn n_hits(pool: &mut BlockPool, space: PrefixSpace<'_>, tokens: &[u32]) -> u32 {
    let mut found = PrefixMatch::default();
    pool.match_prefix(&mut PrefixKeys::new(space), tokens, &mut found);
    found.n_blocks()
}

fn counts(pool: &BlockPool) -> (u32, u32, u32) {
    let stats = pool.stats();
    assert_eq!(stats.n_free + stats.n_cached + stats.n_used, stats.n_total);
    (stats.n_free, stats.n_cached, stats.n_used)
}

#[test]
fn the_last_token_is_never_served() {
    let mut pool = BlockPool::with_prefix_cache(10, 4);
    let tokens: Vec<_> = (1..=9).collect();
    assert_eq!(run(&mut pool, PLAIN, &tokens), 0);
    for (n_tokens, expected) in [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2)] {
        assert_eq!(n_hits(&mut pool, PLAIN, &tokens[..n_tokens]), expected, "{n_tokens} tokens");
    }
}

#[test]
fn without_a_cache_nothing_is_kept() {
    let mut pool = BlockPool::new(10, 4);
    for _ in 0..2 {
        assert_eq!(run(&mut pool, PLAIN, &[1; 9]), 0);
        assert_eq!(counts(&pool), (10, 0, 0));
    }
}

#[test]
fn l11_a_key_holds_the_parent_and_the_tokens() {
    let mut pool = BlockPool::with_prefix_cache(20, 4);
    run(&mut pool, PLAIN, &[1, 2, 3, 4, 5, 6, 7, 8, 0]);
    assert_eq!(run(&mut pool, PLAIN, &[9, 9, 9, 9, 5, 6, 7, 8, 0]), 0);
    assert_eq!(run(&mut pool, PLAIN, &[1, 2, 3, 4, 5, 6, 7, 9, 0]), 1);
    // A second block is not found as a first one.
    assert_eq!(run(&mut pool, PLAIN, &[5, 6, 7, 8, 0]), 0);
    assert_eq!(run(&mut pool, PLAIN, &[1, 2, 3, 4, 5, 6, 7, 8, 0]), 2);
}

#[test]
fn salts_and_drafting_part_sequences() {
    let tokens = [1, 2, 3, 4, 5];
    let salted = |salt| PrefixSpace { salt: Some(salt), ..PLAIN };
    let spaces = [
        PLAIN,
        salted(b""),
        salted(b"a"),
        salted(b"b"),
        PrefixSpace { salt: Some(b"a"), ..DRAFTED },
        DRAFTED,
        // A drafter that does not look ahead still writes KV of its own.
        PrefixSpace { n_lookahead: 0, ..DRAFTED },
    ];
    let mut pool = BlockPool::with_prefix_cache(20, 4);
    for n_blocks in [0, 1] {
        for space in spaces {
            assert_eq!(run(&mut pool, space, &tokens), n_blocks, "{space:?}");
        }
    }
}

#[test]
fn l13_a_block_is_keyed_by_its_successors() {
    let a = [1, 2, 3, 4, 5, 6, 7, 8, 20];
    let b = [1, 2, 3, 4, 5, 6, 7, 8, 30];
    let mut pool = BlockPool::with_prefix_cache(20, 4);
    run(&mut pool, DRAFTED, &a);
    assert_eq!(run(&mut pool, DRAFTED, &b), 1);
    assert_eq!((run(&mut pool, DRAFTED, &a), run(&mut pool, DRAFTED, &b)), (2, 2));

    // With two draft layers two successors count, and both must be there.
    let two = PrefixSpace { n_lookahead: 2, ..DRAFTED };
    let long = [&a[..], &[21]].concat();
    run(&mut pool, two, &long);
    assert_eq!(n_hits(&mut pool, two, &long), 2);
    assert_eq!(n_hits(&mut pool, two, &a), 1);
    assert_eq!(n_hits(&mut pool, two, &[&a[..], &[22]].concat()), 1);
}

#[test]
fn hits_in_use_are_free_and_idle_ones_are_not() {
    let mut pool = BlockPool::with_prefix_cache(4, 4);
    let tokens: Vec<_> = (1..=12).collect();
    let mut first = Holder::admit(&mut pool, PLAIN, &tokens).expect("room");
    first.publish(&mut pool);
    // Two of three blocks are shared, the third is the last free one.
    let mut second = Holder::admit(&mut pool, PLAIN, &tokens).expect("room");
    assert_eq!((first.ids(), second.ids()), (vec![0, 1, 2], vec![0, 1, 3]));
    assert_eq!(counts(&pool), (0, 0, 4));
    pool.check_invariants([&first.table, &second.table]);
    pool.release_table(&mut first.table);
    assert_eq!(counts(&pool), (1, 0, 3));
    pool.release_table(&mut second.table);
    assert_eq!(counts(&pool), (2, 2, 0));

    // Now the hits are idle: with another table in the free blocks, a fourth block is missing.
    let mut other = BlockTable::default();
    assert!(pool.ensure_capacity(&mut other, 8));
    assert!(Holder::admit(&mut pool, PLAIN, &tokens).is_none());
    assert_eq!(counts(&pool), (0, 2, 2));
    pool.check_invariants([&other]);
}

#[test]
fn free_blocks_go_first_and_the_tail_before_the_prefix() {
    let mut pool = BlockPool::with_prefix_cache(6, 4);
    let tokens: Vec<_> = (1..=17).collect();
    run(&mut pool, PLAIN, &tokens);
    assert_eq!(counts(&pool), (2, 4, 0));
    let mut table = BlockTable::default();
    // The fifth block was freed before the sixth was ever used; then the cached ones go.
    for (n_blocks, last, n_hits_left) in
        [(1, 4, 4), (2, 5, 4), (3, 3, 3), (4, 2, 2), (5, 1, 1), (6, 0, 0)]
    {
        assert!(pool.ensure_capacity(&mut table, 4 * n_blocks));
        assert_eq!(table.blocks().last().map(|block| block.0), Some(last));
        assert_eq!(n_hits(&mut pool, PLAIN, &tokens), n_hits_left);
        pool.check_invariants([&table]);
    }
    assert_eq!(pool.stats().n_evictions, 4);
    assert!(!pool.ensure_capacity(&mut table, 25));
}

#[test]
fn the_least_recently_used_is_evicted() {
    let mut pool = BlockPool::with_prefix_cache(3, 4);
    let prompts = [[10; 4], [20; 4], [30; 4]].map(|block| [&block[..], &[1]].concat());
    // One block each: the token behind it is not in the table yet.
    let mut run_one = |prompt: &[u32]| {
        let (mut table, mut keys) = (BlockTable::default(), PrefixKeys::new(PLAIN));
        let mut found = PrefixMatch::default();
        pool.match_prefix(&mut keys, prompt, &mut found);
        assert!(pool.admit(&mut table, &found, 4));
        pool.publish(&mut table, &mut keys, prompt, 4);
        let block = table.blocks()[0].0;
        pool.release_table(&mut table);
        block
    };
    assert_eq!([0, 1, 2].map(|idx| run_one(&prompts[idx])), [0, 1, 2]);
    // Using the first again makes it the last to go.
    assert_eq!(run_one(&prompts[0]), 0);
    assert_eq!([40, 50, 60].map(|token| run_one(&[token; 5])), [1, 2, 0]);
}

/// Other engines let the last copy win. Ours keeps the first, which tables may hold already, so
/// that more of them share one block.
#[test]
fn a_doubled_block_is_not_known_twice() {
    let mut pool = BlockPool::with_prefix_cache(8, 4);
    let tokens: Vec<_> = (1..=9).collect();
    // Both start before either has published anything.
    let mut holders = [0, 1].map(|_| Holder::admit(&mut pool, PLAIN, &tokens).expect("room"));
    for holder in &mut holders {
        holder.publish(&mut pool);
    }
    let third = Holder::admit(&mut pool, PLAIN, &tokens).expect("room");
    assert_eq!(third.ids()[..2], [0, 1]);
    let mut tables = holders.map(|holder| holder.table);
    pool.check_invariants(tables.iter().chain([&third.table]));
    // The second copy is nobody's prefix: it is free at once.
    pool.release_table(&mut tables[1]);
    assert_eq!(counts(&pool), (4, 0, 4));
    pool.release_table(&mut tables[0]);
    assert_eq!(counts(&pool), (5, 0, 3));
}

#[test]
fn churn_forgets_what_it_evicts() {
    let mut pool = BlockPool::with_prefix_cache(4, 4);
    for turn in 0..20 {
        let tokens = [turn; 9];
        assert_eq!(run(&mut pool, PLAIN, &tokens), 0);
        assert_eq!(n_hits(&mut pool, PLAIN, &tokens), 2);
        if turn > 1 {
            assert_eq!(n_hits(&mut pool, PLAIN, &[turn - 2; 9]), 0, "evicted");
        }
        let stats = pool.stats();
        assert!(stats.n_cached <= 4 && stats.n_used == 0);
    }
}

#[test]
fn publishing_goes_on_where_it_stopped() {
    let mut pool = BlockPool::with_prefix_cache(8, 4);
    let tokens: Vec<_> = (1..=20).collect();
    let mut holder = Holder::admit(&mut pool, PLAIN, &tokens).expect("room");
    for (n_settled, n_blocks) in [(0, 0), (3, 0), (4, 1), (5, 1), (12, 3), (10, 3), (19, 4)] {
        pool.publish(&mut holder.table, &mut holder.keys, &tokens, n_settled);
        assert_eq!(n_hits(&mut pool, PLAIN, &tokens), n_blocks, "{n_settled} settled");
    }
    // Blocks that were lost are found again, with the same keys, and published anew from the start.
    pool.release_table(&mut holder.table);
    assert_eq!(holder.table.n_published, 0);
    let mut found = PrefixMatch::default();
    pool.match_prefix(&mut holder.keys, &tokens, &mut found);
    assert_eq!((found.n_blocks(), found.n_idle()), (4, 4));
}

#[test]
#[should_panic(expected = "only an empty table gets a prefix")]
fn a_table_in_use_gets_no_prefix() {
    let mut pool = BlockPool::with_prefix_cache(8, 4);
    let mut table = BlockTable::default();
    assert!(pool.ensure_capacity(&mut table, 1));
    let _ = pool.admit(&mut table, &PrefixMatch::default(), 4);
}

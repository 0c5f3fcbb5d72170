//! What the prefix cache costs: keys and look-ups of a prompt of 10,000 tokens, in blocks of 16.
//!
//! The question is how long a step's plan waits for a request that starts (`first`: its keys are
//! computed), and for one at the head of the queue that has no room yet (`again`: its keys are
//! known); and what a block costs that becomes full (`publish`).

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group, criterion_main};
use kv_block_manager::{BlockPool, BlockTable, PrefixKeys, PrefixMatch, PrefixSpace};

const SPACE: PrefixSpace = PrefixSpace { salt: None, drafted: true, n_lookahead: 1 };
const N_TOKENS: u32 = 10_000;

fn prefix(criterion: &mut Criterion) {
    let tokens: Vec<_> = (0..N_TOKENS).collect();
    let mut pool = BlockPool::with_prefix_cache(100_000, 16);
    let (mut table, mut keys) = (BlockTable::default(), PrefixKeys::new(SPACE));
    assert!(pool.ensure_capacity(&mut table, N_TOKENS));
    pool.publish(&mut table, &mut keys, &tokens, N_TOKENS - 1);
    let mut found = PrefixMatch::default();

    criterion.bench_function("match 624 blocks, first", |bencher| {
        bencher.iter(|| {
            pool.match_prefix(&mut PrefixKeys::new(SPACE), &tokens, &mut found);
            assert_eq!(black_box(&found).n_blocks(), 624);
        });
    });
    criterion.bench_function("match 624 blocks, again", |bencher| {
        bencher.iter(|| {
            pool.match_prefix(&mut keys, &tokens, &mut found);
            assert_eq!(black_box(&found).n_blocks(), 624);
        });
    });
    criterion.bench_function("publish a block", |bencher| {
        bencher.iter_custom(|n_iterations| {
            let (mut total, mut n_done) = (Duration::ZERO, 0);
            while n_done < n_iterations {
                // A sequence like no other, so that its blocks are new; the cache is full of them.
                let tokens: Vec<_> = tokens.iter().map(|n| n + n_done as u32).collect();
                let (mut table, mut keys) = (BlockTable::default(), PrefixKeys::new(SPACE));
                assert!(pool.ensure_capacity(&mut table, N_TOKENS));
                let n_blocks = (n_iterations - n_done).min(624);
                let start = Instant::now();
                for n_full in 1..=n_blocks as u32 {
                    pool.publish(&mut table, &mut keys, &tokens, 16 * n_full);
                }
                total += start.elapsed();
                n_done += n_blocks;
                pool.release_table(&mut table);
            }
            total
        });
    });
}

criterion_group!(benches, prefix);
criterion_main!(benches);

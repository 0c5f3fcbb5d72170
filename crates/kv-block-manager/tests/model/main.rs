//! Random operations on a pool and on a plain model of it, side by side.
//!
//! After each one the pool hands out the very blocks that the model does, so that the order of
//! eviction is right; its counts and its events agree with the model; and each sequence reads, in
//! the model's slots, what it has written or found. `PROPTEST_CASES` sets the number of runs and
//! `PROPTEST_RNG_SEED` their seed.

mod reference;
mod replay;

use engine_types::BlockCopy;
use kv_block_manager::{BlockPool, BlockTable, Fork, PoolStats, PrefixKeys, PrefixMatch};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{Config, RngSeed};

use crate::reference::{Reference, SPACES, Sequence};
use crate::replay::Replay;

/// An operation. Numbers are taken modulo what there is to choose from.
#[derive(Clone, Debug)]
enum Op {
    /// Starts a sequence with `n_like` tokens of an earlier one and then its own, with room for
    /// `n_extra` more.
    Admit {
        space: usize,
        like: usize,
        n_like: usize,
        tail: Vec<u32>,
        n_extra: usize,
    },
    /// Starts a sequence that shares the first `n_shared` computed tokens of another.
    Fork {
        who: usize,
        n_shared: usize,
        tail: Vec<u32>,
        n_extra: usize,
    },
    /// Appends tokens, if there is room for them and `n_extra` more.
    Grow {
        who: usize,
        tail: Vec<u32>,
        n_extra: usize,
    },
    /// Writes the KV of `n` more tokens, and garbage behind them.
    Compute {
        who: usize,
        n: usize,
    },
    /// Publishes what is computed, up to `n` tokens less.
    Publish {
        who: usize,
        n: usize,
    },
    Release {
        who: usize,
    },
    /// Takes a sequence's blocks and lets it start again with room for `n_extra` more tokens.
    Preempt {
        who: usize,
        n_extra: usize,
    },
    Clear,
}

fn op() -> impl Strategy<Value = Op> {
    let (who, extra, start) = (0..64_usize, 0..5_usize, 0..40_usize);
    let tail = || vec(0..2_u32, 0..8);
    let space = prop_oneof![2 => Just(1), 1 => 0..SPACES.len()];
    prop_oneof![
        6 => (space, who.clone(), start.clone(), tail(), extra.clone()).prop_map(
            |(space, like, n_like, tail, n_extra)| Op::Admit { space, like, n_like, tail, n_extra }
        ),
        3 => (who.clone(), start.clone(), tail(), extra.clone())
            .prop_map(|(who, n_shared, tail, n_extra)| Op::Fork { who, n_shared, tail, n_extra }),
        3 => (who.clone(), tail(), extra.clone())
            .prop_map(|(who, tail, n_extra)| Op::Grow { who, tail, n_extra }),
        10 => (who.clone(), start).prop_map(|(who, n)| Op::Compute { who, n }),
        10 => (who.clone(), prop_oneof![Just(0), 0..9_usize])
            .prop_map(|(who, n)| Op::Publish { who, n }),
        5 => who.clone().prop_map(|who| Op::Release { who }),
        2 => (who, extra).prop_map(|(who, n_extra)| Op::Preempt { who, n_extra }),
        1 => Just(Op::Clear),
    ]
}

/// A pool and its model.
struct Pair {
    pool: BlockPool,
    /// In the order of the model's sequences.
    tables: Vec<(BlockTable, PrefixKeys)>,
    model: Reference,
    replay: Replay,
    /// The tokens of all sequences so far.
    history: Vec<Vec<u32>>,
}

impl Pair {
    fn new(n_blocks: u32, block_size: u32) -> Self {
        let mut pool = BlockPool::with_prefix_cache(n_blocks, block_size);
        pool.record_events(1 << 10);
        Self {
            pool,
            tables: vec![],
            model: Reference::new(n_blocks, block_size as usize),
            replay: Replay::default(),
            history: vec![vec![]],
        }
    }

    fn run(&mut self, op: Op) {
        let n_sequences = self.model.sequences.len();
        let space = match op {
            Op::Admit { space, like, n_like, tail, n_extra } => {
                let recent = &self.history[self.history.len().saturating_sub(5)..];
                let like = &recent[like % recent.len()];
                let mut tokens = [&like[..n_like.min(like.len())], &tail].concat();
                // Else few would find room.
                tokens.truncate(self.model.n_slots() / 3 + 1);
                self.history.push(tokens.clone());
                let keys = PrefixKeys::new(SPACES[space]);
                self.admit(Sequence::new(space, tokens), BlockTable::default(), keys, n_extra);
                space
            }
            Op::Clear => {
                self.pool.clear_prefix_cache();
                self.model.clear();
                0
            }
            // The others need a sequence.
            _ if n_sequences == 0 => 0,
            Op::Fork { who, n_shared, tail, n_extra } => {
                self.fork(who % n_sequences, n_shared, &tail, n_extra)
            }
            Op::Grow { who, tail, n_extra } => self.grow(who % n_sequences, &tail, n_extra),
            Op::Compute { who, n } => self.compute(who % n_sequences, n),
            Op::Publish { who, n } => self.publish(who % n_sequences, n),
            Op::Release { who } => self.release(who % n_sequences).0.space,
            Op::Preempt { who, n_extra } => {
                let (old, table, keys) = self.release(who % n_sequences);
                let space = old.space;
                self.admit(Sequence::new(space, old.tokens), table, keys, n_extra);
                space
            }
        };
        self.check(space);
    }

    /// Starts a sequence with an empty table; without room it is forgotten.
    fn admit(
        &mut self,
        sequence: Sequence,
        mut table: BlockTable,
        mut keys: PrefixKeys,
        n_extra: usize,
    ) {
        let mut found = PrefixMatch::default();
        self.pool.match_prefix(&mut keys, &sequence.tokens, &mut found);
        let expected = self.model.find(&sequence);
        let n_idle = expected.iter().filter(|block| self.model.n_holders(**block) == 0).count();
        assert_eq!((found.n_blocks(), found.n_idle()), (to_u32(expected.len()), to_u32(n_idle)));

        let n_tokens = sequence.tokens.len() + n_extra;
        let has_room = self.pool.admit(&mut table, &found, to_u32(n_tokens));
        assert_eq!(has_room, self.model.admit(sequence, n_tokens));
        if has_room {
            self.tables.push((table, keys));
        } else {
            assert!(table.blocks().is_empty());
        }
    }

    fn fork(&mut self, who: usize, n_shared: usize, tail: &[u32], n_extra: usize) -> usize {
        let source = &self.model.sequences[who];
        let n_shared = n_shared % (source.n_computed + 1);
        // The look-ahead is shared; where none is settled, nothing is.
        let n_alike = (n_shared + source.n_lookahead()).min(source.tokens.len());
        let space = source.space;
        let tokens = [&source.tokens[..n_alike], tail].concat();
        let n_tokens = tokens.len() + n_extra;
        let mut table = BlockTable::default();
        let (shared, held) = (to_u32(n_shared), to_u32(n_tokens));
        let n_fresh = self.pool.n_fresh_of_fork(shared, held);
        let n_available = self.pool.n_available();
        let fork = self.pool.fork(&mut table, &self.tables[who].0, shared, held);

        self.history.push(tokens.clone());
        let expected = self.model.fork(who, Sequence::new(space, tokens), n_shared, n_tokens);
        match (fork, expected) {
            (Fork::NoRoom, None) => {
                assert!(table.blocks().is_empty() && n_fresh > n_available);
            }
            (Fork::Done { copy }, Some(expected)) => {
                assert_eq!(copy.map(|BlockCopy { from, to }| (from.0, to.0)), expected);
                assert_eq!(self.pool.n_available(), n_available - n_fresh);
                self.tables.push((table, PrefixKeys::new(SPACES[space])));
            }
            different => panic!("{different:?}"),
        }
        space
    }

    fn grow(&mut self, who: usize, tail: &[u32], n_extra: usize) -> usize {
        let n_tokens = self.model.sequences[who].tokens.len() + tail.len() + n_extra;
        let has_room = self.pool.ensure_capacity(&mut self.tables[who].0, to_u32(n_tokens));
        assert_eq!(has_room, self.model.grow(who, n_tokens));
        let sequence = &mut self.model.sequences[who];
        if has_room {
            sequence.tokens.extend(tail);
            self.history.push(sequence.tokens.clone());
        }
        sequence.space
    }

    fn compute(&mut self, who: usize, n: usize) -> usize {
        let sequence = &self.model.sequences[who];
        let n_slots = sequence.blocks.len() * self.model.block_size;
        let n_final = sequence.tokens.len().saturating_sub(sequence.n_lookahead());
        let n_computed = (sequence.n_computed + n).min(n_slots).min(n_final);
        let space = sequence.space;
        let n_computed = n_computed.max(sequence.n_computed);
        self.model.compute(who, n_computed);
        space
    }

    fn publish(&mut self, who: usize, n: usize) -> usize {
        let sequence = &self.model.sequences[who];
        let n_settled = sequence.n_computed.saturating_sub(n);
        let (table, keys) = &mut self.tables[who];
        self.pool.publish(table, keys, &sequence.tokens, to_u32(n_settled));
        let space = sequence.space;
        self.model.publish(who, n_settled);
        space
    }

    /// The sequence as it was, its empty table, and its keys.
    fn release(&mut self, who: usize) -> (Sequence, BlockTable, PrefixKeys) {
        let (mut table, keys) = self.tables.swap_remove(who);
        self.pool.release_table(&mut table);
        assert!(table.blocks().is_empty());
        (self.model.release(who), table, keys)
    }

    /// Compares the pool with its model; `space` is that of the sequence in question.
    fn check(&mut self, space: usize) {
        self.pool.check_invariants(self.tables.iter().map(|(table, _)| table));
        assert_eq!(self.tables.len(), self.model.sequences.len());
        for ((table, _), sequence) in self.tables.iter().zip(&self.model.sequences) {
            let blocks: Vec<_> = table.blocks().iter().map(|block| block.0).collect();
            assert_eq!(blocks, sequence.blocks);
        }
        let stats = self.pool.stats();
        let expected = PoolStats {
            n_free: to_u32(self.model.n_free()),
            n_cached: to_u32(self.model.n_cached()),
            n_used: stats.n_total - to_u32(self.model.n_available()),
            n_evictions: self.model.n_evictions,
            ..stats
        };
        assert_eq!(stats, expected);
        self.model.check_contents();

        let mut events = vec![];
        self.pool.drain_events(&mut events);
        events.iter().for_each(|event| self.replay.take(event, space));
        assert_eq!(self.replay.held(), self.model.known.keys().collect());
        self.replay.check_snapshot(&self.pool.snapshot());
        assert_eq!(self.pool.n_dropped_events(), 0);
    }
}

fn to_u32(n: usize) -> u32 {
    u32::try_from(n).expect("small numbers")
}

/// The same runs each time, unless a seed is asked for.
fn config() -> Config {
    let default = Config { failure_persistence: None, ..Config::default() };
    match default.rng_seed {
        RngSeed::Random => Config { rng_seed: RngSeed::Fixed(1), ..default },
        RngSeed::Fixed(_) => default,
    }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn the_pool_does_what_its_model_does(
        n_blocks in prop_oneof![1 => 1..8_u32, 4 => 8..33_u32],
        block_size in 1..5_u32,
        ops in vec(op(), 1..200),
    ) {
        let mut pair = Pair::new(n_blocks, block_size);
        for op in ops {
            pair.run(op);
        }
        // All blocks come home.
        while !pair.tables.is_empty() {
            pair.run(Op::Release { who: 0 });
        }
        prop_assert_eq!(pair.pool.stats().n_used, 0);
    }
}

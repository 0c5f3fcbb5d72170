//! Reference-counted KV blocks, block tables and the prefix cache.
//!
//! **Owns** which KV blocks are free, how many holders each one has, the table that maps a
//! request's positions to blocks, and which blocks can serve another request with the same prefix.
//! **Must not know** requests, scheduling policy, tensors or what the slots hold.
//!
//! Invariants:
//! * A block is released exactly once per holder; its count equals the tables that hold it
//!   \[INV-7]. [`BlockPool::check_invariants`] proves it against the tables.
//! * A table grows by all the blocks that were asked for or by none.
//! * Free, cached and used blocks add up to all blocks.
//! * The order in which blocks are handed out depends on the calls alone \[INV-1].
//! * A block that is found by its key is never written again: its tokens are committed, as are
//!   those behind it on which its KV depends \[INV-12]. The caller of [`BlockPool::publish`] sees
//!   to it.
//!
//! # The prefix cache
//!
//! A full block is known by a SHA-256 hash of
//! * the key of the block before it (the first one: the hash of its [`PrefixSpace`]),
//! * its tokens,
//! * the `n_lookahead` tokens that follow it.
//!
//! So equal keys mean equal tokens from the start on, and contents need no second look.
//!
//! **Why the tokens that follow.** A draft layer runs ahead of the target: its KV at position `p`
//! is made of the token at `p + 1`, with `n` draft layers of those up to `p + n`. The draft layers'
//! KV at the end of a block therefore depends on the tokens behind the block, and a block is keyed
//! by its successors, too. With blocks of 4 and one draft layer, after `[1, .., 8, 20]` the prompt
//! `[1, .., 8, 30]` finds the first block and computes the second afresh, for the target and the
//! drafter alike; `[1, .., 8, 20]` finds both. Text and drafts thus equal those of a run without
//! the cache.
//!
//! **Who shares.** Sequences of the same salt that are both drafted for or both not. One that is
//! not drafted for writes no draft layer's KV; it could read the blocks of one that is, but looks
//! among its own kind only, which keeps one chain of keys for a sequence.
//!
//! **What is published.** Full blocks whose KV is final, prompt and output alike; never drafts that
//! are not verified. Of two blocks with one key the first stays known and the second is its
//! table's own. The last token of a sequence is never served from the cache, since it has to be
//! queried.
//!
//! **Eviction.** A released block with a key stays cached until there is no free block left. Then
//! the one released first goes; a table releases its tail before its prefix.
//!
//! # Events
//!
//! A pool that is told to ([`BlockPool::record_events`]) records each change of what the prefix
//! cache holds, so that a reader who starts from a [snapshot](BlockPool::snapshot) always knows it.
//! Published blocks that the cache knows already, hits and released blocks change nothing.
//!
//! # Copy on write
//!
//! Sequences that start alike (`n > 1`) hold the blocks of what they share together. What they
//! write lies behind: [`BlockPool::fork`] gives the second one fresh blocks from there on. Where
//! the shared tokens end inside a block, it says which block to copy to which.
//!
//! # Example
//!
//! ```
//! use kv_block_manager::{BlockPool, BlockTable};
//!
//! let mut pool = BlockPool::new(3, 4);
//! let mut table = BlockTable::default();
//! assert!(pool.ensure_capacity(&mut table, 5));
//! assert_eq!(table.blocks().len(), 2);
//!
//! // Two more blocks do not fit; the table stays as it was.
//! assert!(!pool.ensure_capacity(&mut table, 16));
//! assert_eq!(table.blocks().len(), 2);
//!
//! pool.check_invariants([&table]);
//! pool.release_table(&mut table);
//! assert_eq!(pool.stats().n_used, 0);
//! ```
//!
//! A prefix that a sequence leaves behind and another finds:
//!
//! ```
//! use kv_block_manager::{BlockPool, BlockTable, PrefixKeys, PrefixMatch, PrefixSpace};
//!
//! let mut pool = BlockPool::with_prefix_cache(8, 4);
//! let space = PrefixSpace { salt: None, drafted: true, n_lookahead: 1 };
//! let (mut table, mut keys) = (BlockTable::default(), PrefixKeys::new(space));
//! let mut found = PrefixMatch::default();
//!
//! let tokens = [1, 2, 3, 4, 5, 6, 7, 8, 20];
//! pool.match_prefix(&mut keys, &tokens, &mut found);
//! assert_eq!(found.n_blocks(), 0);
//! assert!(pool.admit(&mut table, &found, 9));
//! // The KV of the first 8 tokens is written, and the token behind them is known.
//! pool.publish(&mut table, &mut keys, &tokens, 8);
//! pool.release_table(&mut table);
//! assert_eq!(pool.stats().n_cached, 2);
//!
//! pool.match_prefix(&mut PrefixKeys::new(space), &tokens, &mut found);
//! assert_eq!(found.n_blocks(), 2);
//! let other = [1, 2, 3, 4, 5, 6, 7, 8, 30];
//! pool.match_prefix(&mut PrefixKeys::new(space), &other, &mut found);
//! assert_eq!(found.n_blocks(), 1);
//! ```

mod events;
mod index;
mod keys;
mod lru;
mod pool;
mod table;

pub use keys::{PrefixKeys, PrefixSpace};
pub use pool::{BlockPool, Fork, PoolStats, PrefixMatch, blocks_for};
pub use table::BlockTable;

//! Reference-counted KV blocks and block tables.
//!
//! **Owns** which KV blocks are free, how many holders each one has, and the table that maps a
//! request's positions to blocks. **Must not know** requests, scheduling policy, tensors or what
//! the slots hold.
//!
//! Invariants:
//! * A block is released exactly once per holder; its count equals the tables that hold it
//!   \[INV-7]. [`BlockPool::check_invariants`] proves it against the tables.
//! * A table grows by all the blocks that were asked for or by none.
//! * The order in which blocks are handed out depends on the calls alone \[INV-1].
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

mod pool;
mod table;

pub use pool::{BlockPool, PoolStats, blocks_for};
pub use table::BlockTable;

//! The contract between the control plane and the device plane.
//!
//! **Owns** the plain data that crosses the boundary: [`Request`] and [`RequestEvent`] on the
//! user's side, [`StepPlan`] and [`StepOutcome`] on the executor's side, and the trait
//! [`StepExecutor`] in between. **Must not know** tensors, clocks, threads, protocols or
//! serialisation formats. It has no dependency.
//!
//! Invariants (numbered in `ARCHITECTURE.md`):
//! * Rows of a plan and of its outcome are joined by [`RequestId`], never by position \[INV-3].
//! * After a sampling row exactly one token of the request has no KV \[INV-5].
//! * Every row queries at least one known token \[INV-6].
//!
//! # Example
//!
//! An executor that "predicts" the successor of the last token, driven for one step:
//!
//! ```
//! use engine_types::{
//!     BlockId, ExecutorError, ExecutorLimits, RequestId, RowSpec, StepExecutor, StepOutcome,
//!     StepPlan, StepQueue,
//! };
//!
//! #[derive(Default)]
//! struct Successor(StepQueue);
//!
//! impl StepExecutor for Successor {
//!     fn limits(&self) -> ExecutorLimits {
//!         ExecutorLimits {
//!             block_size: 4,
//!             num_blocks: 8,
//!             max_model_len: 32,
//!             max_num_seqs: 2,
//!             max_num_batched_tokens: 16,
//!             max_num_speculative_tokens: 0,
//!             n_lookahead_max: 0,
//!             vocab_size: 100,
//!         }
//!     }
//!
//!     fn launch(&mut self, plan: &StepPlan) {
//!         self.0.launch(plan);
//!     }
//!
//!     fn collect(&mut self, outcome: &mut StepOutcome) -> Result<(), ExecutorError> {
//!         self.0.collect(outcome, |plan, outcome| {
//!             for row in plan.rows() {
//!                 let last = *plan.tokens(row).last().expect("a row queries at least one token");
//!                 let emitted = if row.samples { vec![last + 1] } else { vec![] };
//!                 outcome.push_row(row.request_id, &emitted, 0, &[]);
//!             }
//!             Ok(())
//!         })
//!     }
//! }
//!
//! let mut plan = StepPlan::default();
//! let spec = RowSpec {
//!     samples: true, prefill: true, ..RowSpec::default()
//! };
//! let table = plan.update_table(0, 0, &[BlockId(0)]);
//! plan.push_row(RequestId(7), spec, &[1, 2, 3], &[], table);
//! let (mut executor, mut outcome) = (Successor::default(), StepOutcome::default());
//! executor.execute(&plan, &mut outcome).unwrap();
//! let row = outcome.row(RequestId(7)).unwrap();
//! assert_eq!(outcome.tokens(row), &[4]);
//! ```

mod block_tables;
mod event;
mod executor;
mod guide;
mod ids;
mod indexer_stats;
mod kv_event;
mod outcome;
mod plan;
mod request;
mod sampling;
mod spec_stats;
mod step_queue;
mod step_tokens;

pub use block_tables::{BlockTables, RowTable, TableUpdate};
pub use event::{FinishReason, RequestEvent, TokensEvent, Usage};
pub use executor::{ExecutorError, ExecutorLimits, MAX_STEPS_IN_FLIGHT, OutputMode, StepExecutor};
pub use guide::{BoxedGuide, BoxedStopTexts, Guide, StopTexts};
pub use ids::{BlockId, RequestId, Span, StepId, TokenId};
pub use indexer_stats::{IndexerCounts, IndexerStats};
pub use kv_event::{BlockKey, KvChange, KvEvent, StoredBlocks};
pub use outcome::{OutcomeRow, StepOutcome};
pub use plan::{BlockCopy, PlanRow, RowSpec, StepPlan, TokenSource};
pub use request::Request;
pub use sampling::{Sampler, SamplerSetup, SamplingParams, TokenLogprobs};
pub use spec_stats::SpecDecodeStats;
pub use step_queue::StepQueue;
pub use step_tokens::StepTokens;

/// The largest `num_speculative_tokens` that the engine accepts.
pub const MAX_SPECULATIVE_TOKENS: usize = 8;

/// The longest `cache_salt` of a request that the engine accepts.
pub const MAX_CACHE_SALT_BYTES: usize = 256;

/// The largest number of likeliest tokens whose log probabilities a request may ask for.
pub const MAX_LOGPROBS: u32 = 20;

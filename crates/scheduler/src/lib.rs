//! Admission, chunked prefill, preemption and acceptance bookkeeping.
//!
//! **Owns** the requests between submission and their last event: who runs, which tokens a step
//! queries, which blocks each request holds, where a request ends. **Must not know** logits,
//! tensors, text, threads or time.
//!
//! Invariants:
//! * A plan is a pure function of the commands and outcomes so far \[INV-1].
//! * Outcome rows are joined to requests by id, and their KV counts only if the request has kept
//!   its blocks since they were planned \[INV-3].
//! * After a sampling row exactly one token of the request has no KV \[INV-5], and every row
//!   queries a known token, or one that a row in flight emits \[INV-6].
//! * A request's tokens are committed ones \[INV-13]. In deferred mode, where a step is planned
//!   before the outcome of the one before, tokens in flight are counted: blocks are reserved for
//!   the most that may come, and nobody loses blocks to them.
//! * `plan` and `apply` allocate nothing once their buffers have grown \[INV-8]. A request's own,
//!   for tokens, table and prefix keys, get their room when it is submitted.
//! * At most `max_num_seqs + max_queued_requests` requests are unfinished, siblings counted
//!   \[INV-9].
//! * A request that starts or comes back computes what the prefix cache lacks; what it publishes
//!   there is final \[INV-12]. A sibling starts from the KV of the request that it was submitted
//!   with, if that one still runs, and writes to blocks of its own alone.
//! * What is streamed, counted and kept is what [`commit`] returns \[INV-10].
//!
//! # How long a request waits
//!
//! A request's rank is fixed ([`SchedulingPolicy`]). Requests start in the order of the ranks and
//! nobody overtakes: the first one waits for a place, for its blocks, and for a chunk of
//! `chunk_alignment` tokens, or its whole prompt, in what the running ones leave of the budget.
//!
//! *Between two rows of a running request lie at most as many plans as requests run, unless it
//! lacks blocks or waits for its own row in flight.* A plan that leaves out requests for want of
//! budget makes the next one begin with the first of them and go round in the order of the ranks;
//! nobody starts meanwhile. That plan has its whole budget for the first request that can have a
//! row. So every plan after one that left ours out gets past one of the others at least, or comes
//! to ours, and past none of them twice.
//!
//! A running request that lacks blocks takes those of worse ranks that have no row in the plan.
//! Where there are none it keeps its own and waits until others end or need them, and nobody
//! starts. The best rank always goes on, therefore, or ends because the pool is too small for it
//! alone.
//!
//! # Example
//!
//! One request, prefilled in one step and ended by its second token:
//!
//! ```
//! use engine_types::*;
//! use scheduler::{Scheduler, SchedulerConfig};
//!
//! let limits = ExecutorLimits {
//!     block_size: 4, num_blocks: 8, max_model_len: 32, max_num_seqs: 2,
//!     max_num_batched_tokens: 16, max_num_speculative_tokens: 0, n_lookahead_max: 0,
//!     vocab_size: 100,
//! };
//! let mut scheduler = Scheduler::new(SchedulerConfig::default(), limits)?;
//! let params = SamplingParams { max_tokens: 2, ..SamplingParams::default() };
//! scheduler.submit(Request {
//!     id: RequestId(1), prompt: vec![5, 6], params, cache_salt: None, priority: 0, guide: None,
//!     stop_texts: None, siblings: vec![],
//! })?;
//!
//! let (mut plan, mut outcome, mut events) = (StepPlan::default(), StepOutcome::default(), vec![]);
//! for token in [7, 8] {
//!     scheduler.plan(&mut plan, &mut events);
//!     outcome.clear();
//!     outcome.push_row(plan.rows()[0].request_id, &[token], 0, &[]);
//!     scheduler.apply(&plan, &outcome, &mut events);
//! }
//! assert_eq!(events.len(), 4, "its start, the tokens of two steps, its end");
//! let Some(RequestEvent::Finished { reason, .. }) = events.last() else { unreachable!() };
//! assert_eq!(*reason, FinishReason::MaxTokens);
//! assert_eq!(scheduler.stats().blocks.n_used, 0);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod apply;
mod commit;
mod config;
mod drafting;
mod entries;
mod entry;
mod error;
mod flight;
mod follow;
mod kv_events;
mod outputs;
mod plan;
mod prompts;
mod queue;
mod sampling;
mod scheduler;
mod stats;
mod submit;
mod verify_counts;

#[cfg(test)]
mod tests;

pub use commit::{Commit, EndRules, commit};
pub use config::{SchedulerConfig, SchedulingPolicy};
pub use drafting::{Acceptance, AdaptiveDrafting, DraftPolicy, DraftingCosts};
pub use error::{ConfigError, SubmitError};
pub use scheduler::Scheduler;
pub use stats::SchedulerStats;
pub use submit::RequestRules;

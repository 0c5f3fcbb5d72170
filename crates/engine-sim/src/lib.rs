//! Hash language model, workloads and checkers that run the control plane without tensors.
//!
//! **Owns** an executor whose text and drafts depend on every KV slot that a request should read,
//! seeded workloads, a serial oracle, and the checks that hold after each step. **Must not know**
//! tensors, threads or time. It is a development tool: no other crate depends on it.
//!
//! Invariants:
//! * A run is a function of its seed.
//! * The executor reads and writes KV through the plan's block tables alone \[INV-2], and poisons
//!   what no reader may rely on \[INV-4].
//! * The oracle shares the model's hash with the executor and nothing with the scheduler.
//! * Commands come at any moment: before a step is planned, between plan and launch, with one or
//!   two steps in flight, and between a step's outcome and its application.
//! * What the scheduler counts and decides is checked against plans, outcomes and events alone: who
//!   runs, who loses its blocks, who starts, how long who runs goes without a row.
//!
//! # Example
//!
//! ```
//! let summary = engine_sim::run_seeds(0..3);
//! assert_eq!(summary.n_seeds, 3);
//! assert!(summary.n_tokens > 0);
//! ```

mod executor;
mod guide;
mod kv_mirror;
mod ledger;
mod model;
mod oracle;
mod prompts;
mod rng;
mod rules;
mod run;
mod summary;
mod trace;
mod workload;

#[cfg(test)]
mod tests;

pub use oracle::{Expected, serial};
pub use rng::Rng;
pub use run::{run_seed, run_seeds};
pub use summary::Summary;

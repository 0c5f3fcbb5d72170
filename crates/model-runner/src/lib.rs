//! KV tensors, input staging and the step executor of the device plane.
//!
//! **Owns** the KV caches, the way from a step's plan to the arrays of a forward pass, and the
//! order of a step: target pass, verification, drafts. [`Runner`] is the device plane's
//! `StepExecutor`. **Must not know** model names or layers, requests, text, or who owns a block.
//!
//! Invariants: a plan that breaks a bound is refused before anything reaches the device; every
//! reader of a cache takes its length from the layout, so that unused slots are never read
//! \[INV-4]; a row's result does not depend on its batch mates \[INV-11]; a batch of plainly greedy
//! rows costs one argmax, and a row that has no token fails alone.
//!
//! # Example
//!
//! The first step of a request, with three drafts behind its token:
//!
//! ```
//! use engine_types::{BlockId, RequestId, RowSpec, StepExecutor, StepOutcome, StepPlan};
//! use model_runner::{Runner, RunnerOptions};
//! use models::LoadOptions;
//!
//! let dir = bundled_checkpoints::resolve("tiny-dsv3", None)?;
//! let model = models::load(&dir, LoadOptions { drafting: true, ..LoadOptions::default() })?;
//! let options = RunnerOptions { num_speculative_tokens: 3, ..RunnerOptions::default() };
//! let mut runner = Runner::new(model, &options)?;
//!
//! let mut plan = StepPlan::default();
//! let prompt = RowSpec { samples: true, prefill: true, ..RowSpec::default() };
//! let spec = RowSpec { drafting: true, n_propose: 3, ..prompt };
//! let table = plan.update_table(0, 0, &[BlockId(5)]);
//! plan.push_row(RequestId(7), spec, &[0, 856, 1168], &[], table);
//! let mut outcome = StepOutcome::default();
//! runner.execute(&plan, &mut outcome)?;
//! let row = outcome.row(RequestId(7)).expect("every row has an outcome");
//! assert_eq!((outcome.tokens(row).len(), outcome.drafts(row).len()), (1, 3));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod drawn;
mod error;
mod gpu;
mod gpu_runner;
mod kv_cache;
mod limits;
mod prompt_logprobs;
mod runner;
mod samplers;
mod score;
mod staging;
mod subject;
mod verify;

#[cfg(test)]
mod tests;

pub use error::RunnerError;
pub use gpu_runner::{GpuPlan, GpuRunner, MemoryPlan};
pub use limits::{AttentionChoice, DraftSampling, RunnerOptions};
pub use models::{IndexCacheDtype, KvInit};
pub use runner::Runner;

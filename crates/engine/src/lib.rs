//! The engine loop: commands in, events out, one thread around a step executor.
//!
//! **Owns** the one thread that calls the scheduler and the [`StepExecutor`], the bounded inbox in
//! front of it, and the promise that each accepted request gets exactly one `Finished` event,
//! whatever happens. **Must not know** text, protocols, tensors or async runtimes.
//!
//! Invariants:
//! * The inbox holds at most as many requests as may be unfinished at once, and at most one abort
//!   for each of them \[INV-9]; [`EngineHandle`] answers at once and never waits for a step.
//! * The scheduler sees commands in the order of the inbox and nothing else \[INV-1].
//! * A failed step fails its requests and the engine goes on. After a fatal error or a panic every
//!   unfinished request fails, the engine is dead, and each later submit is refused.
//! * An idle engine waits; it does not poll.
//!
//! # Example
//!
//! An executor that counts up, and a request for three tokens:
//!
//! ```
//! # use engine_types::*;
//! # #[derive(Default)]
//! # struct Successor(StepQueue);
//! # impl StepExecutor for Successor {
//! #     fn limits(&self) -> ExecutorLimits {
//! #         ExecutorLimits {
//! #             block_size: 4, num_blocks: 8, max_model_len: 32, max_num_seqs: 2,
//! #             max_num_batched_tokens: 16, max_num_speculative_tokens: 0, n_lookahead_max: 0,
//! #             vocab_size: 100,
//! #         }
//! #     }
//! #     fn launch(&mut self, plan: &StepPlan) {
//! #         self.0.launch(plan);
//! #     }
//! #     fn collect(&mut self, outcome: &mut StepOutcome) -> Result<(), ExecutorError> {
//! #         self.0.collect(outcome, |plan, outcome| {
//! #             for row in plan.rows() {
//! #                 let next = plan.tokens(row)[row.n_query as usize - 1] + 1;
//! #                 let run = if row.samples { vec![next] } else { vec![] };
//! #                 outcome.push_row(row.request_id, &run, 0, &[]);
//! #             }
//! #             Ok(())
//! #         })
//! #     }
//! # }
//! use engine::{Engine, EngineConfig};
//!
//! let (handle, thread) =
//!     Engine::spawn(EngineConfig::default(), || Ok::<_, ExecutorError>(Successor::default()))?;
//! let (sink, events) = engine::channel(64);
//! let params = SamplingParams {
//!     max_tokens: 3,
//!     ignore_eos: true,
//!     ..SamplingParams::default()
//! };
//! let request = Request {
//!     id: handle.next_request_id(), prompt: vec![5, 6], params, cache_salt: None,
//!     priority: 0, guide: None, stop_texts: None, siblings: vec![],
//! };
//! handle.submit(request, Box::new(sink))?;
//!
//! let mut tokens = vec![];
//! for event in events {
//!     if let RequestEvent::Tokens(event) = event {
//!         tokens.extend(event.tokens);
//!     }
//! }
//! assert_eq!(tokens, [7, 8, 9]);
//! thread.drain();
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! [`StepExecutor`]: engine_types::StepExecutor

mod deadlines;
mod error;
mod handle;
mod inbox;
mod kv_events;
mod runner;
mod sink;
mod spawn;
mod stats;

#[cfg(test)]
mod tests;

pub use error::{SpawnError, SubmitError, SubscribeError};
pub use handle::EngineHandle;
pub use kv_events::{KvChannelSink, KvEventSink, KvEvents, kv_event_channel};
pub use sink::{ChannelSink, Delivery, EventSink, Events, channel};
pub use spawn::{Engine, EngineConfig, EngineThread};
pub use stats::EngineStats;

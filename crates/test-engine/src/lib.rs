//! Engines for tests of what stands in front of one: real scheduler and engine thread, and
//! executors that count up or follow a script in place of a model.
//!
//! **Owns** [`TestEngine`] and its executors. **Must not know** transports or tensors. Used by
//! tests only.
//!
//! Invariant: an executor keeps to the contract of `engine-types`, drafts and masks included, so
//! that what a test sees is what a service gets of a real model.
//!
//! # Example
//!
//! ```
//! use serving::{CallContext, InferenceEngine as _, whole_reply};
//! use test_engine::{Setup, TestEngine, streaming};
//!
//! # tokio::runtime::Runtime::new().unwrap().block_on(async {
//! let of = TestEngine::start(Setup::default());
//! let request = streaming(&[5, 6], 3);
//! let messages = of.frontend.generate(CallContext::default(), request).await.unwrap();
//! let reply = whole_reply(messages, 1, false).await.unwrap();
//! assert_eq!(reply.outputs[0].token_ids, [7, 8, 9]);
//! # });
//! ```

#![expect(clippy::unwrap_used, reason = "a failure in a test's helper is a failure of the test")]

mod engine;
mod requests;
mod scripted;

pub use engine::{
    Counting, DRAFT, FAIL_FOR_GOOD, FAIL_STEP, HOLD, OK, PANIC, PATIENCE, Setup, TestEngine,
    VERIFY, VOCAB,
};
pub use requests::{streaming, unary};
pub use scripted::Script;

//! vLLM's API through a real port, in front of a test engine.

#![expect(clippy::unwrap_used, reason = "a failure in a test's helper is a failure of the test")]

mod aborts;
mod answers;
mod constraints;
mod control;
mod harness;
mod logprobs;
mod mutations;
mod refusals;

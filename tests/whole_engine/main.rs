//! The whole engine: bundled checkpoint, runner, scheduler, engine thread, and the gRPC port.
//!
//! The tensors behind the tokens are compared with the reference by the tests of `models`
//! (hidden states, logits, drafts) and `model-runner` (log probabilities, whole and in chunks).

#![expect(clippy::unwrap_used, reason = "a failure in a test's helper is a failure of the test")]

mod bad_input;
mod bfloat16;
mod grpc;
mod oracle_tokens;

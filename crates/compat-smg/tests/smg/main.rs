//! The service through a real port: answers, aborts, refusals, what it tells of itself, and
//! messages that make no sense.

#![expect(clippy::unwrap_used, reason = "a failure in a test's helper is a failure of the test")]

mod aborts;
mod answers;
mod harness;
mod mutations;
mod refusals;
mod told;

//! The listener over real sockets, around engines that count up.

#![expect(clippy::unwrap_used, reason = "a failure in a test's helper is a failure of the test")]

mod dashboard;
mod exposition;
mod generate;
mod guard;
mod harness;
mod health;
mod lifecycle;
mod metrics;

//! The `tandem` program as its users run it.

#![expect(clippy::unwrap_used, reason = "a failure in a test's helper is a failure of the test")]

mod bench;
mod checkpoints;
mod config;
mod drafts;
mod dummy;
mod generate;
mod harness;
mod indexer;
mod inspect;
mod prefix_cache;
mod scheduling;
mod score;
mod serve;

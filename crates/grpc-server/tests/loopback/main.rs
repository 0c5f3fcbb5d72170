//! The service through a real port: streams, refusals, disconnects, overload, death.

#![expect(clippy::unwrap_used, reason = "a failure in a test's helper is a failure of the test")]

mod faults;
mod harness;
mod kv_events;
mod lifecycle;
mod prefix_cache;
mod refusals;
mod streams;

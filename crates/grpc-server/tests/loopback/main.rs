//! The service through a real port: streams, sampling, refusals, disconnects, overload, death.

#![expect(clippy::unwrap_used, reason = "a failure in a test's helper is a failure of the test")]

mod constraints;
mod faults;
mod harness;
mod kv_events;
mod lifecycle;
mod outputs;
mod prefix_cache;
mod refusals;
mod refused_parameters;
mod sampling;
mod stop_texts;
mod streams;

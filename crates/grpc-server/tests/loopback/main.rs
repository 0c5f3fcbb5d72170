//! The service through a real port: streams, sampling, refusals, disconnects, overload, death.

#![expect(clippy::unwrap_used, reason = "a failure in a test's helper is a failure of the test")]

mod access;
mod constraints;
mod deadlines;
mod departures;
mod faults;
mod harness;
mod health;
mod kv_events;
mod lifecycle;
mod limits;
mod outputs;
mod prefix_cache;
mod reflection;
mod refusals;
mod refused_parameters;
mod sampling;
mod split_characters;
mod stop_texts;
mod streams;
mod tls;

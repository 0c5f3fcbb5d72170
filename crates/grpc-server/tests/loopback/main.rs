//! The service through a real port: streams, refusals, disconnects, overload, death.

mod faults;
mod harness;
mod lifecycle;
mod refusals;
mod streams;

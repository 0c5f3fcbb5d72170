//! Shared helpers of the whole-engine tests: the oracle's data and a model behind an engine.

pub mod harness;
pub mod oracle;

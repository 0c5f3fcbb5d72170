//! Shared helpers of the whole-engine tests and benches: the oracle's data, a model behind an
//! engine, and that engine behind its gRPC port.

pub mod bench;
pub mod constrained;
pub mod harness;
pub mod oracle;
pub mod recorder;
pub mod server;
pub mod table;

//! Package `tandem.inference`: generating.

#[path = "gen/tandem.inference.v1.rs"]
pub mod v1;

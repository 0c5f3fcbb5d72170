//! Package `tandem.control`: information about the server.

#[path = "gen/tandem.control.v1.rs"]
pub mod v1;

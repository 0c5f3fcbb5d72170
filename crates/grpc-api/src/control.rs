//! Package `tandem.control`: information about the server.

#[expect(clippy::allow_attributes_without_reason, reason = "generated code gives no reasons")]
#[path = "gen/tandem.control.v1.rs"]
pub mod v1;

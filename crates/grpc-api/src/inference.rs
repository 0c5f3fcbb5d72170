//! Package `tandem.inference`: generating.

#[expect(clippy::allow_attributes_without_reason, reason = "generated code gives no reasons")]
#[path = "gen/tandem.inference.v1.rs"]
pub mod v1;

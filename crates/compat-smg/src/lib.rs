//! The engine service of the [SMG gateway](https://github.com/smg-project/smg).
//!
//! **Owns** `vllm.grpc.engine.VllmEngine`, which the gateway turns into the APIs of OpenAI and
//! Anthropic: its messages to those of the own API and back, abort by name, the tokenizer as an
//! archive. **Must not know** ports, and nothing of the engine but
//! [`InferenceEngine`](serving::InferenceEngine).
//!
//! The gateway's link has neither TLS nor tokens, so that the service belongs on a port of its own
//! that others cannot reach.
//!
//! Invariants:
//! * What of a request is not served is refused by its name in the contract, never ignored, if it
//!   would change the answer.
//! * `Abort` of a name ends its call in any state, and frees its request before the call ends.
//! * [`engine`] is what the generator makes of `proto-compat/` (`cargo xtask codegen --check`).
//!
//! # Example
//!
//! ```
//! use std::sync::Arc;
//! use serving::{Frontend, FrontendConfig};
//! use tonic::server::NamedService;
//!
//! fn name<S: NamedService>(_: &S) -> &'static str {
//!     S::NAME
//! }
//! let engine = Arc::new(Frontend::loading(FrontendConfig::default()));
//! let service = compat_smg::service(engine, 16 << 20);
//! assert_eq!(name(&service), "vllm.grpc.engine.VllmEngine");
//! ```

#[expect(clippy::allow_attributes_without_reason, reason = "generated code gives no reasons")]
#[expect(missing_docs, reason = "the names are another project's contract")]
#[path = "gen/vllm.grpc.engine.rs"]
pub mod engine;
mod generation;
mod info;
mod kv_events;
mod reply;
mod request;
mod service;
mod tokenizer;

pub use service::{SmgService, service};

/// The encoded descriptors of the service, for server reflection.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!("gen/descriptors.bin");

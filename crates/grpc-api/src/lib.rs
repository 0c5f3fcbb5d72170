//! Generated gRPC types of `tandem.inference.v1` and `tandem.control.v1`.
//!
//! **Owns** the committed code that `cargo xtask codegen` makes from `proto/`: messages, clients
//! and server traits. **Must not know** anything else of the project; a client needs this crate
//! alone. The comments in `proto/` are the documentation of the API.
//!
//! Invariant: `src/gen` is exactly what the generator makes (`cargo xtask codegen --check`).
//!
//! # Example
//!
//! ```
//! use grpc_api::inference::v1::generate_stream_request::Prompt;
//! use grpc_api::inference::v1::{GenerateStreamRequest, StoppingParams};
//!
//! let request = GenerateStreamRequest {
//!     prompt: Some(Prompt::Text("def add(a, b):\n".to_owned())),
//!     stopping: Some(StoppingParams { max_tokens: Some(16), ..Default::default() }),
//!     ..Default::default()
//! };
//! assert!(request.sampling.is_none(), "absent sampling parameters mean greedy decoding");
//! ```

pub mod control;
pub mod inference;

/// The encoded descriptors of all files, for server reflection.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!("gen/descriptors.bin");

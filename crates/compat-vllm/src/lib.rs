//! vLLM's own gRPC API, `vllm.Inference` and `vllm.Control`, over an engine: what NVIDIA Dynamo's
//! sidecar for vLLM speaks.
//!
//! **Owns** the translation of that API, whose messages are those of the crate `vllm-proto`, to the
//! own one and back, and the names that its callers give their requests. **Must not know**
//! listeners, other APIs, how an engine works.
//!
//! Invariants:
//! * What the engine cannot do is refused with the field's name in vLLM's API, never ignored.
//! * `Generate` says what the messages of `GenerateStream` say together.
//! * An aborted request ends in every state, and so does one whose caller leaves.
//!
//! Differences from vLLM: `grammar` is a Lark grammar. The rank of a token is 0, unknown, where it
//! is not among the candidates that were asked for, and the likeliest has rank 1 in any case.
//! Text never has special tokens.
//!
//! # Example
//!
//! ```
//! use std::sync::Arc;
//! use tonic::server::NamedService as _;
//!
//! fn name_of<S: tonic::server::NamedService>(_service: &S) -> &'static str {
//!     S::NAME
//! }
//!
//! let frontend = serving::Frontend::loading(serving::FrontendConfig::default());
//! let engine: Arc<dyn serving::InferenceEngine> = Arc::new(frontend);
//! let (inference, control) = compat_vllm::services(&engine, 16 << 20);
//! assert_eq!(name_of(&inference), "vllm.Inference");
//! let port = grpc_server::Services::default().with(inference).with(control);
//! # let _ = port;
//! ```

mod answer;
mod control;
mod inference;
mod request;

use std::sync::Arc;

use serving::{InferenceEngine, RequestNames};
use vllm_proto::control_server::{Control, ControlServer};
use vllm_proto::inference_server::{Inference, InferenceServer};

/// Both services over an engine. A request message of more than `max_request_bytes` is refused.
#[must_use]
pub fn services(
    engine: &Arc<dyn InferenceEngine>,
    max_request_bytes: usize,
) -> (InferenceServer<impl Inference + use<>>, ControlServer<impl Control + use<>>) {
    let names = RequestNames::default();
    let inference = inference::Service { engine: Arc::clone(engine), names: names.clone() };
    let control = control::Service::new(Arc::clone(engine), names);
    (
        InferenceServer::new(inference).max_decoding_message_size(max_request_bytes),
        ControlServer::new(control),
    )
}

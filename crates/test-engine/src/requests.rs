//! Requests in one line.

use grpc_api::inference::v1::generate_stream_request::Prompt;
use grpc_api::inference::v1::{GenerateRequest, GenerateStreamRequest, StoppingParams, TokenIds};

/// A streaming request for `max_tokens` tokens that nothing else ends.
#[must_use]
pub fn streaming(prompt: &[u32], max_tokens: u32) -> GenerateStreamRequest {
    GenerateStreamRequest {
        prompt: Some(Prompt::TokenIds(TokenIds { ids: prompt.to_vec() })),
        stopping: Some(StoppingParams {
            max_tokens: Some(max_tokens),
            ignore_eos: Some(true),
            ..StoppingParams::default()
        }),
        ..GenerateStreamRequest::default()
    }
}

/// The same as a unary one.
#[must_use]
pub fn unary(prompt: &[u32], max_tokens: u32) -> GenerateRequest {
    use grpc_api::inference::v1::generate_request::Prompt;
    let streaming = streaming(prompt, max_tokens);
    GenerateRequest {
        prompt: Some(Prompt::TokenIds(TokenIds { ids: prompt.to_vec() })),
        stopping: streaming.stopping,
        ..GenerateRequest::default()
    }
}

//! `tandem.inference.v1.InferenceService`.

use std::sync::Arc;

use grpc_api::inference::v1 as pb;
use grpc_api::inference::v1::inference_service_server::InferenceService;
use serving::{CallContext, InferenceEngine, Messages, status};
use tonic::{Request, Response, Status};

/// The header that names a stream's outputs before their first messages.
const REQUEST_IDS: &str = "tandem-request-ids";

/// The service over an engine.
pub(crate) struct Inference(pub(crate) Arc<dyn InferenceEngine>);

#[tonic::async_trait]
impl InferenceService for Inference {
    type GenerateStreamStream = Messages;

    async fn generate_stream(
        &self,
        request: Request<pb::GenerateStreamRequest>,
    ) -> Result<Response<Messages>, Status> {
        let context = CallContext::of(&request);
        let messages = self.0.generate(context, request.into_inner()).await?;
        let ids: Vec<String> = messages.request_ids.iter().map(u64::to_string).collect();
        let mut response = Response::new(messages);
        if let Ok(ids) = ids.join(",").parse() {
            response.metadata_mut().insert(REQUEST_IDS, ids);
        }
        Ok(response)
    }

    async fn generate(
        &self,
        request: Request<pb::GenerateRequest>,
    ) -> Result<Response<pb::GenerateResponse>, Status> {
        let context = CallContext::of(&request);
        let request = streamed(request.into_inner());
        let n_outputs = request.sampling.as_ref().and_then(|sampling| sampling.n).unwrap_or(1);
        let messages = self.0.generate(context, request).await?;
        let has_text = self.0.model_info()?.has_tokenizer;
        serving::whole_reply(messages, n_outputs, has_text).await.map(Response::new)
    }

    async fn abort_request(
        &self,
        request: Request<pb::AbortRequestRequest>,
    ) -> Result<Response<pb::AbortRequestResponse>, Status> {
        let id = request.into_inner().request_id;
        if self.0.abort(id) {
            Ok(Response::new(pb::AbortRequestResponse {}))
        } else {
            Err(status::unknown_request(id))
        }
    }
}

/// The unary request as the streaming one, whose fields are the same.
fn streamed(request: pb::GenerateRequest) -> pb::GenerateStreamRequest {
    use pb::generate_request::Prompt as Unary;
    use pb::generate_stream_request::Prompt;
    pb::GenerateStreamRequest {
        prompt: request.prompt.map(|prompt| match prompt {
            Unary::Text(text) => Prompt::Text(text),
            Unary::TokenIds(ids) => Prompt::TokenIds(ids),
        }),
        sampling: request.sampling,
        stopping: request.stopping,
        speculation: request.speculation,
        cache_salt: request.cache_salt,
        priority: request.priority,
        constraint: request.constraint,
    }
}

//! `tandem.inference.v1.InferenceService`.

use std::sync::Arc;

use engine::{EngineHandle, EventSink};
use engine_types::{BoxedStopTexts, Request as EngineRequest, RequestId, TokenId};
use grpc_api::inference::v1 as pb;
use grpc_api::inference::v1::inference_service_server::InferenceService;
use tokenization::Tokenizer;
use tokio::time::Instant;
use tokio_stream::StreamExt;
use tonic::metadata::MetadataMap;
use tonic::{Request, Response, Status};

use crate::call::{self, Call, CallOptions};
use crate::constraint::Constraints;
use crate::output::Output;
use crate::prompt::PromptEncoder;
use crate::status;
use crate::timeout::timeout_of;
use crate::validate::{Valid, validate};

/// The service's state.
pub(crate) struct Inference {
    engine: EngineHandle,
    prompts: PromptEncoder,
    constraints: Constraints,
    max_buffered_steps: usize,
}

impl Inference {
    pub(crate) fn new(
        engine: EngineHandle,
        tokenizer: Option<Arc<Tokenizer>>,
        eos_token_ids: &[TokenId],
        max_buffered_steps: usize,
    ) -> Self {
        let constraints = Constraints::new(tokenizer.as_deref(), eos_token_ids);
        let prompts = PromptEncoder::new(tokenizer, engine.limits().max_model_len);
        Self { engine, prompts, constraints, max_buffered_steps }
    }

    /// Checks a request and hands it to the engine.
    async fn start(
        &self,
        metadata: &MetadataMap,
        mut request: pb::GenerateStreamRequest,
    ) -> Result<Call, Status> {
        let deadline = timeout_of(metadata).map(|timeout| Instant::now() + timeout);
        let (prompt, field) = self.prompts.ids(request.prompt.take()).await?;
        let tokenizer = self.prompts.tokenizer.as_deref();
        let valid = validate((&prompt, field), &request, &self.engine, tokenizer.is_some())?;
        let Valid { mut params, n_outputs, stops } = valid;
        let guide = self.constraints.guide(request.constraint.take()).await?;
        if params.temperature > 0.0 && params.seed.is_none() {
            let seed = getrandom::u64().map_err(|error| status::internal(&error.to_string()))?;
            params.seed = Some(seed);
        }
        let detector = tokenizer
            .filter(|_| !stops.texts.is_empty())
            .map(|tokenizer| BoxedStopTexts(Box::new(tokenizer.stop_text_detector(&stops.texts))));
        let options = CallOptions {
            text: tokenizer.map(|tokenizer| tokenizer.output_text(&stops)),
            deadline,
            prompt: params.prompt_logprobs.map_or_else(Vec::new, |_| prompt.clone()),
        };
        let (sinks, outputs) = self.outputs(n_outputs);
        let request = EngineRequest {
            cache_salt: request.cache_salt.map(String::into_bytes),
            priority: request.priority.unwrap_or(0),
            guide,
            stop_texts: detector,
            siblings: outputs[1..].iter().map(|output| output.id).collect(),
            ..EngineRequest::new(outputs[0].id, prompt, params)
        };
        self.engine
            .submit_all(request, sinks, deadline.map(Instant::into_std))
            .map_err(|error| status::refused(&error))?;
        Ok(Call::new(outputs, options))
    }

    /// Both ends of `n_outputs` outputs, each with an id of its own.
    fn outputs(&self, n_outputs: u32) -> (Vec<Box<dyn EventSink>>, Vec<Output>) {
        let output = |_| {
            let id = self.engine.next_request_id();
            let (sink, output) = Output::new(self.engine.clone(), id, self.max_buffered_steps);
            (Box::new(sink) as Box<dyn EventSink>, output)
        };
        (0..n_outputs).map(output).unzip()
    }
}

#[tonic::async_trait]
impl InferenceService for Inference {
    type GenerateStreamStream = Call;

    async fn generate_stream(
        &self,
        request: Request<pb::GenerateStreamRequest>,
    ) -> Result<Response<Call>, Status> {
        let (metadata, _, request) = request.into_parts();
        Ok(Response::new(self.start(&metadata, request).await?))
    }

    async fn generate(
        &self,
        request: Request<pb::GenerateRequest>,
    ) -> Result<Response<pb::GenerateResponse>, Status> {
        let (metadata, _, request) = request.into_parts();
        let mut call = self.start(&metadata, streamed(request)).await?;
        let mut reply = call.empty_reply();
        while let Some(message) = call.next().await {
            call::add_to_reply(&mut reply, message?);
        }
        Ok(Response::new(reply))
    }

    async fn abort_request(
        &self,
        request: Request<pb::AbortRequestRequest>,
    ) -> Result<Response<pb::AbortRequestResponse>, Status> {
        let id = request.into_inner().request_id;
        if self.engine.abort(RequestId(id)) {
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

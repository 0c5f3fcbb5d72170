//! `tandem.inference.v1.InferenceService`.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use engine::EngineHandle;
use engine_types::{Request as EngineRequest, RequestId, TokensEvent};
use grpc_api::inference::v1 as pb;
use grpc_api::inference::v1::inference_service_server::InferenceService;
use tokenization::{IncrementalDecoder, TokenizationError, Tokenizer};
use tokio::sync::Semaphore;
use tokio::time::Instant;
use tokio_stream::Stream;
use tonic::metadata::MetadataMap;
use tonic::{Request, Response, Status};
use tonic_types::FieldViolation;

use crate::convert;
use crate::output::{Event, Finished, Output};
use crate::status;
use crate::validate::validate;

/// Texts from this size on, in bytes, wait for their turn to be encoded.
const LONG_TEXT_BYTES: usize = 64 << 10;
/// Long texts encoded at a time: encoding takes a hundred times a text's memory.
const LONG_TEXTS_MAX: usize = 2;

/// The service's state.
pub(crate) struct Inference {
    engine: EngineHandle,
    tokenizer: Option<Arc<Tokenizer>>,
    max_buffered_steps: usize,
    long_texts: Arc<Semaphore>,
}

impl Inference {
    pub(crate) fn new(
        engine: EngineHandle,
        tokenizer: Option<Arc<Tokenizer>>,
        max_buffered_steps: usize,
    ) -> Self {
        let long_texts = Arc::new(Semaphore::new(LONG_TEXTS_MAX));
        Self { engine, tokenizer, max_buffered_steps, long_texts }
    }

    /// Checks a request and hands it to the engine.
    async fn start(
        &self,
        metadata: &MetadataMap,
        request: pb::GenerateStreamRequest,
    ) -> Result<Output, Status> {
        let deadline = timeout_of(metadata).map(|timeout| Instant::now() + timeout);
        let (prompt, field) = self.prompt_ids(request.prompt.clone()).await?;
        let params = validate(&prompt, field, &request, &self.engine)?;
        let cache_salt = request.cache_salt.map(String::into_bytes);
        let id = self.engine.next_request_id();
        let (sink, output) =
            Output::new(self.engine.clone(), id, self.max_buffered_steps, deadline);
        self.engine
            .submit(
                EngineRequest { cache_salt, ..EngineRequest::new(id, prompt, params) },
                Box::new(sink),
            )
            .map_err(|error| status::refused(&error))?;
        Ok(output)
    }

    /// The prompt as ids, and the name of the field that it came in.
    async fn prompt_ids(
        &self,
        prompt: Option<pb::generate_stream_request::Prompt>,
    ) -> Result<(Vec<u32>, &'static str), Status> {
        use pb::generate_stream_request::Prompt;
        let fault = |field: &str, description: &str| {
            Err(status::invalid_argument(vec![FieldViolation::new(field, description)]))
        };
        match prompt {
            None => fault("prompt", "is missing: give text or token_ids"),
            Some(Prompt::TokenIds(ids)) => Ok((ids.ids, "token_ids")),
            Some(Prompt::Text(text)) if text.is_empty() => fault("text", "is empty"),
            Some(Prompt::Text(text)) => {
                let Some(tokenizer) = self.tokenizer.clone() else {
                    return fault("text", "the model has no tokenizer: give token_ids");
                };
                // No token stands for more bytes than this, so that the text cannot fit.
                let max_model_len = self.engine.limits().max_model_len as usize;
                let n_bytes_max = max_model_len.saturating_mul(tokenizer.max_token_bytes());
                if text.len() > n_bytes_max {
                    let n_bytes = text.len();
                    let description = format!(
                        "has {n_bytes} bytes, more than max_model_len ({max_model_len}) tokens \
                         can stand for: shorten it"
                    );
                    return fault("text", &description);
                }
                match self.encode(tokenizer, text).await? {
                    Ok(ids) => Ok((ids, "text")),
                    Err(error) => fault("text", &error.to_string()),
                }
            }
        }
    }

    /// Encodes apart from the calls' threads: a long text takes a while.
    async fn encode(
        &self,
        tokenizer: Arc<Tokenizer>,
        text: String,
    ) -> Result<Result<Vec<u32>, TokenizationError>, Status> {
        let permit = if text.len() < LONG_TEXT_BYTES {
            None
        } else {
            let turn = Arc::clone(&self.long_texts).acquire_owned().await;
            Some(turn.map_err(|_| status::internal("the tokenizer is closed"))?)
        };
        let encode = move || {
            // Held by the work itself, which goes on where the caller has gone.
            let _permit = permit;
            tokenizer.encode(&text)
        };
        let ids = tokio::task::spawn_blocking(encode).await;
        ids.map_err(|_| status::internal("the tokenizer panicked"))
    }

    fn decoder(&self) -> Option<IncrementalDecoder> {
        self.tokenizer.as_ref().map(|tokenizer| tokenizer.incremental_decoder(true))
    }
}

#[tonic::async_trait]
impl InferenceService for Inference {
    type GenerateStreamStream = OutputStream;

    async fn generate_stream(
        &self,
        request: Request<pb::GenerateStreamRequest>,
    ) -> Result<Response<OutputStream>, Status> {
        let (metadata, _, request) = request.into_parts();
        let output = self.start(&metadata, request).await?;
        Ok(Response::new(OutputStream { output: Some(output), decoder: self.decoder() }))
    }

    async fn generate(
        &self,
        request: Request<pb::GenerateRequest>,
    ) -> Result<Response<pb::GenerateResponse>, Status> {
        let (metadata, _, request) = request.into_parts();
        let mut output = self.start(&metadata, streamed(request)).await?;
        let mut decoder = self.decoder();
        let mut text = decoder.is_some().then(String::new);
        let mut token_ids = vec![];
        let finished = loop {
            match output.next().await? {
                Event::Step(step) => {
                    if let (Some(decoder), Some(text)) = (&mut decoder, &mut text) {
                        step.tokens.iter().for_each(|id| decoder.push(*id, text));
                    }
                    token_ids.extend(step.tokens);
                }
                Event::Finished(finished) => break finished,
            }
        };
        if let (Some(decoder), Some(text)) = (&mut decoder, &mut text) {
            decoder.finish(text);
        }
        let end = convert::end(finished.reason).map_err(|text| status::failed(&text, None))?;
        Ok(Response::new(pb::GenerateResponse {
            request_id: output.id.0,
            token_ids,
            text,
            finish_reason: end.reason.into(),
            matched_token_id: end.matched_token_id,
            matched_stop_sequence: end.matched_stop_sequence,
            usage: Some(convert::usage(finished.usage)),
            speculation: Some(convert::speculation(&finished.spec_decode)),
        }))
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
    }
}

/// The messages of a streaming call.
pub(crate) struct OutputStream {
    /// `None` once the last message or an error is out.
    output: Option<Output>,
    decoder: Option<IncrementalDecoder>,
}

impl Stream for OutputStream {
    type Item = Result<pb::GenerateStreamResponse, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let Some(output) = &mut self.output else { return Poll::Ready(None) };
        let request_id = output.id.0;
        let event = match ready!(output.poll_event(cx)) {
            Ok(Event::Step(step)) => pb::generate_stream_response::Event::Delta(self.delta(step)),
            Ok(Event::Finished(finished)) => {
                self.output = None;
                match self.finished(finished) {
                    Ok(last) => pb::generate_stream_response::Event::Finished(last),
                    Err(message) => {
                        return Poll::Ready(Some(Err(status::failed(&message, None))));
                    }
                }
            }
            Err(status) => {
                // Dropped here, so that the request ends even if the stream is kept.
                self.output = None;
                return Poll::Ready(Some(Err(status)));
            }
        };
        let message = pb::GenerateStreamResponse { request_id, event: Some(event) };
        Poll::Ready(Some(Ok(message)))
    }
}

impl OutputStream {
    fn delta(&mut self, step: TokensEvent) -> pb::TokenDelta {
        let text_pieces = self.decoder.as_mut().map_or_else(Vec::new, |decoder| {
            let piece = |id: &u32| {
                let mut text = String::new();
                decoder.push(*id, &mut text);
                text
            };
            step.tokens.iter().map(piece).collect()
        });
        pb::TokenDelta {
            token_ids: step.tokens.to_vec(),
            n_accepted: step.n_accepted,
            draft_token_ids: step.drafts.to_vec(),
            text_pieces,
        }
    }

    fn finished(&mut self, finished: Finished) -> Result<pb::GenerationFinished, String> {
        let end = convert::end(finished.reason)?;
        let mut tail_text = String::new();
        if let Some(decoder) = &mut self.decoder {
            decoder.finish(&mut tail_text);
        }
        Ok(pb::GenerationFinished {
            finish_reason: end.reason.into(),
            matched_token_id: end.matched_token_id,
            matched_stop_sequence: end.matched_stop_sequence,
            tail_text,
            usage: Some(convert::usage(finished.usage)),
            speculation: Some(convert::speculation(&finished.spec_decode)),
        })
    }
}

/// The call's `grpc-timeout`; a malformed one is as good as none.
///
/// The transport ends a unary call at the same time with the wrong status, CANCELLED, so this one
/// is a little shorter.
fn timeout_of(metadata: &MetadataMap) -> Option<Duration> {
    let value = metadata.get("grpc-timeout")?.to_str().ok()?;
    let (digits, unit) = value.split_at_checked(value.len().checked_sub(1)?)?;
    if digits.is_empty() || digits.len() > 8 || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let n: u64 = digits.parse().ok()?;
    let timeout = match unit {
        "H" => Duration::from_secs(n * 3600),
        "M" => Duration::from_secs(n * 60),
        "S" => Duration::from_secs(n),
        "m" => Duration::from_millis(n),
        "u" => Duration::from_micros(n),
        "n" => Duration::from_nanos(n),
        _ => return None,
    };
    Some(timeout - (timeout / 10).min(Duration::from_millis(5)))
}

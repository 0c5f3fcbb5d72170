//! The prompt box: a completion as server-sent events.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::{FromRequest as _, Request, State};
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderMap, StatusCode};
use axum::response::sse::{Event as SseEvent, KeepAlive, Sse};
use axum::response::{IntoResponse, Json, Response};
use grpc_api::inference::v1 as pb;
use grpc_api::inference::v1::generate_stream_response::Event;
use serde::Deserialize;
use serde_json::{Value, json};
use serving::{CallContext, InferenceEngine};
use tokio::time::timeout;
use tokio_stream::StreamExt as _;
use tonic::{Code, Status};

use crate::routes::App;
use crate::{code_name, guard, stats};

/// How often a silent stream says that it lives, which also finds clients that have vanished.
const KEEP_ALIVE: Duration = Duration::from_secs(5);

/// How long a body may take: until it is there its connection counts, and probes need one as well.
const BODY_TIMEOUT: Duration = Duration::from_secs(10);

/// The body of a request: fields of the own API under their names.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Prompt {
    prompt: String,
    max_tokens: Option<u32>,
    ignore_eos: Option<bool>,
    temperature: Option<f64>,
    top_p: Option<f64>,
    top_k: Option<u32>,
    seed: Option<u64>,
    num_speculative_tokens: Option<u32>,
}

impl Prompt {
    fn into_request(self) -> pb::GenerateStreamRequest {
        pb::GenerateStreamRequest {
            prompt: Some(pb::generate_stream_request::Prompt::Text(self.prompt)),
            sampling: Some(pb::SamplingParams {
                temperature: self.temperature,
                top_p: self.top_p,
                top_k: self.top_k,
                seed: self.seed,
                ..pb::SamplingParams::default()
            }),
            stopping: Some(pb::StoppingParams {
                max_tokens: self.max_tokens,
                ignore_eos: self.ignore_eos,
                ..pb::StoppingParams::default()
            }),
            speculation: Some(pb::SpeculationParams {
                num_speculative_tokens: self.num_speculative_tokens,
            }),
            ..pb::GenerateStreamRequest::default()
        }
    }
}

/// `POST /api/generate`: one event for each step, then the end or an error.
pub(crate) async fn generate(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    request: Request,
) -> Response {
    let body = match body(request).await {
        Ok(body) => body,
        Err(response) => return response,
    };
    let request = match check(&app, &headers, &body) {
        Ok(prompt) => prompt.into_request(),
        Err(status) => return refusal(&status),
    };
    let messages = match app.engine.generate(CallContext::default(), request).await {
        Ok(messages) => messages,
        Err(status) => return refusal(&status),
    };
    let engine = Arc::clone(&app.engine);
    let events = messages.map(move |message| Ok::<_, Infallible>(event(&*engine, message)));
    Sse::new(events).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)).into_response()
}

async fn body(request: Request) -> Result<Bytes, Response> {
    match timeout(BODY_TIMEOUT, Bytes::from_request(request, &())).await {
        Ok(body) => body.map_err(IntoResponse::into_response),
        Err(_) => Err((StatusCode::REQUEST_TIMEOUT, "the body did not come\n").into_response()),
    }
}

fn check(app: &App, headers: &HeaderMap, body: &[u8]) -> Result<Prompt, Status> {
    if !app.config.prompts {
        return Err(Status::permission_denied("this listener takes no prompts"));
    }
    if !guard::is_same_origin(headers) {
        return Err(Status::permission_denied("pages of other origins may not send prompts"));
    }
    // A page of another origin cannot send this type without asking first.
    if !is_json(headers) {
        return Err(Status::invalid_argument("content-type: send application/json"));
    }
    serde_json::from_slice(body).map_err(|error| Status::invalid_argument(error.to_string()))
}

/// Whether a request says that it is JSON, with parameters such as a charset or without.
fn is_json(headers: &HeaderMap) -> bool {
    let kind = headers.get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    let kind = kind.split(';').next().unwrap_or_default();
    kind.trim().eq_ignore_ascii_case("application/json")
}

fn event(
    engine: &dyn InferenceEngine,
    message: Result<pb::GenerateStreamResponse, Status>,
) -> SseEvent {
    let (name, content) = match message {
        Ok(pb::GenerateStreamResponse { request_id, event, .. }) => match event {
            Some(Event::Delta(delta)) => ("step", step(engine, request_id, delta)),
            Some(Event::Finished(finished)) => ("finished", end(&finished)),
            _ => return SseEvent::default().comment("nothing to show"),
        },
        Err(status) => ("error", error(&status)),
    };
    SseEvent::default().event(name).data(content.to_string())
}

fn step(engine: &dyn InferenceEngine, request_id: u64, delta: pb::TokenDelta) -> Value {
    let text = |id: &u32| engine.token_text(*id);
    json!({
        "request_id": request_id,
        "token_ids": delta.token_ids,
        "text_pieces": delta.text_pieces,
        "n_accepted": delta.n_accepted,
        "draft_token_ids": delta.draft_token_ids,
        "draft_texts": delta.draft_token_ids.iter().map(text).collect::<Vec<_>>(),
    })
}

fn end(finished: &pb::GenerationFinished) -> Value {
    let usage = finished.usage.unwrap_or_default();
    json!({
        "finish_reason": finished.finish_reason().as_str_name(),
        "tail_text": finished.tail_text,
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_prompt_tokens": usage.cached_prompt_tokens,
        },
        "speculation": finished.speculation.as_ref().map(stats::speculation),
    })
}

fn error(status: &Status) -> Value {
    json!({ "code": code_name(status.code()), "message": status.message() })
}

fn refusal(status: &Status) -> Response {
    (http_status(status.code()), Json(json!({ "error": error(status) }))).into_response()
}

/// The HTTP status that gateways give a status code.
fn http_status(code: Code) -> StatusCode {
    match code {
        Code::InvalidArgument | Code::FailedPrecondition | Code::OutOfRange => {
            StatusCode::BAD_REQUEST
        }
        Code::Unauthenticated => StatusCode::UNAUTHORIZED,
        Code::PermissionDenied => StatusCode::FORBIDDEN,
        Code::NotFound => StatusCode::NOT_FOUND,
        Code::Aborted => StatusCode::CONFLICT,
        Code::ResourceExhausted => StatusCode::TOO_MANY_REQUESTS,
        Code::Unimplemented => StatusCode::NOT_IMPLEMENTED,
        Code::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
        Code::DeadlineExceeded => StatusCode::GATEWAY_TIMEOUT,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use tokio_stream::pending;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_body_that_does_not_come_is_not_waited_for() {
        let endless = Body::from_stream(pending::<Result<Bytes, Infallible>>());
        let response = body(Request::new(endless)).await.unwrap_err();
        assert_eq!(response.status(), StatusCode::REQUEST_TIMEOUT);
        assert_eq!(body(Request::new(Body::from("{}"))).await.unwrap(), "{}");
    }
}

//! The engine as services see it.

use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use grpc_api::control::v1 as control;
use grpc_api::inference::v1 as pb;
use tokio::time::Instant;
use tokio_stream::Stream;
use tonic::Status;
use tonic::metadata::MetadataMap;

use crate::timeout::timeout_of;

/// One message of a call, or the error that ends it.
type Message = Result<pb::GenerateStreamResponse, Status>;

/// The messages of a call, of all its outputs. Dropping it ends the outputs that are unfinished;
/// an error is its last item.
pub struct Messages {
    /// Names of the outputs in the order of their indices, as [`InferenceEngine::abort`] takes
    /// them; empty where they are not told before the messages.
    pub request_ids: Vec<u64>,
    stream: Pin<Box<dyn Stream<Item = Message> + Send>>,
}

impl Messages {
    /// What `stream` yields, of the outputs of these names.
    #[must_use]
    pub fn new(
        request_ids: Vec<u64>,
        stream: impl Stream<Item = Message> + Send + 'static,
    ) -> Self {
        Self { request_ids, stream: Box::pin(stream) }
    }
}

impl Stream for Messages {
    type Item = Message;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Message>> {
        self.stream.as_mut().poll_next(cx)
    }
}

/// What changes in the prefix cache.
pub type KvEventMessages =
    Pin<Box<dyn Stream<Item = Result<control::SubscribeKvEventsResponse, Status>> + Send>>;

/// An inference engine behind any number of services.
///
/// Requests, answers and statuses are those of the own API ([`pb`], [`control`]), which says in its
/// comments what each field means: the services of other APIs translate them. Every `Err` of a
/// method is a status that its caller may hand on.
#[async_trait::async_trait]
pub trait InferenceEngine: Send + Sync + 'static {
    /// Checks a request and starts it.
    async fn generate(
        &self,
        context: CallContext,
        request: pb::GenerateStreamRequest,
    ) -> Result<Messages, Status>;

    /// The ids of a text prompt, those that [`Self::generate`] makes of it.
    async fn tokenize(&self, text: String) -> Result<Vec<u32>, Status>;

    /// Ends an unfinished output, which then gets its last message; false for any other id.
    fn abort(&self, request_id: u64) -> bool;

    /// The model and the limits of a request.
    fn model_info(&self) -> Result<control::GetModelInfoResponse, Status>;

    /// The program and its capacity.
    fn server_info(&self) -> Result<control::GetServerInfoResponse, Status>;

    /// Load and totals.
    fn stats(&self) -> Result<control::GetStatsResponse, Status>;

    /// What changes in the prefix cache from now on, after a snapshot of what it holds.
    fn subscribe_kv_events(&self) -> Result<KvEventMessages, Status>;

    /// Empties the prefix cache before the next step.
    fn clear_prefix_cache(&self) -> Result<(), Status>;

    /// The folder with the model's `config.json` and tokenizer files, if there is one.
    fn checkpoint_dir(&self) -> Option<PathBuf>;

    /// The text of a token by itself, or the name of a special one; `None` where the model has no
    /// such token or no tokenizer. A part of a character is U+FFFD.
    fn token_text(&self, token_id: u32) -> Option<String> {
        let _ = token_id;
        None
    }

    /// Whether requests are served.
    fn state(&self) -> EngineState;

    /// Requests that were taken and have not ended.
    fn n_unfinished(&self) -> usize;

    /// Takes no more requests and goes on with those that it has.
    fn drain(&self);

    /// Takes no more requests and aborts those that it has.
    fn shutdown(&self);
}

/// What an engine does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EngineState {
    /// It reads its model.
    Loading,
    /// It takes requests.
    Serving,
    /// It takes no more requests.
    Draining,
    /// It has ended; the text says why.
    Dead(String),
}

/// What is known of a call beside its request.
#[derive(Clone, Default)]
pub struct CallContext {
    /// When the call is over.
    pub deadline: Option<Instant>,
    /// The caller's span, which the one of the call becomes a child of.
    pub trace: Option<TraceContext>,
    /// Kept as long as the call runs: a place among those that its key may take, say.
    pub hold: Option<Arc<dyn Send + Sync>>,
}

/// The headers of a W3C trace context, as they came.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceContext {
    /// `traceparent`.
    pub traceparent: String,
    /// `tracestate`.
    pub tracestate: Option<String>,
}

/// What a server layer puts among a request's extensions to have it kept as long as its call runs.
#[derive(Clone)]
pub struct Hold(pub Arc<dyn Send + Sync>);

impl CallContext {
    /// The context of a gRPC call: its `grpc-timeout`, `traceparent` and [`Hold`].
    #[must_use]
    pub fn of<T>(request: &tonic::Request<T>) -> Self {
        let metadata = request.metadata();
        Self {
            deadline: timeout_of(metadata.as_ref()).map(|timeout| Instant::now() + timeout),
            trace: TraceContext::of(metadata),
            hold: request.extensions().get::<Hold>().map(|hold| Arc::clone(&hold.0)),
        }
    }
}

impl TraceContext {
    fn of(metadata: &MetadataMap) -> Option<Self> {
        let text = |key| metadata.get(key).and_then(|value| value.to_str().ok()).map(str::to_owned);
        Some(Self { traceparent: text("traceparent")?, tracestate: text("tracestate") })
    }
}

//! [`InferenceEngine`] over an engine thread.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use engine::{EngineHandle, EventSink, SubmitError};
use engine_types::{BoxedStopTexts, Request as EngineRequest, RequestId};
use grpc_api::control::v1 as control;
use grpc_api::inference::v1 as pb;
use tokenization::Tokenizer;
use tonic::Status;
use tonic_types::FieldViolation;

use crate::call::{Call, CallOptions};
use crate::constraint::Constraints;
use crate::convert;
use crate::inference_engine::{
    CallContext, EngineState, InferenceEngine, KvEventMessages, Messages,
};
use crate::kv_events::KvEventStream;
use crate::observer::{CallObserver, RequestFacts, Unobserved};
use crate::output::Output;
use crate::prompt::PromptEncoder;
use crate::span::{CallSpan, LinkSpan};
use crate::status;
use crate::validate::{Valid, validate};

/// What clients are told about the model; the engine knows the rest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelInfo {
    /// Name under which the server offers the model.
    pub served_model_name: String,
    /// Architecture, as the checkpoint names it.
    pub architecture: String,
    /// Ids that end an output.
    pub eos_token_ids: Vec<u32>,
    /// Compute and KV cache type, such as `bfloat16`.
    pub dtype: String,
    /// Keys that a token attends at most; 0 where attention is dense.
    pub index_topk: u32,
    /// Whether draft steps after the first reuse its selection of keys.
    pub index_share: bool,
    /// Whether drafts are accepted by a schedule instead of by the model.
    pub synthetic_acceptance: bool,
    /// The folder with the model's `config.json` and tokenizer files.
    pub checkpoint_dir: Option<PathBuf>,
    /// What runs it.
    pub program: ProgramInfo,
}

/// What clients are told about the program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProgramInfo {
    /// Its version, with the commit it was built from as build metadata where that is known.
    pub version: String,
    /// What it computes on, such as `cpu`.
    pub device: String,
    /// Threads it computes with; 0 where that is not known.
    pub n_threads: u32,
    /// Versions of the libraries it computes with, by name.
    pub libraries: HashMap<String, String>,
}

impl Default for ProgramInfo {
    fn default() -> Self {
        Self {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            device: String::new(),
            n_threads: 0,
            libraries: HashMap::new(),
        }
    }
}

/// How requests are treated.
#[derive(Clone)]
pub struct FrontendConfig {
    /// Largest size of a request message in bytes, which services tell and keep to.
    pub max_request_bytes: usize,
    /// Steps of a stream that may wait for its reader before its request is aborted.
    pub max_buffered_steps: usize,
    /// Events of the prefix cache that may wait for the reader of a subscription, at least 1; one
    /// that falls further behind gets a new snapshot.
    pub max_buffered_kv_events: usize,
    /// Who hears of calls.
    pub observer: Arc<dyn CallObserver>,
    /// Makes the span of a call a child of its caller's.
    pub link_span: Option<LinkSpan>,
}

impl Default for FrontendConfig {
    fn default() -> Self {
        Self {
            max_request_bytes: 16 << 20,
            max_buffered_steps: 1024,
            max_buffered_kv_events: 4096,
            observer: Arc::new(Unobserved),
            link_span: None,
        }
    }
}

/// An engine thread as an [`InferenceEngine`]. It exists before the thread does, so that services
/// can say that the model is being read.
pub struct Frontend {
    config: FrontendConfig,
    loaded: OnceLock<Loaded>,
}

/// What exists once the model is read.
struct Loaded {
    engine: EngineHandle,
    prompts: PromptEncoder,
    constraints: Constraints,
    model: ModelInfo,
}

impl Frontend {
    /// One whose model is still being read.
    #[must_use]
    pub fn loading(config: FrontendConfig) -> Self {
        Self { config, loaded: OnceLock::new() }
    }

    /// One that serves at once.
    #[must_use]
    pub fn new(
        config: FrontendConfig,
        engine: EngineHandle,
        tokenizer: Option<Arc<Tokenizer>>,
        model: ModelInfo,
    ) -> Self {
        let frontend = Self::loading(config);
        frontend.serve(engine, tokenizer, model);
        frontend
    }

    /// Serves from now on. Without a tokenizer, prompts are ids and outputs have no text.
    ///
    /// # Panics
    ///
    /// If it serves already.
    pub fn serve(&self, engine: EngineHandle, tokenizer: Option<Arc<Tokenizer>>, model: ModelInfo) {
        let constraints = Constraints::new(tokenizer.as_deref(), &model.eos_token_ids);
        let prompts = PromptEncoder::new(tokenizer, engine.limits().max_model_len);
        let loaded = Loaded { engine, prompts, constraints, model };
        assert!(self.loaded.set(loaded).is_ok(), "a frontend has one engine");
    }

    fn loaded(&self) -> Result<&Loaded, Status> {
        self.loaded.get().ok_or_else(status::loading)
    }

    async fn start(
        &self,
        context: CallContext,
        request: pb::GenerateStreamRequest,
    ) -> Result<Call, Status> {
        let loaded = self.loaded()?;
        let span = CallSpan::new(&request, &loaded.model, &context, self.config.link_span);
        let started = loaded.start(&self.config, context, request, span.clone());
        let call = span.run(started).await;
        if let Err(status) = &call {
            span.failed(status.code());
        }
        call
    }
}

impl Loaded {
    /// Checks a request and hands it to the engine.
    async fn start(
        &self,
        config: &FrontendConfig,
        context: CallContext,
        mut request: pb::GenerateStreamRequest,
        span: CallSpan,
    ) -> Result<Call, Status> {
        let arrival = Instant::now();
        let (prompt, field) = self.prompts.ids(request.prompt.take()).await?;
        let tokenizer = self.prompts.tokenizer.as_deref();
        let valid = validate((&prompt, field), &request, &self.engine, tokenizer.is_some())?;
        let Valid { mut params, n_outputs, stops } = valid;
        let guide = self.constraints.guide(request.constraint.take()).await?;
        if params.temperature > 0.0 && params.seed.is_none() {
            params.seed = Some(random()?);
        }
        let detector = tokenizer
            .filter(|_| !stops.texts.is_empty())
            .map(|tokenizer| BoxedStopTexts(Box::new(tokenizer.stop_text_detector(&stops.texts))));
        let deadline = context.deadline;
        let n_prompt = u32::try_from(prompt.len()).unwrap_or(u32::MAX);
        let options = CallOptions {
            text: tokenizer.map(|tokenizer| tokenizer.output_text(&stops)),
            context,
            prompt: params.prompt_logprobs.map_or_else(Vec::new, |_| prompt.clone()),
            facts: RequestFacts { n_prompt, max_tokens: params.max_tokens, n: n_outputs },
            arrival,
            observer: Arc::clone(&config.observer),
            span,
        };
        // A client shall end no output but its own.
        let ids = (0..n_outputs).map(|_| random().map(RequestId)).collect::<Result<_, _>>()?;
        let (sinks, outputs) = self.outputs(ids, config.max_buffered_steps);
        let request = EngineRequest {
            cache_salt: request.cache_salt.map(String::into_bytes),
            priority: request.priority.unwrap_or(0),
            guide,
            stop_texts: detector,
            siblings: outputs[1..].iter().map(|output| output.id).collect(),
            ..EngineRequest::new(outputs[0].id, prompt, params)
        };
        self.engine
            .submit_all(request, sinks, deadline.map(tokio::time::Instant::into_std))
            .map_err(|error| match error {
                // Waiting would not help.
                SubmitError::QueueFull { limit } if n_outputs as usize > limit => {
                    let message = format!(
                        "{n_outputs} outputs are more than the {limit} that may be unfinished"
                    );
                    status::invalid_argument(vec![FieldViolation::new("sampling.n", message)])
                }
                error => status::refused(&error),
            })?;
        Ok(Call::new(outputs, options))
    }

    /// Both ends of the outputs of these ids.
    fn outputs(
        &self,
        ids: Vec<RequestId>,
        n_steps_max: usize,
    ) -> (Vec<Box<dyn EventSink>>, Vec<Output>) {
        let output = |id| {
            let (sink, output) = Output::new(self.engine.clone(), id, n_steps_max);
            (Box::new(sink) as Box<dyn EventSink>, output)
        };
        ids.into_iter().map(output).unzip()
    }
}

/// A number that nobody can guess.
fn random() -> Result<u64, Status> {
    getrandom::u64().map_err(|error| status::internal(&error.to_string()))
}

#[async_trait::async_trait]
impl InferenceEngine for Frontend {
    async fn generate(
        &self,
        context: CallContext,
        request: pb::GenerateStreamRequest,
    ) -> Result<Messages, Status> {
        match self.start(context, request).await {
            Ok(call) => Ok(Messages::new(call.request_ids(), call)),
            Err(status) => {
                self.config.observer.refused(status.code());
                Err(status)
            }
        }
    }

    async fn tokenize(&self, text: String) -> Result<Vec<u32>, Status> {
        let prompt = pb::generate_stream_request::Prompt::Text(text);
        self.loaded()?.prompts.ids(Some(prompt)).await.map(|(ids, _)| ids)
    }

    fn abort(&self, request_id: u64) -> bool {
        self.loaded.get().is_some_and(|loaded| loaded.engine.abort(RequestId(request_id)))
    }

    fn model_info(&self) -> Result<control::GetModelInfoResponse, Status> {
        let Loaded { engine, prompts, model, .. } = self.loaded()?;
        let limits = engine.limits();
        let model = model.clone();
        Ok(control::GetModelInfoResponse {
            served_model_name: model.served_model_name,
            architecture: model.architecture,
            vocab_size: limits.vocab_size,
            max_model_len: limits.max_model_len,
            eos_token_ids: model.eos_token_ids,
            num_speculative_tokens: engine.request_rules().num_speculative_tokens,
            dtype: model.dtype,
            has_tokenizer: prompts.tokenizer.is_some(),
            index_topk: model.index_topk,
            index_share: model.index_share,
            synthetic_acceptance: model.synthetic_acceptance,
        })
    }

    fn server_info(&self) -> Result<control::GetServerInfoResponse, Status> {
        let Loaded { engine, model, .. } = self.loaded()?;
        let limits = engine.limits();
        let ProgramInfo { version, device, n_threads, libraries } = model.program.clone();
        Ok(control::GetServerInfoResponse {
            version,
            block_size: limits.block_size,
            total_blocks: limits.num_blocks,
            max_num_seqs: limits.max_num_seqs,
            max_num_batched_tokens: limits.max_num_batched_tokens,
            max_request_bytes: self.config.max_request_bytes as u64,
            prefix_caching: engine.has_prefix_cache(),
            device,
            compute_threads: n_threads,
            libraries,
        })
    }

    fn stats(&self) -> Result<control::GetStatsResponse, Status> {
        let Loaded { engine, model, .. } = self.loaded()?;
        Ok(convert::stats(engine, model.index_topk > 0))
    }

    fn subscribe_kv_events(&self) -> Result<KvEventMessages, Status> {
        let engine = self.loaded()?.engine.clone();
        Ok(Box::pin(KvEventStream::new(engine, self.config.max_buffered_kv_events)?))
    }

    fn clear_prefix_cache(&self) -> Result<(), Status> {
        self.loaded()?.engine.clear_prefix_cache();
        Ok(())
    }

    fn checkpoint_dir(&self) -> Option<PathBuf> {
        self.loaded.get()?.model.checkpoint_dir.clone()
    }

    fn token_text(&self, token_id: u32) -> Option<String> {
        let bytes = self.loaded.get()?.prompts.tokenizer.as_deref()?.token_bytes(token_id)?;
        Some(String::from_utf8_lossy(bytes).into_owned())
    }

    fn state(&self) -> EngineState {
        let Some(Loaded { engine, .. }) = self.loaded.get() else { return EngineState::Loading };
        let stats = engine.stats();
        if let Some(fault) = engine.fault() {
            return EngineState::Dead(fault);
        }
        // One that has drained has stopped, as it was asked to.
        let is_over = stats.is_draining || !stats.is_alive;
        if is_over { EngineState::Draining } else { EngineState::Serving }
    }

    fn n_unfinished(&self) -> usize {
        self.loaded.get().map_or(0, |loaded| loaded.engine.stats().n_unfinished)
    }

    fn drain(&self) {
        if let Some(loaded) = self.loaded.get() {
            loaded.engine.drain();
        }
    }

    fn shutdown(&self) {
        if let Some(loaded) = self.loaded.get() {
            loaded.engine.shutdown();
        }
    }
}

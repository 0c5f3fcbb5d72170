//! `vllm.grpc.engine.VllmEngine`.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Instant;

use serving::{CallContext, EngineState, InferenceEngine, RequestNames, status};
use tokio::task::spawn_blocking;
use tokio_stream::{Stream, StreamExt as _};
use tonic::{Code, Request, Response, Status};

use crate::engine as pb;
use crate::engine::vllm_engine_server::{VllmEngine, VllmEngineServer};
use crate::generation::Generation;
use crate::reply::Reply;
use crate::{info, kv_events, request, tokenizer};

/// The service over an engine.
pub struct SmgService {
    engine: Arc<dyn InferenceEngine>,
    names: RequestNames,
    started: Instant,
}

/// The service over an engine. A request message of more than `max_request_bytes` is refused.
pub fn service(
    engine: Arc<dyn InferenceEngine>,
    max_request_bytes: usize,
) -> VllmEngineServer<SmgService> {
    let names = RequestNames::default();
    VllmEngineServer::new(SmgService { engine, names, started: Instant::now() })
        .max_decoding_message_size(max_request_bytes)
}

type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl VllmEngine for SmgService {
    type GenerateStream = Generation;
    type GetTokenizerStream = Answers<pb::GetTokenizerChunk>;
    type SubscribeKvEventsStream = Answers<pb::KvEventBatch>;

    async fn generate(
        &self,
        request: Request<pb::GenerateRequest>,
    ) -> Result<Response<Generation>, Status> {
        let context = CallContext::of(&request);
        let request = request.into_inner();
        let name = request.request_id.clone();
        let translated = request::translate(request)?;
        let refusal = translated.refusal();
        let call = self.names.take(&name).ok_or_else(|| {
            let message = format!("request_id: a request that has not ended is called `{name}`");
            status::with_reason(Code::AlreadyExists, "DUPLICATE_REQUEST", &message)
        })?;
        let messages = tokio::select! {
            biased;
            () = call.aborted() => return Err(Status::cancelled("aborted before it began")),
            started = self.engine.generate(context, translated.request) => {
                started.map_err(refusal)?
            }
        };
        Ok(Response::new(Generation::new(messages, call, Reply::new(translated.asked))))
    }

    async fn health_check(
        &self,
        _request: Request<pb::HealthCheckRequest>,
    ) -> Result<Response<pb::HealthCheckResponse>, Status> {
        let state = self.engine.state();
        let healthy = state == EngineState::Serving;
        let message = match state {
            EngineState::Serving => String::new(),
            // The gateway takes any answer for a reason to ask for the model, once and for all.
            EngineState::Loading => return Err(Status::unavailable("the model is being loaded")),
            EngineState::Draining => "the server takes no more requests".to_owned(),
            EngineState::Dead(reason) => format!("the engine is dead: {reason}"),
        };
        Ok(Response::new(pb::HealthCheckResponse { healthy, message }))
    }

    async fn flush_cache(
        &self,
        _request: Request<pb::FlushCacheRequest>,
    ) -> Result<Response<pb::FlushCacheResponse>, Status> {
        self.engine.clear_prefix_cache()?;
        Ok(Response::new(pb::FlushCacheResponse { success: true, message: String::new() }))
    }

    async fn abort(
        &self,
        request: Request<pb::AbortRequest>,
    ) -> Result<Response<pb::AbortResponse>, Status> {
        for name in request.into_inner().request_ids {
            // One that has ended meanwhile needs nothing.
            self.names.abort(&name);
        }
        Ok(Response::new(pb::AbortResponse {}))
    }

    async fn get_model_info(
        &self,
        _request: Request<pb::GetModelInfoRequest>,
    ) -> Result<Response<pb::GetModelInfoResponse>, Status> {
        let (model, checkpoint) = (self.engine.model_info()?, self.engine.checkpoint_dir());
        let read = spawn_blocking(move || info::model(model, checkpoint.as_deref()));
        read.await.map(Response::new).map_err(internal)
    }

    async fn get_server_info(
        &self,
        _request: Request<pb::GetServerInfoRequest>,
    ) -> Result<Response<pb::GetServerInfoResponse>, Status> {
        let (server, dtype) = (self.engine.server_info()?, self.engine.model_info()?.dtype);
        let uptime = self.started.elapsed().as_secs_f64();
        Ok(Response::new(info::server(&server, dtype, self.engine.n_unfinished(), uptime)))
    }

    async fn get_loads(
        &self,
        request: Request<pb::GetLoadsRequest>,
    ) -> Result<Response<pb::GetLoadsResponse>, Status> {
        let mut loads = info::loads(self.engine.server_info()?, &self.engine.stats()?);
        if request.into_inner().dp_rank.is_some_and(|rank| rank != 0) {
            loads.loads.clear();
        }
        Ok(Response::new(loads))
    }

    async fn get_tokenizer(
        &self,
        _request: Request<pb::GetTokenizerRequest>,
    ) -> Result<Response<Self::GetTokenizerStream>, Status> {
        let folder = self
            .engine
            .checkpoint_dir()
            .filter(|_| self.engine.model_info().is_ok_and(|model| model.has_tokenizer));
        let Some(folder) = folder else {
            return Err(Status::failed_precondition(
                "the model has no tokenizer, or is not loaded",
            ));
        };
        let archive =
            spawn_blocking(move || tokenizer::archive(&folder)).await.map_err(internal)?;
        let chunks = tokenizer::chunks(archive.map_err(internal)?);
        Ok(Response::new(Box::pin(tokio_stream::iter(chunks.map(Ok)))))
    }

    async fn subscribe_kv_events(
        &self,
        _request: Request<pb::SubscribeKvEventsRequest>,
    ) -> Result<Response<Self::SubscribeKvEventsStream>, Status> {
        let messages = self.engine.subscribe_kv_events()?;
        Ok(Response::new(Box::pin(messages.map(|message| message.map(kv_events::batch)))))
    }
}

fn internal(error: impl std::error::Error) -> Status {
    status::with_reason(Code::Internal, "INTERNAL", &error.to_string())
}

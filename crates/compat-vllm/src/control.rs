//! `vllm.Control`.

use std::pin::Pin;
use std::sync::Arc;

use serving::{InferenceEngine, RequestNames, status};
use tonic::{Code, Request, Response, Status};
use vllm_proto as vllm;
use vllm_proto::control_server::Control;

/// The API that a server of this family says it speaks.
const API: &str = "vllm";

const NO_LORA: &str = "there are no LoRA adapters";
const NO_PAUSE: &str = "generation is not paused; stop sending requests";
const NO_SLEEP: &str = "the server does not sleep; stop it, and start it when it is needed";
const NO_UPDATE: &str = "weights do not change while the server runs; start another one";

/// The service over an engine.
pub(crate) struct Service {
    engine: Arc<dyn InferenceEngine>,
    names: RequestNames,
    /// Tells this run of the server from others.
    instance_id: String,
}

impl Service {
    pub(crate) fn new(engine: Arc<dyn InferenceEngine>, names: RequestNames) -> Self {
        let instance_id = format!("{:016x}", getrandom::u64().unwrap_or_default());
        Self { engine, names, instance_id }
    }
}

/// The methods that only say why they do nothing, in the form that `async_trait` gives methods.
macro_rules! absent {
    ($($method:ident($request:ident) -> $response:ident: $reason:expr;)*) => {$(
        fn $method<'a, 'b>(
            &'a self,
            _request: Request<vllm::$request>,
        ) -> Pin<Box<dyn Future<Output = Result<Response<vllm::$response>, Status>> + Send + 'b>>
        where
            'a: 'b,
        {
            let refused = status::with_reason(Code::Unimplemented, "UNIMPLEMENTED", $reason);
            Box::pin(std::future::ready(Err(refused)))
        }
    )*};
}

#[tonic::async_trait]
impl Control for Service {
    async fn get_server_info(
        &self,
        _request: Request<vllm::GetServerInfoRequest>,
    ) -> Result<Response<vllm::ServerInfo>, Status> {
        let server = self.engine.server_info()?;
        Ok(Response::new(vllm::ServerInfo {
            engine_version: server.version,
            api_version: API.to_owned(),
            instance_id: self.instance_id.clone(),
            parallelism: Some(vllm::ParallelismInfo {
                tensor_parallel_size: 1,
                pipeline_parallel_size: 1,
                data_parallel_size: 1,
                data_parallel_rank: 0,
                decode_context_parallel_size: 1,
                world_size: 1,
                data_parallel_size_local: 1,
            }),
            max_model_len: self.engine.model_info()?.max_model_len,
            kv_block_size: server.block_size,
            total_kv_blocks: server.total_blocks.into(),
            max_running_requests: server.max_num_seqs.into(),
            max_batched_tokens: server.max_num_batched_tokens.into(),
            max_loras: 0,
            rl_capabilities: Some(vllm::RlCapabilities::default()),
            proto_version: vllm::VERSION.to_owned(),
            effective_attention_block_size: Some(server.block_size.into()),
        }))
    }

    async fn get_model_info(
        &self,
        _request: Request<vllm::GetModelInfoRequest>,
    ) -> Result<Response<vllm::ModelInfo>, Status> {
        let model = self.engine.model_info()?;
        // The caller reads its tokenizer there.
        let folder = self.engine.checkpoint_dir().and_then(|dir| std::path::absolute(dir).ok());
        let folder = folder.map(|dir| dir.to_string_lossy().into_owned());
        Ok(Response::new(vllm::ModelInfo {
            model_id: folder.unwrap_or_else(|| model.served_model_name.clone()),
            served_model_name: model.served_model_name,
            supports_text_input: model.has_tokenizer,
            supports_token_ids_input: true,
            ..vllm::ModelInfo::default()
        }))
    }

    async fn shutdown(
        &self,
        _request: Request<vllm::ShutdownRequest>,
    ) -> Result<Response<vllm::ShutdownResponse>, Status> {
        let message = "the server is not stopped by its callers; send its process SIGTERM, upon \
                       which it finishes what it has";
        Err(status::with_reason(Code::FailedPrecondition, "NOT_BY_CALL", message))
    }

    async fn abort(
        &self,
        request: Request<vllm::AbortRequest>,
    ) -> Result<Response<vllm::AbortResponse>, Status> {
        for name in request.into_inner().request_ids {
            // One that is unknown has ended.
            self.names.abort(&name);
        }
        Ok(Response::new(vllm::AbortResponse {}))
    }

    async fn get_kv_event_sources(
        &self,
        _request: Request<vllm::GetKvEventSourcesRequest>,
    ) -> Result<Response<vllm::GetKvEventSourcesResponse>, Status> {
        Ok(Response::new(vllm::GetKvEventSourcesResponse::default()))
    }

    absent! {
        load_lora(LoadLoraRequest) -> LoadLoraResponse: NO_LORA;
        unload_lora(UnloadLoraRequest) -> UnloadLoraResponse: NO_LORA;
        list_loras(ListLorasRequest) -> ListLorasResponse: NO_LORA;
        pause_generation(PauseGenerationRequest) -> PauseGenerationResponse: NO_PAUSE;
        resume_generation(ResumeGenerationRequest) -> ResumeGenerationResponse: NO_PAUSE;
        is_paused(IsPausedRequest) -> IsPausedResponse: NO_PAUSE;
        sleep(SleepRequest) -> SleepResponse: NO_SLEEP;
        wake_up(WakeUpRequest) -> WakeUpResponse: NO_SLEEP;
        is_sleeping(IsSleepingRequest) -> IsSleepingResponse: NO_SLEEP;
        init_weight_transfer_engine(InitWeightTransferEngineRequest)
            -> InitWeightTransferEngineResponse: NO_UPDATE;
        start_weight_update(StartWeightUpdateRequest) -> StartWeightUpdateResponse: NO_UPDATE;
        start_draft_weight_update(StartDraftWeightUpdateRequest)
            -> StartDraftWeightUpdateResponse: NO_UPDATE;
        update_weights(UpdateWeightsRequest) -> UpdateWeightsResponse: NO_UPDATE;
        finish_weight_update(FinishWeightUpdateRequest) -> FinishWeightUpdateResponse: NO_UPDATE;
        update_weight_version(UpdateWeightVersionRequest) -> UpdateWeightVersionResponse: NO_UPDATE;
        get_weight_version(GetWeightVersionRequest) -> GetWeightVersionResponse: NO_UPDATE;
    }
}

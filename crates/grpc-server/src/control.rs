//! `tandem.control.v1.ControlService`.

use engine::EngineHandle;
use grpc_api::control::v1 as pb;
use grpc_api::control::v1::control_service_server::ControlService;
use tonic::{Request, Response, Status};

use crate::convert;
use crate::kv_events::KvEventStream;
use crate::serve::ModelInfo;

/// The service's state.
pub(crate) struct Control {
    pub(crate) engine: EngineHandle,
    pub(crate) model: ModelInfo,
    pub(crate) has_tokenizer: bool,
    pub(crate) max_request_bytes: usize,
    pub(crate) max_buffered_kv_events: usize,
}

#[tonic::async_trait]
impl ControlService for Control {
    type SubscribeKvEventsStream = KvEventStream;

    async fn get_model_info(
        &self,
        _request: Request<pb::GetModelInfoRequest>,
    ) -> Result<Response<pb::GetModelInfoResponse>, Status> {
        let limits = self.engine.limits();
        let model = self.model.clone();
        Ok(Response::new(pb::GetModelInfoResponse {
            served_model_name: model.served_model_name,
            architecture: model.architecture,
            vocab_size: limits.vocab_size,
            max_model_len: limits.max_model_len,
            eos_token_ids: model.eos_token_ids,
            num_speculative_tokens: self.engine.request_rules().num_speculative_tokens,
            dtype: model.dtype,
            has_tokenizer: self.has_tokenizer,
            index_topk: model.index_topk,
            index_share: model.index_share,
            synthetic_acceptance: model.synthetic_acceptance,
        }))
    }

    async fn get_server_info(
        &self,
        _request: Request<pb::GetServerInfoRequest>,
    ) -> Result<Response<pb::GetServerInfoResponse>, Status> {
        let limits = self.engine.limits();
        Ok(Response::new(pb::GetServerInfoResponse {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            block_size: limits.block_size,
            total_blocks: limits.num_blocks,
            max_num_seqs: limits.max_num_seqs,
            max_num_batched_tokens: limits.max_num_batched_tokens,
            max_request_bytes: self.max_request_bytes as u64,
            prefix_caching: self.engine.has_prefix_cache(),
        }))
    }

    async fn get_stats(
        &self,
        _request: Request<pb::GetStatsRequest>,
    ) -> Result<Response<pb::GetStatsResponse>, Status> {
        Ok(Response::new(convert::stats(&self.engine, self.model.index_topk > 0)))
    }

    async fn subscribe_kv_events(
        &self,
        _request: Request<pb::SubscribeKvEventsRequest>,
    ) -> Result<Response<KvEventStream>, Status> {
        let stream = KvEventStream::new(self.engine.clone(), self.max_buffered_kv_events)?;
        Ok(Response::new(stream))
    }

    async fn clear_prefix_cache(
        &self,
        _request: Request<pb::ClearPrefixCacheRequest>,
    ) -> Result<Response<pb::ClearPrefixCacheResponse>, Status> {
        self.engine.clear_prefix_cache();
        Ok(Response::new(pb::ClearPrefixCacheResponse {}))
    }
}

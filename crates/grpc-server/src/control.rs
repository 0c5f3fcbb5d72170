//! `tandem.control.v1.ControlService`.

use std::sync::Arc;

use grpc_api::control::v1 as pb;
use grpc_api::control::v1::control_service_server::ControlService;
use serving::{InferenceEngine, KvEventMessages};
use tonic::{Request, Response, Status};

/// The service over an engine.
pub(crate) struct Control(pub(crate) Arc<dyn InferenceEngine>);

#[tonic::async_trait]
impl ControlService for Control {
    type SubscribeKvEventsStream = KvEventMessages;

    async fn get_model_info(
        &self,
        _request: Request<pb::GetModelInfoRequest>,
    ) -> Result<Response<pb::GetModelInfoResponse>, Status> {
        self.0.model_info().map(Response::new)
    }

    async fn get_server_info(
        &self,
        _request: Request<pb::GetServerInfoRequest>,
    ) -> Result<Response<pb::GetServerInfoResponse>, Status> {
        self.0.server_info().map(Response::new)
    }

    async fn get_stats(
        &self,
        _request: Request<pb::GetStatsRequest>,
    ) -> Result<Response<pb::GetStatsResponse>, Status> {
        self.0.stats().map(Response::new)
    }

    async fn subscribe_kv_events(
        &self,
        _request: Request<pb::SubscribeKvEventsRequest>,
    ) -> Result<Response<KvEventMessages>, Status> {
        self.0.subscribe_kv_events().map(Response::new)
    }

    async fn clear_prefix_cache(
        &self,
        _request: Request<pb::ClearPrefixCacheRequest>,
    ) -> Result<Response<pb::ClearPrefixCacheResponse>, Status> {
        self.0.clear_prefix_cache()?;
        Ok(Response::new(pb::ClearPrefixCacheResponse {}))
    }
}

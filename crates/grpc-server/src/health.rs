//! `grpc.health.v1.Health`, asked of the engine itself at each question.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use serving::{EngineState, InferenceEngine};
use tokio::time::interval;
use tokio_stream::wrappers::IntervalStream;
use tokio_stream::{Stream, StreamExt as _};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_server::Health as HealthService;
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};

/// How often the state is looked at for those who watch it.
const WATCH_INTERVAL: Duration = Duration::from_millis(50);

/// The health of a port's services.
#[derive(Clone)]
pub(crate) struct Health {
    pub(crate) engine: Arc<dyn InferenceEngine>,
    /// Names that are known; the empty one is the port as a whole.
    pub(crate) names: Arc<[&'static str]>,
    /// Cancelled once the server is to stop, whatever the engine says of itself.
    pub(crate) stopping: CancellationToken,
}

impl Health {
    /// The health of a service; `None` if there is no such service.
    fn of(&self, service: &str) -> Option<ServingStatus> {
        if !service.is_empty() && !self.names.contains(&service) {
            return None;
        }
        let serves = self.engine.state() == EngineState::Serving && !self.stopping.is_cancelled();
        Some(if serves { ServingStatus::Serving } else { ServingStatus::NotServing })
    }
}

#[tonic::async_trait]
impl HealthService for Health {
    async fn check(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<HealthCheckResponse>, Status> {
        let service = request.into_inner().service;
        let status = self.of(&service);
        let status = status.ok_or_else(|| {
            Status::not_found(format!("there is no service `{service}` on this port"))
        })?;
        Ok(Response::new(response(status)))
    }

    type WatchStream = Pin<Box<dyn Stream<Item = Result<HealthCheckResponse, Status>> + Send>>;

    async fn watch(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let (health, service) = (self.clone(), request.into_inner().service);
        let mut told = None;
        let changes = IntervalStream::new(interval(WATCH_INTERVAL)).filter_map(move |_| {
            // The protocol has a state for services that may come some day.
            let status = health.of(&service).unwrap_or(ServingStatus::ServiceUnknown);
            (told.replace(status) != Some(status)).then(|| Ok(response(status)))
        });
        Ok(Response::new(Box::pin(changes)))
    }
}

fn response(status: ServingStatus) -> HealthCheckResponse {
    HealthCheckResponse { status: status.into() }
}

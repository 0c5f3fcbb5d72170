//! Ports and what they offer.

use std::convert::Infallible;
use std::sync::Arc;

use grpc_api::control::v1::control_service_server::ControlServiceServer;
use grpc_api::inference::v1::inference_service_server::InferenceServiceServer;
use serving::InferenceEngine;
use tokio::net::TcpListener;
use tonic::body::Body;
use tonic::codegen::{Service, http};
use tonic::server::NamedService;
use tonic::service::RoutesBuilder;

use crate::control::Control;
use crate::inference::Inference;

/// A port and its services, beside which it has the health service.
#[derive(Debug)]
pub struct Port {
    /// Where it listens.
    pub listener: TcpListener,
    /// What it offers.
    pub services: Services,
}

/// The gRPC services of a port.
#[derive(Debug, Default)]
pub struct Services {
    pub(crate) routes: RoutesBuilder,
    /// Names under which health is reported.
    pub(crate) names: Vec<&'static str>,
}

impl Services {
    /// The own API: `tandem.inference.v1` and `tandem.control.v1`. A request message of more than
    /// `max_request_bytes` is refused with both sizes.
    #[must_use]
    pub fn own(engine: &Arc<dyn InferenceEngine>, max_request_bytes: usize) -> Self {
        let inference = InferenceServiceServer::new(Inference(Arc::clone(engine)));
        Self::default()
            .with(inference.max_decoding_message_size(max_request_bytes))
            .with(ControlServiceServer::new(Control(Arc::clone(engine))))
    }

    /// These and another one.
    #[must_use]
    pub fn with<S>(mut self, service: S) -> Self
    where
        S: Service<http::Request<Body>, Response = http::Response<Body>, Error = Infallible>,
        S: NamedService + Clone + Send + Sync + 'static,
        S::Future: Send + 'static,
    {
        self.names.push(S::NAME);
        self.routes.add_service(service);
        self
    }
}

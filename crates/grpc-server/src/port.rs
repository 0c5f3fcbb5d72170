//! Ports and what they offer.

use std::convert::Infallible;
use std::sync::Arc;

use grpc_api::control::v1::control_service_server::ControlServiceServer;
use grpc_api::inference::v1::inference_service_server::InferenceServiceServer;
use serving::InferenceEngine;
use tokio::net::TcpListener;
use tonic::body::Body;
use tonic::codec::CompressionEncoding::{Gzip, Zstd};
use tonic::codegen::{Service, http};
use tonic::server::NamedService;
use tonic::service::RoutesBuilder;
use tonic_reflection::server::Builder;

use crate::access::Access;
use crate::control::Control;
use crate::inference::Inference;
use crate::tls::Tls;

/// A port and its services, beside which it has the health service.
#[derive(Debug)]
pub struct Port {
    /// Where it listens.
    pub listener: TcpListener,
    /// What it offers.
    pub services: Services,
    /// To whom.
    pub security: Security,
}

/// How a port is protected; by default not at all.
#[derive(Debug, Default)]
pub struct Security {
    /// Its certificate; without it nothing is encrypted.
    pub tls: Option<Tls>,
    /// Its keys.
    pub access: Access,
}

/// The gRPC services of a port.
#[derive(Debug, Default)]
pub struct Services {
    pub(crate) routes: RoutesBuilder,
    /// Names under which health is reported.
    pub(crate) names: Vec<&'static str>,
    /// Encoded descriptors, for reflection.
    descriptors: Vec<&'static [u8]>,
}

impl Services {
    /// The own API: `tandem.inference.v1` and `tandem.control.v1`. A request message of more than
    /// `max_request_bytes` is refused with both sizes. Messages may come compressed by gzip or
    /// zstd; none are sent so, since tokens are few bytes.
    #[must_use]
    pub fn own(engine: &Arc<dyn InferenceEngine>, max_request_bytes: usize) -> Self {
        let inference = InferenceServiceServer::new(Inference(Arc::clone(engine)))
            .max_decoding_message_size(max_request_bytes)
            .accept_compressed(Gzip)
            .accept_compressed(Zstd);
        let control = ControlServiceServer::new(Control(Arc::clone(engine)))
            .accept_compressed(Gzip)
            .accept_compressed(Zstd);
        Self::default().with(inference).with(control).described_by(grpc_api::FILE_DESCRIPTOR_SET)
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

    /// Tells reflection about services: their `FileDescriptorSet`, encoded, with its imports.
    #[must_use]
    pub fn described_by(mut self, descriptors: &'static [u8]) -> Self {
        self.descriptors.push(descriptors);
        self
    }

    /// These and the reflection services `v1` and `v1alpha`, which describe all that was described
    /// before, health and themselves.
    ///
    /// # Panics
    ///
    /// If descriptors are not what a compiler of `.proto` files makes.
    #[must_use]
    pub fn with_reflection(mut self) -> Self {
        let builder = || {
            let health = tonic_health::pb::FILE_DESCRIPTOR_SET;
            let all = self.descriptors.iter().copied().chain([health]);
            all.fold(Builder::configure(), Builder::register_encoded_file_descriptor_set)
        };
        let v1 = builder().build_v1().expect("descriptors are of a compiler");
        let v1alpha = builder().build_v1alpha().expect("descriptors are of a compiler");
        self.routes.add_service(v1).add_service(v1alpha);
        self
    }
}

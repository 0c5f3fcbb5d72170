//! A server on a loopback port around a test engine.

use std::net::SocketAddr;
use std::ops::Deref;
use std::sync::Arc;

use grpc_api::inference::v1::inference_service_client::InferenceServiceClient;
use grpc_api::inference::v1::{GenerateRequest, GeneratedOutput};
use grpc_server::{Port, Security, ServeConfig, Services, serve};
use serving::InferenceEngine;
pub(crate) use test_engine::*;
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tonic::transport::Channel;

pub(crate) struct Server {
    pub(crate) of: TestEngine,
    pub(crate) address: SocketAddr,
    pub(crate) channel: Channel,
    pub(crate) stop: Option<oneshot::Sender<()>>,
    pub(crate) serving: JoinHandle<()>,
}

impl Deref for Server {
    type Target = TestEngine;

    fn deref(&self) -> &TestEngine {
        &self.of
    }
}

impl Server {
    pub(crate) async fn start(setup: Setup) -> Self {
        Self::start_with(setup, ServeConfig::default()).await
    }

    pub(crate) async fn start_with(setup: Setup, config: ServeConfig) -> Self {
        Self::start_secured(setup, config, Security::default()).await
    }

    pub(crate) async fn start_secured(
        setup: Setup,
        config: ServeConfig,
        security: Security,
    ) -> Self {
        let max_request_bytes = setup.frontend.max_request_bytes;
        let of = TestEngine::start(setup);
        let engine: Arc<dyn InferenceEngine> = of.frontend.clone();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, stopped) = oneshot::channel();
        let services = Services::own(&engine, max_request_bytes).with_reflection();
        let port = Port { listener, services, security };
        let serving = tokio::spawn(async move {
            let stopped = async { stopped.await.unwrap_or_default() };
            serve(vec![port], config, engine, stopped).await.unwrap();
        });
        let channel = Channel::from_shared(format!("http://{address}")).unwrap();
        let channel = channel.connect().await.unwrap();
        Self { of, address, channel, stop: Some(stop), serving }
    }

    pub(crate) fn client(&self) -> InferenceServiceClient<Channel> {
        InferenceServiceClient::new(self.channel.clone())
    }

    /// The only output of a request that must succeed.
    pub(crate) async fn generate(&self, request: GenerateRequest) -> GeneratedOutput {
        let mut reply = self.client().generate(request).await.unwrap().into_inner();
        assert_eq!(reply.outputs.len(), 1);
        reply.outputs.remove(0)
    }

    /// A small request that must succeed.
    pub(crate) async fn check_serves(&self) {
        let output = self.generate(unary(&[10, 11], 3)).await;
        assert_eq!(output.token_ids, [12, 13, 14]);
    }
}

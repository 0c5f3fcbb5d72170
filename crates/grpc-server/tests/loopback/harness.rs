//! A server on a loopback port around a test engine.

use std::net::SocketAddr;
use std::ops::Deref;
use std::sync::Arc;

use grpc_api::inference::v1::inference_service_client::InferenceServiceClient;
use grpc_api::inference::v1::{GenerateRequest, GeneratedOutput};
use grpc_server::{Port, Security, ServeConfig, Services, serve};
use h2::SendStream;
use h2::client::ResponseFuture;
use prost::Message;
use prost::bytes::Bytes;
use serving::InferenceEngine;
pub(crate) use test_engine::*;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tonic::Status;
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
        let channel = channel.connect_lazy();
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

/// A client that says on the wire what it is told to, and looks at no clock.
pub(crate) struct Raw {
    connection: h2::client::SendRequest<Bytes>,
    driver: JoinHandle<()>,
    authority: SocketAddr,
}

impl Raw {
    pub(crate) async fn connect(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).await.unwrap();
        // A small window, which a stream that is not read fills at once.
        let mut client = h2::client::Builder::new();
        client.initial_window_size(1024);
        let (connection, driver) = client.handshake(stream).await.unwrap();
        // It ends with an error where a test makes the server close the connection.
        let driver = tokio::spawn(async move { driver.await.unwrap_or_default() });
        Self { connection, driver, authority: address }
    }

    /// Closes the connection.
    pub(crate) fn close(&self) {
        self.driver.abort();
    }

    /// Starts a call of the inference service, with its headers and without its message.
    pub(crate) async fn open(
        &self,
        method: &str,
        headers: &[(&str, &str)],
    ) -> Result<(ResponseFuture, SendStream<Bytes>), h2::Error> {
        let path = format!("tandem.inference.v1.InferenceService/{method}");
        let mut request = http::Request::post(format!("http://{}/{path}", self.authority))
            .header("content-type", "application/grpc")
            .header("te", "trailers");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let mut connection = self.connection.clone().ready().await?;
        connection.send_request(request.body(()).unwrap(), false)
    }

    /// Makes a call and reads it to its end.
    pub(crate) async fn call(
        &self,
        method: &str,
        headers: &[(&str, &str)],
        message: &impl Message,
    ) -> Status {
        let (response, mut body) = self.open(method, headers).await.unwrap();
        body.send_data(framed(message), true).unwrap();
        status(response).await
    }
}

/// A message with the length before it, as gRPC sends it.
pub(crate) fn framed(message: &impl Message) -> Bytes {
    let message = message.encode_to_vec();
    let mut framed = vec![0];
    framed.extend(u32::try_from(message.len()).unwrap().to_be_bytes());
    framed.extend(message);
    framed.into()
}

/// Reads an answer to its end.
pub(crate) async fn status(response: ResponseFuture) -> Status {
    end(response.await.unwrap()).await
}

/// Reads an answer that has begun to its end.
pub(crate) async fn end(response: http::Response<h2::RecvStream>) -> Status {
    let (head, mut body) = response.into_parts();
    while let Some(data) = body.data().await {
        let n_bytes = data.unwrap().len();
        body.flow_control().release_capacity(n_bytes).unwrap();
    }
    let trailers = body.trailers().await.unwrap();
    Status::from_header_map(trailers.as_ref().unwrap_or(&head.headers)).unwrap()
}

//! The engine behind its gRPC port on loopback.

use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::Result;
use engine::{EngineHandle, EngineThread};
use grpc_api::control::v1::control_service_client::ControlServiceClient;
use grpc_api::control::v1::{GetStatsRequest, GetStatsResponse};
use grpc_api::inference::v1::inference_service_client::InferenceServiceClient;
use grpc_api::inference::v1::{GenerateStreamRequest, GenerateStreamResponse};
use grpc_server::{Port, Security, ServeConfig, Services};
use model_config::ModelConfig;
use model_runner::RunnerOptions;
use models::ComputeDtype;
use serving::{Frontend, FrontendConfig, InferenceEngine, ModelInfo};
use tokenization::Tokenizer;
use tokio::net::TcpListener;
use tonic::Streaming;
use tonic::transport::Channel;

use crate::harness;
use crate::oracle::Checkpoint;

/// A server on a port of its own; it ends with the runtime it was started in, the engine with this.
pub struct Server {
    /// The engine behind the port.
    pub engine: EngineHandle,
    address: SocketAddr,
    _thread: EngineThread,
}

impl Server {
    /// Loads a bundled checkpoint and serves it, without a prefix cache.
    ///
    /// # Errors
    ///
    /// If the engine, its tokenizer or the port fails.
    pub async fn start(
        checkpoint: Checkpoint,
        dtype: ComputeDtype,
        options: &RunnerOptions,
    ) -> Result<Self> {
        Self::of_engine(checkpoint, harness::start(checkpoint, dtype, options)?).await
    }

    /// As [`Self::start`], with a prefix cache.
    ///
    /// # Errors
    ///
    /// As [`Self::start`].
    pub async fn start_cached(
        checkpoint: Checkpoint,
        dtype: ComputeDtype,
        options: &RunnerOptions,
    ) -> Result<Self> {
        Self::of_engine(checkpoint, harness::start_cached(checkpoint, dtype, options)?).await
    }

    async fn of_engine(
        checkpoint: Checkpoint,
        (engine, thread): (EngineHandle, EngineThread),
    ) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let tokenizer = Some(Arc::new(Tokenizer::load(&checkpoint.dir()?)?));
        let dsa = ModelConfig::load(&checkpoint.dir()?)?.dsa;
        let index_topk = dsa.map_or(Ok(0), |dsa| dsa.index_topk.try_into())?;
        let model = ModelInfo { index_topk, ..ModelInfo::default() };
        let frontend: Arc<dyn InferenceEngine> =
            Arc::new(Frontend::new(FrontendConfig::default(), engine.clone(), tokenizer, model));
        let services = Services::own(&frontend, 16 << 20);
        let port = Port { listener, services, security: Security::default() };
        let forever = std::future::pending();
        tokio::spawn(grpc_server::serve(vec![port], ServeConfig::default(), frontend, forever));
        Ok(Self { engine, address, _thread: thread })
    }

    /// A connection of its own.
    ///
    /// # Errors
    ///
    /// If the port does not answer.
    pub async fn connect(&self) -> Result<Channel> {
        Ok(Channel::from_shared(format!("http://{}", self.address))?.connect().await?)
    }

    /// Sends a request on a connection of its own.
    ///
    /// # Errors
    ///
    /// If the port does not answer or the server refuses.
    pub async fn stream(
        &self,
        request: GenerateStreamRequest,
    ) -> Result<Streaming<GenerateStreamResponse>> {
        let mut client = InferenceServiceClient::new(self.connect().await?);
        Ok(client.generate_stream(request).await?.into_inner())
    }

    /// The statistics that the control service tells.
    ///
    /// # Errors
    ///
    /// If the port does not answer or the server fails.
    pub async fn stats(&self) -> Result<GetStatsResponse> {
        let mut control = ControlServiceClient::new(self.connect().await?);
        Ok(control.get_stats(GetStatsRequest {}).await?.into_inner())
    }
}

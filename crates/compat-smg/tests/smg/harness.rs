//! The service on a loopback port, over a test engine.

use std::ops::Deref;
use std::sync::Arc;

use compat_smg::engine::generate_request::Input;
use compat_smg::engine::generate_response::Response;
use compat_smg::engine::vllm_engine_client::VllmEngineClient;
use compat_smg::engine::{
    GenerateComplete, GenerateRequest, GenerateResponse, GenerateStreamChunk, SamplingParams,
    TokenizedInput,
};
use serving::InferenceEngine;
pub(crate) use test_engine::*;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::transport::Channel;
use tonic::{Status, Streaming};

pub(crate) type Client = VllmEngineClient<Channel>;

pub(crate) struct Server {
    of: TestEngine,
    pub(crate) channel: Channel,
    serving: JoinHandle<()>,
}

impl Deref for Server {
    type Target = TestEngine;

    fn deref(&self) -> &TestEngine {
        &self.of
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

impl Server {
    pub(crate) async fn start(setup: Setup) -> Self {
        let of = TestEngine::start(setup);
        let (channel, serving) = serve(of.frontend.clone()).await;
        Self { of, channel, serving }
    }

    pub(crate) fn client(&self) -> Client {
        VllmEngineClient::new(self.channel.clone())
    }

    pub(crate) async fn generate(&self, request: GenerateRequest) -> Result<Answer, Status> {
        read(self.client().generate(request).await?.into_inner()).await
    }
}

/// A service over an engine, on a port of its own.
pub(crate) async fn serve(engine: Arc<dyn InferenceEngine>) -> (Channel, JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let serving = tokio::spawn(async move {
        let router =
            tonic::transport::Server::builder().add_service(compat_smg::service(engine, 1 << 20));
        router.serve_with_incoming(TcpListenerStream::new(listener)).await.unwrap();
    });
    let channel = Channel::from_shared(format!("http://{address}")).unwrap();
    (channel.connect().await.unwrap(), serving)
}

/// Everything that a call said.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Answer {
    pub(crate) chunks: Vec<GenerateStreamChunk>,
    pub(crate) completes: Vec<GenerateComplete>,
}

impl Answer {
    /// The streamed tokens of an output.
    pub(crate) fn streamed(&self, index: u32) -> Vec<u32> {
        let of_output = self.chunks.iter().filter(|chunk| chunk.index == index);
        of_output.flat_map(|chunk| chunk.token_ids.clone()).collect()
    }
}

/// Reads a call to its end.
pub(crate) async fn read(mut stream: Streaming<GenerateResponse>) -> Result<Answer, Status> {
    let mut answer = Answer::default();
    while let Some(message) = stream.message().await? {
        match message.response.unwrap() {
            Response::Chunk(chunk) => answer.chunks.push(chunk),
            Response::Complete(complete) => answer.completes.push(complete),
        }
    }
    Ok(answer)
}

/// A greedy streaming request for `max_tokens` tokens that nothing else ends.
pub(crate) fn request(name: &str, prompt: &[u32], max_tokens: u32) -> GenerateRequest {
    let tokenized = TokenizedInput { input_ids: prompt.to_vec(), ..TokenizedInput::default() };
    GenerateRequest {
        request_id: name.to_owned(),
        input: Some(Input::Tokenized(tokenized)),
        sampling_params: Some(SamplingParams {
            temperature: Some(0.0),
            max_tokens: Some(max_tokens),
            ignore_eos: true,
            ..SamplingParams::default()
        }),
        stream: true,
        ..GenerateRequest::default()
    }
}

/// The same with other parameters.
pub(crate) fn with(
    mut request: GenerateRequest,
    change: impl FnOnce(&mut SamplingParams),
) -> GenerateRequest {
    change(request.sampling_params.as_mut().unwrap());
    request
}

//! A server of vLLM's API on a loopback port.

use std::ops::Deref;
use std::sync::Arc;

use grpc_server::{Port, Security, ServeConfig, Services, serve};
use serving::InferenceEngine;
use test_engine::{Script, Setup, TestEngine};
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tonic::Status;
use tonic::transport::Channel;
use vllm_proto::control_client::ControlClient;
use vllm_proto::generate_request::Prompt;
use vllm_proto::inference_client::InferenceClient;
use vllm_proto::{
    FinishInfo, GenerateRequest, GenerateResponse, PromptInfo, ResponseOptions, SequenceOutput,
    StoppingCriteria, TokenIds,
};

/// The texts of a small model's ids; id 0 is special and ends an output.
pub(crate) const TEXTS: &[&str] = &[
    "<s>", "z", "{", "}", "\"", ":", ",", " ", "a", "b", "c", "d", "e", "yes", "no", "1", "2", "3",
    "[", "]", "true", "null", ".", "-",
];

/// A port and its clients; it closes with this.
pub(crate) struct Clients {
    pub(crate) channel: Channel,
    _stop: oneshot::Sender<()>,
}

impl Clients {
    pub(crate) async fn of(engine: Arc<dyn InferenceEngine>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (inference, control) = compat_vllm::services(&engine, 1 << 20);
        let services = Services::default().with(inference).with(control);
        let port = Port { listener, services, security: Security::default() };
        let (stop, stopped) = oneshot::channel();
        let stopped = async { stopped.await.unwrap_or_default() };
        tokio::spawn(serve(vec![port], ServeConfig::default(), engine, stopped));
        let channel = Channel::from_shared(format!("http://{address}")).unwrap().connect_lazy();
        Self { channel, _stop: stop }
    }

    pub(crate) fn inference(&self) -> InferenceClient<Channel> {
        InferenceClient::new(self.channel.clone())
    }

    pub(crate) fn control(&self) -> ControlClient<Channel> {
        ControlClient::new(self.channel.clone())
    }

    /// All messages of a stream.
    pub(crate) async fn stream(
        &self,
        request: GenerateRequest,
    ) -> Result<Vec<GenerateResponse>, Status> {
        let mut stream = self.inference().generate_stream(request).await?.into_inner();
        let mut messages = vec![];
        while let Some(message) = stream.message().await? {
            messages.push(message);
        }
        Ok(messages)
    }

    /// Sends a request with one output both ways, checks that both answers say the same, and
    /// returns what they say.
    pub(crate) async fn both(&self, request: GenerateRequest) -> (PromptInfo, SequenceOutput) {
        let unary = self.inference().generate(request.clone()).await.unwrap().into_inner();
        let messages = self.stream(request).await.unwrap();
        let mut prompts = messages.iter().filter_map(|message| message.prompt_info.as_ref());
        let prompt = prompts.next().unwrap().clone();
        assert!(messages[0].prompt_info.is_some() && prompts.next().is_none());
        let mut output = SequenceOutput::default();
        let mut pieces = messages.into_iter().map(|message| message.outputs.unwrap()).peekable();
        while let Some(piece) = pieces.next() {
            assert_eq!(piece.finish_info.is_some(), pieces.peek().is_none());
            output.text += &piece.text;
            output.num_tokens += piece.num_tokens;
            output.token_ids.extend(piece.token_ids);
            output.logprobs.extend(piece.logprobs);
            output.ranks.extend(piece.ranks);
            output.candidate_tokens.extend(piece.candidate_tokens);
            output.finish_info = piece.finish_info;
        }
        let (mut finish, mut of_unary) = (output.clone(), unary.outputs.unwrap());
        // What is cached depends on what ran before.
        for output in [&mut finish, &mut of_unary] {
            output.finish_info.as_mut().unwrap().num_cached_tokens = None;
        }
        assert_eq!((unary.prompt_info.as_ref(), &of_unary), (Some(&prompt), &finish));
        assert_eq!(output.finish_info.as_ref().unwrap().num_output_tokens, output.num_tokens);
        (prompt, output)
    }
}

/// An engine behind a port.
pub(crate) struct Server {
    pub(crate) of: TestEngine,
    clients: Clients,
}

impl Deref for Server {
    type Target = Clients;

    fn deref(&self) -> &Clients {
        &self.clients
    }
}

impl Server {
    pub(crate) async fn start(setup: Setup) -> Self {
        let of = TestEngine::start(setup);
        let clients = Clients::of(of.frontend.clone()).await;
        Self { of, clients }
    }

    /// A model of [`TEXTS`] that says what the script says.
    pub(crate) async fn scripted(script: Script) -> Self {
        Self::start(scripted(script)).await
    }

    /// The same, which says `tokens` behind a prompt of one token.
    pub(crate) async fn saying(tokens: &'static [u32]) -> Self {
        Self::scripted(Script::fixed(TEXTS.len(), 1, tokens)).await
    }
}

pub(crate) fn scripted(script: Script) -> Setup {
    let mut setup =
        Setup { tokenizer: true, texts: TEXTS, eos_token_ids: &[0], ..Setup::default() };
    setup.limits.vocab_size = u32::try_from(TEXTS.len()).unwrap();
    Setup { script: Some(script), ..setup }
}

/// A request for up to `max_new_tokens` tokens with their ids.
pub(crate) fn request(prompt: &[u32], max_new_tokens: u32) -> GenerateRequest {
    GenerateRequest {
        prompt: Some(Prompt::TokenIds(TokenIds { ids: prompt.to_vec() })),
        stopping: Some(StoppingCriteria { max_new_tokens, ..StoppingCriteria::default() }),
        response: Some(ResponseOptions { output_token_ids: true, ..ResponseOptions::default() }),
        ..GenerateRequest::default()
    }
}

pub(crate) fn named(name: &str, request: GenerateRequest) -> GenerateRequest {
    GenerateRequest { request_id: name.to_owned(), ..request }
}

pub(crate) fn end_of(output: &SequenceOutput) -> &FinishInfo {
    output.finish_info.as_ref().unwrap()
}

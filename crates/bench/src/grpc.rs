//! Tandem's own API as a target.

use grpc_api::control::v1 as control;
use grpc_api::control::v1::control_service_client::ControlServiceClient;
use grpc_api::inference::v1 as pb;
use grpc_api::inference::v1::generate_stream_request::Prompt as PbPrompt;
use grpc_api::inference::v1::generate_stream_response::Event;
use grpc_api::inference::v1::inference_service_client::InferenceServiceClient;
use tokio_stream::StreamExt as _;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status};

use crate::target::{Counters, Failure, Piece, Pieces, Target, Totals};
use crate::workload::{Planned, Prompt};

/// Puts a bearer token on calls, if there is one.
#[derive(Clone)]
struct Bearer(Option<MetadataValue<Ascii>>);

impl Interceptor for Bearer {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some(token) = &self.0 {
            request.metadata_mut().insert("authorization", token.clone());
        }
        Ok(request)
    }
}

type Authorized = InterceptedService<Channel, Bearer>;

/// A Tandem server behind its gRPC port.
pub struct GrpcTarget {
    inference: InferenceServiceClient<Authorized>,
    control: ControlServiceClient<Authorized>,
}

impl GrpcTarget {
    /// Connects to `url`, such as `http://127.0.0.1:50051`, with a bearer token if there is one.
    ///
    /// # Errors
    ///
    /// If the address or the token is malformed, or if nothing answers.
    pub async fn connect(url: &str, token: Option<&str>) -> Result<Self, Failure> {
        let connection = |error: tonic::transport::Error| {
            Failure::new("connection", format!("{url}: {error}: is the server running?"))
        };
        let endpoint = Endpoint::from_shared(url.to_owned()).map_err(connection)?;
        let channel = endpoint.tcp_nodelay(true).connect().await.map_err(connection)?;
        Self::over(channel, token)
    }

    /// The same over a connection that stands.
    ///
    /// # Errors
    ///
    /// If the token is malformed.
    pub fn over(channel: Channel, token: Option<&str>) -> Result<Self, Failure> {
        let bearer = token.map(|token| MetadataValue::try_from(format!("Bearer {token}")));
        let bearer = bearer.transpose().map_err(|_| {
            Failure::new("token", "the token has characters that no header may have")
        })?;
        let channel = InterceptedService::new(channel, Bearer(bearer));
        let control = ControlServiceClient::new(channel.clone());
        Ok(Self { inference: InferenceServiceClient::new(channel), control })
    }

    /// What the server says of its model.
    ///
    /// # Errors
    ///
    /// If the call fails.
    pub async fn model_info(&self) -> Result<control::GetModelInfoResponse, Failure> {
        let call = self.control.clone().get_model_info(control::GetModelInfoRequest {}).await;
        call.map(tonic::Response::into_inner).map_err(|status| failure(&status))
    }

    /// What the server says of itself.
    ///
    /// # Errors
    ///
    /// If the call fails.
    pub async fn server_info(&self) -> Result<control::GetServerInfoResponse, Failure> {
        let call = self.control.clone().get_server_info(control::GetServerInfoRequest {}).await;
        call.map(tonic::Response::into_inner).map_err(|status| failure(&status))
    }
}

pub(crate) fn failure(status: &Status) -> Failure {
    Failure::new(format!("{:?}", status.code()), status.message())
}

/// The request of the own API.
pub(crate) fn request(planned: &Planned) -> pb::GenerateStreamRequest {
    pb::GenerateStreamRequest {
        prompt: Some(match &planned.prompt {
            Prompt::Text(text) => PbPrompt::Text(text.clone()),
            Prompt::TokenIds(ids) => PbPrompt::TokenIds(pb::TokenIds { ids: ids.clone() }),
        }),
        sampling: Some(pb::SamplingParams {
            temperature: Some(planned.temperature),
            seed: planned.seed,
            ..pb::SamplingParams::default()
        }),
        stopping: Some(pb::StoppingParams {
            max_tokens: Some(planned.max_tokens),
            ignore_eos: Some(planned.ignore_eos),
            ..pb::StoppingParams::default()
        }),
        speculation: planned
            .num_speculative_tokens
            .map(|k| pb::SpeculationParams { num_speculative_tokens: Some(k) }),
        ..pb::GenerateStreamRequest::default()
    }
}

#[async_trait::async_trait]
impl Target for GrpcTarget {
    async fn send(&self, planned: &Planned) -> Result<Pieces, Failure> {
        let call = self.inference.clone().generate_stream(request(planned)).await;
        let messages = call.map_err(|status| failure(&status))?.into_inner();
        Ok(Box::pin(messages.filter_map(piece)))
    }

    async fn forget_prompts(&self) -> Result<bool, Failure> {
        let request = control::ClearPrefixCacheRequest {};
        let call = self.control.clone().clear_prefix_cache(request).await;
        call.map(|_| true).map_err(|status| failure(&status))
    }

    async fn counters(&self) -> Result<Option<Counters>, Failure> {
        let call = self.control.clone().get_stats(control::GetStatsRequest {}).await;
        let stats = call.map_err(|status| failure(&status))?.into_inner();
        Ok(Some(counters(&stats)))
    }
}

/// What a message of an answer adds, if anything.
pub(crate) fn piece(
    message: Result<pb::GenerateStreamResponse, Status>,
) -> Option<Result<Piece, Failure>> {
    let message = match message {
        Ok(message) => message,
        Err(status) => return Some(Err(failure(&status))),
    };
    match message.event? {
        Event::Delta(delta) => {
            let n_tokens = u32::try_from(delta.token_ids.len()).unwrap_or(u32::MAX);
            (n_tokens > 0).then_some(Ok(Piece::Tokens(n_tokens)))
        }
        Event::Finished(finished) => Some(Ok(Piece::Finished(totals(&finished)))),
        Event::PromptLogprobs(_) => None,
    }
}

fn totals(finished: &pb::GenerationFinished) -> Totals {
    let usage = finished.usage.as_ref();
    Totals {
        n_prompt: usage.map(|usage| usage.prompt_tokens),
        n_output: usage.map(|usage| usage.completion_tokens),
    }
}

/// What the own API counts.
pub(crate) fn counters(stats: &control::GetStatsResponse) -> Counters {
    let speculation = stats.speculation.clone().unwrap_or_default();
    let indexer = stats.indexer.as_ref();
    let parts = indexer.iter().flat_map(|indexer| {
        indexer.target_prefill.iter().chain(&indexer.target_verify).chain(&indexer.draft_steps)
    });
    let (indexer_launches, indexer_scored_keys) = parts
        .fold((0, 0), |(launches, keys), part| (launches + part.launches, keys + part.scored_keys));
    Counters {
        verify_steps: speculation.verify_steps,
        draft_tokens: speculation.draft_tokens,
        accepted_tokens: speculation.accepted_tokens,
        drafted_per_position: speculation.drafted_per_position,
        accepted_per_position: speculation.accepted_per_position,
        decode_steps: stats.decode_steps,
        prefill_steps: stats.prefill_steps,
        mixed_steps: stats.mixed_steps,
        preemptions: stats.preemptions,
        prefix_queried_tokens: stats.prefix_queried_tokens,
        prefix_hit_tokens: stats.prefix_hit_tokens,
        indexer_launches,
        indexer_scored_keys,
    }
}

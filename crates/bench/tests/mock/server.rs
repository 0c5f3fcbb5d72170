//! The mock server: the own API over an in-memory connection, in the time of the test.

use std::sync::{Arc, Mutex, PoisonError};

use grpc_api::control::v1 as control;
use grpc_api::control::v1::control_service_server::{ControlService, ControlServiceServer};
use grpc_api::inference::v1 as pb;
use grpc_api::inference::v1::generate_stream_request::Prompt;
use grpc_api::inference::v1::generate_stream_response::Event;
use grpc_api::inference::v1::inference_service_server::{InferenceService, InferenceServiceServer};
use hyper_util::rt::TokioIo;
use tokio::io::DuplexStream;
use tokio::sync::mpsc;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Request, Response, Status};

use crate::truth::{N_DRAFTS, Script, Step};

/// A connection to a server of its own.
pub(crate) async fn start(script: Script) -> Channel {
    let (client, server) = tokio::io::duplex(1 << 20);
    let mock = Mock { script, turn: Arc::default(), stats: Arc::default() };
    let service = Server::builder()
        .add_service(InferenceServiceServer::new(mock.clone()))
        .add_service(ControlServiceServer::new(mock));
    let incoming = tokio_stream::once(Ok::<DuplexStream, std::io::Error>(server));
    tokio::spawn(service.serve_with_incoming(incoming));
    let mut client = Some(client);
    let connector = tower::service_fn(move |_| {
        let client = client.take().map(TokioIo::new);
        async move { client.ok_or_else(|| std::io::Error::other("there is one connection")) }
    });
    Endpoint::from_static("http://mock").connect_with_connector(connector).await.unwrap()
}

#[derive(Clone)]
struct Mock {
    script: Script,
    /// Held by the request that is being served, where there is one at a time.
    turn: Arc<tokio::sync::Mutex<()>>,
    stats: Arc<Mutex<control::GetStatsResponse>>,
}

type Sender = mpsc::UnboundedSender<Result<pb::GenerateStreamResponse, Status>>;

#[tonic::async_trait]
impl InferenceService for Mock {
    type GenerateStreamStream = UnboundedReceiverStream<Result<pb::GenerateStreamResponse, Status>>;

    async fn generate_stream(
        &self,
        request: Request<pb::GenerateStreamRequest>,
    ) -> Result<Response<Self::GenerateStreamStream>, Status> {
        let Some(Prompt::TokenIds(ids)) = request.into_inner().prompt else {
            return Err(Status::invalid_argument("ids"));
        };
        let (sender, messages) = mpsc::unbounded_channel();
        let mock = self.clone();
        tokio::spawn(async move {
            let _turn = match mock.script.one_at_a_time {
                true => Some(mock.turn.lock().await),
                false => None,
            };
            mock.answer(ids.ids[0], &sender).await;
        });
        Ok(Response::new(UnboundedReceiverStream::new(messages)))
    }

    async fn generate(
        &self,
        _request: Request<pb::GenerateRequest>,
    ) -> Result<Response<pb::GenerateResponse>, Status> {
        Err(Status::unimplemented("streams only"))
    }

    async fn abort_request(
        &self,
        _request: Request<pb::AbortRequestRequest>,
    ) -> Result<Response<pb::AbortRequestResponse>, Status> {
        Err(Status::unimplemented("streams only"))
    }
}

#[tonic::async_trait]
impl ControlService for Mock {
    async fn get_stats(
        &self,
        _request: Request<control::GetStatsRequest>,
    ) -> Result<Response<control::GetStatsResponse>, Status> {
        tokio::time::sleep(self.script.stats_take).await;
        let stats = self.stats.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(Response::new(stats.clone()))
    }

    async fn clear_prefix_cache(
        &self,
        _request: Request<control::ClearPrefixCacheRequest>,
    ) -> Result<Response<control::ClearPrefixCacheResponse>, Status> {
        Ok(Response::new(control::ClearPrefixCacheResponse::default()))
    }

    async fn get_model_info(
        &self,
        _request: Request<control::GetModelInfoRequest>,
    ) -> Result<Response<control::GetModelInfoResponse>, Status> {
        Err(Status::unimplemented("no model"))
    }

    async fn get_server_info(
        &self,
        _request: Request<control::GetServerInfoRequest>,
    ) -> Result<Response<control::GetServerInfoResponse>, Status> {
        Err(Status::unimplemented("no server"))
    }

    type SubscribeKvEventsStream =
        UnboundedReceiverStream<Result<control::SubscribeKvEventsResponse, Status>>;

    async fn subscribe_kv_events(
        &self,
        _request: Request<control::SubscribeKvEventsRequest>,
    ) -> Result<Response<Self::SubscribeKvEventsStream>, Status> {
        Err(Status::unimplemented("no events"))
    }
}

impl Mock {
    async fn answer(&self, index: u32, sender: &Sender) {
        let answer = self.script.answer(index);
        let send = |event| {
            let event = Some(event);
            // A client that has been cut reads no more.
            let _ = sender.send(Ok(pb::GenerateStreamResponse { event, ..Default::default() }));
        };
        let mut n_output = 0;
        for (idx, (pause, n_tokens)) in answer.messages.into_iter().enumerate() {
            tokio::time::sleep(pause).await;
            n_output += n_tokens;
            self.count(Script::step(index, idx), n_tokens);
            let token_ids = vec![7; n_tokens as usize];
            send(Event::Delta(pb::TokenDelta { token_ids, ..Default::default() }));
        }
        if answer.fails {
            let _ = sender.send(Err(Status::unavailable("as scripted")));
            return;
        }
        let usage =
            Some(pb::Usage { prompt_tokens: 1, completion_tokens: n_output, ..Default::default() });
        send(Event::Finished(pb::GenerationFinished { usage, ..Default::default() }));
    }

    /// Counts a step; each that continues an output verifies drafts, all but one of whose tokens
    /// were drafts.
    fn count(&self, step: Step, n_tokens: u32) {
        let mut stats = self.stats.lock().unwrap_or_else(PoisonError::into_inner);
        match step {
            Step::Prefill => stats.prefill_steps += 1,
            Step::Mixed => stats.mixed_steps += 1,
            Step::Decode => {
                stats.decode_steps += 1;
                let speculation = stats.speculation.get_or_insert_default();
                speculation.verify_steps += 1;
                speculation.draft_tokens += u64::from(N_DRAFTS);
                speculation.accepted_tokens += u64::from(n_tokens) - 1;
                speculation.drafted_per_position.resize(N_DRAFTS as usize, 0);
                speculation.accepted_per_position.resize(N_DRAFTS as usize, 0);
                for position in 0..N_DRAFTS {
                    let is_accepted = position + 1 < n_tokens;
                    let position = position as usize;
                    speculation.drafted_per_position[position] += 1;
                    speculation.accepted_per_position[position] += u64::from(is_accepted);
                }
            }
        }
    }
}

//! The mock server: the own API over an in-memory connection, in the time of the test.

use std::sync::Arc;

use grpc_api::inference::v1 as pb;
use grpc_api::inference::v1::generate_stream_request::Prompt;
use grpc_api::inference::v1::generate_stream_response::Event;
use grpc_api::inference::v1::inference_service_server::{InferenceService, InferenceServiceServer};
use hyper_util::rt::TokioIo;
use tokio::io::DuplexStream;
use tokio::sync::{Mutex, mpsc};
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Request, Response, Status};

use crate::truth::Script;

/// A connection to a server of its own.
pub(crate) async fn start(script: Script) -> Channel {
    let (client, server) = tokio::io::duplex(1 << 20);
    let service = InferenceServiceServer::new(Mock { script, turn: Arc::default() });
    let incoming = tokio_stream::once(Ok::<DuplexStream, std::io::Error>(server));
    tokio::spawn(Server::builder().add_service(service).serve_with_incoming(incoming));
    let mut client = Some(client);
    let connector = tower::service_fn(move |_| {
        let client = client.take().map(TokioIo::new);
        async move { client.ok_or_else(|| std::io::Error::other("there is one connection")) }
    });
    Endpoint::from_static("http://mock").connect_with_connector(connector).await.unwrap()
}

struct Mock {
    script: Script,
    /// Held by the request that is being served, where there is one at a time.
    turn: Arc<Mutex<()>>,
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
        let (script, turn) = (self.script, Arc::clone(&self.turn));
        tokio::spawn(async move {
            let _turn = match script.one_at_a_time {
                true => Some(turn.lock().await),
                false => None,
            };
            answer(script, ids.ids[0], &sender).await;
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

async fn answer(script: Script, index: u32, sender: &Sender) {
    let answer = script.answer(index);
    let send = |event| {
        let event = Some(event);
        // A client that has been cut reads no more.
        let _ = sender.send(Ok(pb::GenerateStreamResponse { event, ..Default::default() }));
    };
    let mut n_output = 0;
    for (pause, n_tokens) in answer.messages {
        tokio::time::sleep(pause).await;
        n_output += n_tokens;
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

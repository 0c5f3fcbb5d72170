//! What clients without the `.proto` files are told.

use std::collections::BTreeSet;

use grpc_server::{Port, Security, ServeConfig, Services, serve};
use tokio::net::TcpListener;
use tonic::Code;
use tonic::transport::Channel;

use crate::harness::{Server, Setup};

/// A client of one version of the protocol.
macro_rules! client {
    ($name:ident, $version:ident) => {
        mod $name {
            use tonic::transport::Channel;
            use tonic_reflection::pb::$version::server_reflection_client::ServerReflectionClient;
            use tonic_reflection::pb::$version::server_reflection_request::MessageRequest;
            use tonic_reflection::pb::$version::server_reflection_response::MessageResponse;
            use tonic_reflection::pb::$version::{
                ListServiceResponse, ServerReflectionRequest, ServerReflectionResponse,
            };

            async fn ask(channel: &Channel, request: MessageRequest) -> MessageResponse {
                let request = ServerReflectionRequest {
                    message_request: Some(request),
                    ..ServerReflectionRequest::default()
                };
                let mut client = ServerReflectionClient::new(channel.clone());
                let answers = client.server_reflection_info(tokio_stream::once(request)).await;
                let answer: ServerReflectionResponse =
                    answers.unwrap().into_inner().message().await.unwrap().unwrap();
                answer.message_response.unwrap()
            }

            pub(super) async fn services(channel: &Channel) -> Vec<String> {
                let list = MessageRequest::ListServices(String::new());
                let MessageResponse::ListServicesResponse(ListServiceResponse { service }) =
                    ask(channel, list).await
                else {
                    panic!("no list");
                };
                service.into_iter().map(|service| service.name).collect()
            }

            /// The number of files that describe a symbol.
            pub(super) async fn n_files(channel: &Channel, symbol: &str) -> usize {
                let symbol = MessageRequest::FileContainingSymbol(symbol.to_owned());
                match ask(channel, symbol).await {
                    MessageResponse::FileDescriptorResponse(files) => {
                        files.file_descriptor_proto.len()
                    }
                    other => panic!("{other:?}"),
                }
            }
        }
    };
}

client!(new, v1);
client!(old, v1alpha);

#[tokio::test]
async fn both_versions_describe_all_services() {
    let server = Server::start(Setup::default()).await;
    let channel = &server.channel;
    let own = [
        "grpc.health.v1.Health",
        "tandem.control.v1.ControlService",
        "tandem.inference.v1.InferenceService",
    ];
    for services in [new::services(channel).await, old::services(channel).await] {
        let services: BTreeSet<String> = services.into_iter().collect();
        assert!(own.iter().all(|name| services.contains(*name)), "{services:?}");
    }
    for symbol in own.into_iter().chain(["tandem.inference.v1.SamplingParams"]) {
        assert!(new::n_files(channel, symbol).await > 0, "{symbol}");
        assert!(old::n_files(channel, symbol).await > 0, "{symbol}");
    }
}

#[tokio::test]
async fn a_port_without_reflection_describes_nothing() {
    let server = Server::start(Setup::default()).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let engine: std::sync::Arc<dyn serving::InferenceEngine> = server.frontend.clone();
    let services = Services::own(&engine, 1 << 20);
    let port = Port { listener, services, security: Security::default() };
    tokio::spawn(serve(vec![port], ServeConfig::default(), engine, std::future::pending()));
    let channel = Channel::from_shared(format!("http://{address}")).unwrap().connect_lazy();
    let mut client =
        tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient::new(channel);
    let status = client.server_reflection_info(tokio_stream::empty()).await.unwrap_err();
    assert_eq!(status.code(), Code::Unimplemented);
}

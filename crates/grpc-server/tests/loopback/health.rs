//! What load balancers see: loading, serving, draining, dead.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use grpc_server::{Port, Security, ServeConfig, Services, serve};
use serving::{Frontend, FrontendConfig, InferenceEngine, ModelInfo};
use test_engine::TestEngine;
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::time::timeout;
use tonic::transport::Channel;
use tonic::{Code, Streaming};
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};
use tonic_types::StatusExt;

use crate::harness::{FAIL_FOR_GOOD, HOLD, OK, PATIENCE, Server, Setup, streaming, unary};

/// The port as a whole, and its services.
const NAMES: [&str; 3] =
    ["", "tandem.inference.v1.InferenceService", "tandem.control.v1.ControlService"];

async fn watch(channel: &Channel, name: &str) -> Streaming<HealthCheckResponse> {
    let request = HealthCheckRequest { service: name.to_owned() };
    HealthClient::new(channel.clone()).watch(request).await.unwrap().into_inner()
}

async fn next(watched: &mut Streaming<HealthCheckResponse>) -> ServingStatus {
    timeout(PATIENCE, watched.message()).await.unwrap().unwrap().unwrap().status()
}

#[tokio::test]
async fn a_watcher_sees_loading_serving_and_draining() {
    let frontend = Arc::new(Frontend::loading(FrontendConfig::default()));
    let engine: Arc<dyn InferenceEngine> = frontend.clone();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let services = Services::own(&engine, 1 << 20);
    let port = Port { listener, services, security: Security::default() };
    let (stop, stopped) = oneshot::channel::<()>();
    let stopped = async { stopped.await.unwrap_or_default() };
    let serving = tokio::spawn(serve(vec![port], ServeConfig::default(), engine, stopped));
    let channel = Channel::from_shared(url).unwrap().connect_lazy();
    let mut watched = vec![];
    for name in NAMES {
        watched.push(watch(&channel, name).await);
        assert_eq!(next(watched.last_mut().unwrap()).await, ServingStatus::NotServing, "{name}");
    }
    let mut client = grpc_api::inference::v1::inference_service_client::InferenceServiceClient::new(
        channel.clone(),
    );
    let status = client.generate(unary(&[1], 2)).await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);
    assert_eq!(status.get_details_error_info().unwrap().reason, "LOADING");

    let of = TestEngine::start(Setup::default());
    frontend.serve(of.engine.clone(), None, ModelInfo::default());
    for watched in &mut watched {
        assert_eq!(next(watched).await, ServingStatus::Serving);
    }
    of.fault.store(HOLD, Ordering::SeqCst);
    let mut stream = client.generate_stream(streaming(&[1], 20)).await.unwrap().into_inner();
    stop.send(()).unwrap();
    for watched in &mut watched {
        assert_eq!(next(watched).await, ServingStatus::NotServing);
    }
    // What runs goes on to its end.
    of.fault.store(OK, Ordering::SeqCst);
    while stream.message().await.unwrap().is_some() {}
    timeout(PATIENCE, serving).await.unwrap().unwrap().unwrap();
}

#[tokio::test]
async fn a_watcher_sees_the_engine_die() {
    let server = Server::start(Setup::default()).await;
    let mut watched = vec![];
    for name in NAMES {
        let mut of_name = watch(&server.channel, name).await;
        while next(&mut of_name).await != ServingStatus::Serving {}
        watched.push(of_name);
    }
    server.fault.store(FAIL_FOR_GOOD, Ordering::SeqCst);
    server.client().generate(unary(&[1], 2)).await.unwrap_err();
    for watched in &mut watched {
        assert_eq!(next(watched).await, ServingStatus::NotServing);
    }
}

#[tokio::test]
async fn an_unknown_service_is_not_found() {
    let server = Server::start(Setup::default()).await;
    let request = HealthCheckRequest { service: "vllm.Inference".to_owned() };
    let status = HealthClient::new(server.channel.clone()).check(request).await.unwrap_err();
    assert_eq!(status.code(), Code::NotFound);
}

//! Keys: who may call what, and how much at once.

use std::sync::atomic::Ordering;
use std::time::Instant;

use grpc_api::control::v1::control_service_client::ControlServiceClient;
use grpc_api::control::v1::{ClearPrefixCacheRequest, GetStatsRequest, SubscribeKvEventsRequest};
use grpc_server::{Access, KeySet, Security, ServeConfig};
use tonic::{Code, Request, Status};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_types::StatusExt;

use crate::harness::{HOLD, OK, PATIENCE, Server, Setup, streaming, unary};

fn keys(content: &str) -> Option<KeySet> {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), content).unwrap();
    Some(KeySet::read(file.path()).unwrap())
}

pub(crate) async fn server(
    setup: Setup,
    usual: Option<&str>,
    admin: Option<&str>,
    n_max: Option<u32>,
) -> Server {
    let access = Access::new(usual.and_then(keys), admin.and_then(keys), n_max).unwrap();
    let security = Security { access, ..Security::default() };
    Server::start_secured(setup, ServeConfig::default(), security).await
}

/// A request with this authorization, if it is not empty.
pub(crate) fn with<T>(authorization: &str, message: T) -> Request<T> {
    let mut request = Request::new(message);
    if !authorization.is_empty() {
        request.metadata_mut().insert("authorization", authorization.parse().unwrap());
    }
    request
}

/// What becomes of a usual call and of each admin call.
async fn codes(server: &Server, authorization: &str) -> [Code; 5] {
    fn code<T>(answer: Result<T, Status>) -> Code {
        match answer {
            Ok(_) => Code::Ok,
            Err(status) => {
                assert!(status.get_details_error_info().is_some(), "{status:?}");
                assert!(!status.message().contains("hush"), "{status:?}");
                status.code()
            }
        }
    }
    let mut control = ControlServiceClient::new(server.channel.clone());
    let mut reflection = ServerReflectionClient::new(server.channel.clone());
    let none = tokio_stream::empty();
    [
        code(server.client().generate(with(authorization, unary(&[1], 2))).await),
        code(control.get_stats(with(authorization, GetStatsRequest {})).await),
        code(control.clear_prefix_cache(with(authorization, ClearPrefixCacheRequest {})).await),
        code(control.subscribe_kv_events(with(authorization, SubscribeKvEventsRequest {})).await),
        code(reflection.server_reflection_info(with(authorization, none)).await),
    ]
}

const USUAL: &str = "ann:hush-1\nbob:hush-2\n";
const ADMIN: &str = "eve:hush-3\n";
const NO: Code = Code::Unauthenticated;
const DENIED: Code = Code::PermissionDenied;

#[tokio::test]
async fn calls_need_a_key_and_admin_calls_one_of_their_own() {
    let server = server(Setup::default(), Some(USUAL), Some(ADMIN), None).await;
    let strangers =
        ["", "Bearer", "Bearer ", "Bearer hush", "Basic hush-1", "hush-1", "Bearer ann"];
    for authorization in strangers {
        assert_eq!(codes(&server, authorization).await, [NO; 5], "{authorization}");
    }
    let usual = [Code::Ok, Code::Ok, DENIED, DENIED, DENIED];
    for authorization in ["Bearer hush-1", "bearer hush-2"] {
        assert_eq!(codes(&server, authorization).await, usual, "{authorization}");
    }
    assert_eq!(codes(&server, "Bearer hush-3").await, [Code::Ok; 5]);
    let health =
        HealthClient::new(server.channel.clone()).check(HealthCheckRequest::default()).await;
    health.unwrap();
}

#[tokio::test]
async fn without_admin_keys_nobody_is_admin_and_without_usual_ones_others_are_free() {
    let server = self::server(Setup::default(), Some(USUAL), None, None).await;
    let usual = [Code::Ok, Code::Ok, DENIED, DENIED, DENIED];
    assert_eq!(codes(&server, "Bearer hush-1").await, usual);
    let server = self::server(Setup::default(), None, Some(ADMIN), None).await;
    assert_eq!(codes(&server, "").await, [Code::Ok, Code::Ok, NO, NO, NO]);
    assert_eq!(codes(&server, "Bearer hush-1").await, [Code::Ok, Code::Ok, NO, NO, NO]);
    assert_eq!(codes(&server, "Bearer hush-3").await, [Code::Ok; 5]);
}

#[tokio::test]
async fn reasons_are_told_apart() {
    let server = server(Setup::default(), Some(USUAL), None, None).await;
    let reasons = [("", "KEY_MISSING"), ("Basic x", "KEY_MALFORMED"), ("Bearer x", "UNKNOWN_KEY")];
    for (authorization, reason) in reasons {
        let answer = server.client().generate(with(authorization, unary(&[1], 2))).await;
        let info = answer.unwrap_err().get_details_error_info().unwrap();
        assert_eq!(info.reason, reason);
    }
    assert!(Access::new(keys("a:same\n"), keys("b:same\n"), None).is_err());
}

#[tokio::test]
async fn a_key_has_its_number_of_calls_and_a_stream_counts_to_its_end() {
    let server = server(Setup::default(), Some(USUAL), Some(ADMIN), Some(2)).await;
    server.fault.store(HOLD, Ordering::SeqCst);
    let unary_call = {
        let mut client = server.client();
        tokio::spawn(async move { client.generate(with("Bearer hush-1", unary(&[1], 8))).await })
    };
    server.wait_until_unfinished(1).await;
    let mut client = server.client();
    let mut stream = client
        .generate_stream(with("Bearer hush-1", streaming(&[1], 8)))
        .await
        .unwrap()
        .into_inner();
    let refused = client.generate(with("Bearer hush-1", unary(&[1], 8))).await.unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted);
    assert_eq!(refused.get_details_error_info().unwrap().reason, "KEY_BUSY");
    assert!(refused.get_details_retry_info().is_some());
    let quota = refused.get_details_quota_failure().unwrap().violations;
    assert_eq!(quota[0].subject, "key:ann");
    assert!(!format!("{refused:?}").contains("hush"), "{refused:?}");
    // Another key has its own places, an admin key needs none.
    let mut others = vec![];
    for token in ["Bearer hush-2", "Bearer hush-3", "Bearer hush-3", "Bearer hush-3"] {
        others.push(client.generate_stream(with(token, streaming(&[1], 8))).await.unwrap());
    }
    server.fault.store(OK, Ordering::SeqCst);
    unary_call.await.unwrap().unwrap();
    while stream.message().await.unwrap().is_some() {}
    let mut all = vec![];
    for _ in 0..2 {
        all.push(start_when_free(&server).await);
    }
    drop((all, others));
    server.wait_until_empty().await;
}

/// Starts a stream as soon as its key has a place: the server sees an end a little later.
pub(crate) async fn start_when_free(
    server: &Server,
) -> tonic::Streaming<grpc_api::inference::v1::GenerateStreamResponse> {
    let started = Instant::now();
    loop {
        let request = with("Bearer hush-1", streaming(&[1], 4000));
        match server.client().generate_stream(request).await {
            Ok(stream) => return stream.into_inner(),
            Err(status) => assert_eq!(status.code(), Code::ResourceExhausted, "{status:?}"),
        }
        assert!(started.elapsed() < PATIENCE);
        tokio::time::sleep(std::time::Duration::from_millis(1)).await;
    }
}

//! What a connection may ask of the server: sizes, headers, streams, resets, age.

use std::time::{Duration, Instant};

use grpc_api::inference::v1::GenerateStreamRequest;
use grpc_api::inference::v1::inference_service_client::InferenceServiceClient;
use grpc_server::ServeConfig;
use h2::Reason;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tonic::Code;
use tonic::codec::CompressionEncoding::{self, Gzip, Zstd};
use tonic::transport::Channel;

use crate::harness::{PATIENCE, Raw, Server, Setup, framed, status, streaming, unary};

#[tokio::test]
async fn messages_may_be_compressed_and_answers_are_not() {
    let mut setup = Setup::default();
    setup.frontend.max_request_bytes = 1 << 20;
    let server = Server::start(setup).await;
    for encoding in [Gzip, Zstd] {
        let client = || client(&server, encoding);
        let answer = client().generate(unary(&[1], 3)).await.unwrap();
        assert!(answer.metadata().get("grpc-encoding").is_none(), "{:?}", answer.metadata());
        assert_eq!(answer.into_inner().outputs[0].token_ids, [2, 3, 4]);
        // A kilobyte or so on the wire.
        let large = unary(&vec![1; 2 << 20], 3);
        let status = client().generate(large).await.unwrap_err();
        assert_eq!(status.code(), Code::ResourceExhausted, "{status:?}");
        assert!(status.message().contains("1048576"), "{status:?}");
    }
    server.check_serves().await;
}

fn client(server: &Server, encoding: CompressionEncoding) -> InferenceServiceClient<Channel> {
    server.client().send_compressed(encoding).accept_compressed(Gzip).accept_compressed(Zstd)
}

#[tokio::test]
async fn long_headers_are_refused_and_others_go_on() {
    let config = ServeConfig { max_header_list_bytes: 8 << 10, ..ServeConfig::default() };
    let server = Server::start_with(Setup::default(), config).await;
    let raw = Raw::connect(server.address).await;
    let fits = "x".repeat(4 << 10);
    let answer = raw.call("Generate", &[("x-note", &fits)], &streaming(&[1], 2)).await;
    assert_eq!(answer.code(), Code::Ok);
    let long = "x".repeat(9 << 10);
    let (response, _body) = raw.open("Generate", &[("x-note", &long)]).await.unwrap();
    match response.await {
        Ok(response) => assert_eq!(response.status().as_u16(), 431),
        Err(error) => assert!(error.reason().is_some(), "{error}"),
    }
    server.check_serves().await;
}

#[tokio::test]
async fn more_calls_than_a_connection_may_have_wait() {
    let config = ServeConfig { max_concurrent_streams: 2, ..ServeConfig::default() };
    let server = Server::start_with(Setup::default(), config).await;
    server.check_serves().await;
    let mut streams = vec![];
    for _ in 0..2 {
        streams.push(server.client().generate_stream(streaming(&[1], 4000)).await.unwrap());
    }
    let mut client = server.client();
    let third = client.generate_stream(streaming(&[1], 4000));
    tokio::pin!(third);
    // Another connection has its own.
    let other = Raw::connect(server.address).await;
    let request = streaming(&[1], 40);
    for _ in 0..3 {
        tokio::select! {
            _ = &mut third => panic!("two streams are all that the connection may have"),
            answer = other.call("Generate", &[], &request) => {
                assert_eq!(answer.code(), Code::Ok);
            }
        }
    }
    streams.pop();
    third.await.unwrap();
}

#[tokio::test]
async fn streams_that_are_reset_at_once_do_no_harm() {
    let server = Server::start(Setup::default()).await;
    let raw = Raw::connect(server.address).await;
    let mut refused = None;
    for _ in 0..20_000 {
        match raw.open("Generate", &[]).await {
            Ok((_, mut body)) => {
                body.send_data(framed(&streaming(&[1], 4000)), true).unwrap_or_default();
                body.send_reset(Reason::CANCEL);
            }
            Err(error) => {
                refused = Some(error);
                break;
            }
        }
    }
    if let Some(error) = refused {
        assert_eq!(error.reason(), Some(Reason::ENHANCE_YOUR_CALM), "{error}");
    }
    server.wait_until_empty().await;
    server.check_serves().await;
}

#[tokio::test]
async fn an_old_connection_finishes_its_calls_and_gets_no_new_ones() {
    let config = ServeConfig {
        max_connection_age: Some(Duration::from_millis(200)),
        ..ServeConfig::default()
    };
    let setup = Setup { step_time: Duration::from_millis(10), ..Setup::default() };
    let server = Server::start_with(setup, config).await;
    let raw = Raw::connect(server.address).await;
    let (response, mut body) = raw.open("GenerateStream", &[]).await.unwrap();
    body.send_data(framed(&streaming(&[1], 400)), true).unwrap();
    let started = Instant::now();
    // An old connection takes no new calls.
    while raw.open("Generate", &[]).await.is_ok() {
        assert!(started.elapsed() < PATIENCE);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(status(response).await.code(), Code::Ok, "a call that runs goes on");
    // A client's library makes a new connection by itself.
    server.check_serves().await;
}

#[tokio::test]
async fn a_stream_that_is_not_read_stalls_nobody() {
    let mut setup = Setup { step_time: Duration::ZERO, ..Setup::default() };
    setup.frontend.max_buffered_steps = 1 << 20;
    setup.limits.max_model_len = 400_000;
    setup.limits.num_blocks = 40_000;
    let server = Server::start(setup).await;
    let mut unread: Vec<_> = vec![];
    let request: GenerateStreamRequest = streaming(&[1], 300_000);
    for _ in 0..2 {
        unread.push(server.client().generate_stream(request.clone()).await.unwrap());
    }
    while server.engine.stats().scheduler.n_generated_tokens < 50_000 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    // On the same connection, and on another one.
    server.check_serves().await;
    let other = Raw::connect(server.address).await;
    let answer = other.call("GenerateStream", &[], &streaming(&[1], 2000)).await;
    assert_eq!(answer.code(), Code::Ok);
    drop(unread);
    server.wait_until_empty().await;
}

#[tokio::test]
async fn a_connection_that_does_not_open_is_closed_and_others_last() {
    let opening_timeout = Duration::from_secs(2);
    let config = ServeConfig { opening_timeout, ..ServeConfig::default() };
    let server = Server::start_with(Setup::default(), config).await;
    let opened = Raw::connect(server.address).await;
    let mut silent = vec![];
    for beginning in ["", "PRI * HTTP/2.0"] {
        let mut stream = TcpStream::connect(server.address).await.unwrap();
        stream.write_all(beginning.as_bytes()).await.unwrap();
        silent.push(stream);
    }
    for mut stream in silent {
        // Closed or reset: either way the server is rid of it.
        let _ = timeout(PATIENCE, stream.read_to_end(&mut vec![])).await.expect("is closed");
    }
    let answer = opened.call("Generate", &[], &streaming(&[1], 2)).await;
    assert_eq!(answer.code(), Code::Ok);
}

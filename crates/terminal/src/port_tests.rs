//! The front ends against a port.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use grpc_server::{Access, KeySet, Port, Security, ServeConfig, Services, Tls, serve};
use serving::InferenceEngine;
use test_engine::{PATIENCE, Setup, TestEngine, streaming};
use tokio::net::TcpListener;
use tokio::sync::{Notify, oneshot};
use tokio::task::JoinHandle;
use tokio_stream::StreamExt as _;
use tonic::Code;

use crate::chat::tests::{Out, chat_over, setup};
use crate::top::Sample;
use crate::{Client, Engine, ServerAddress, said};

/// A server on a loopback port.
struct Server {
    of: TestEngine,
    stop: oneshot::Sender<()>,
    serving: JoinHandle<()>,
}

impl Server {
    async fn start(setup: Setup, listener: TcpListener, security: Security) -> Self {
        let of = TestEngine::start(setup);
        let engine: Arc<dyn InferenceEngine> = of.frontend.clone();
        let port = Port { listener, services: Services::own(&engine, 1 << 20), security };
        let (stop, stopped) = oneshot::channel();
        let serving = tokio::spawn(async {
            let stopped = async { stopped.await.unwrap_or_default() };
            serve(vec![port], ServeConfig::default(), engine, stopped).await.unwrap();
        });
        Self { of, stop, serving }
    }

    async fn stop(self) {
        self.stop.send(()).unwrap();
        self.serving.await.unwrap();
    }
}

async fn listen() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

#[tokio::test]
async fn a_chat_with_a_server_that_wants_tls_and_a_key() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name, content: &str| {
        let file = folder.path().join(name);
        std::fs::write(&file, content).unwrap();
        file
    };
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let cert = write("cert.pem", &made.cert.pem());
    let tls = Tls::read(&cert, &write("key.pem", &made.signing_key.serialize_pem()), None).unwrap();
    let keys = KeySet::read(&write("keys", "ann:secret\n")).unwrap();
    let access = Access::new(Some(keys), None, None).unwrap();
    let (listener, address) = listen().await;
    let security = Security { tls: Some(tls), access };
    let server = Server::start(setup(256), listener, security).await;

    let client = |key: Option<&str>, tls_ca: Option<String>| {
        let url = format!("https://localhost:{}", address.port());
        let (api_key, tls_ca) = (key.map(str::to_owned), tls_ca.map(String::into_bytes));
        Client::new(&ServerAddress { url, api_key, tls_ca }).unwrap()
    };
    let ca = || Some(made.cert.pem());
    for key in [None, Some("guess")] {
        let refused = client(key, ca()).stats().await.unwrap_err();
        assert_eq!(refused.code(), Code::Unauthenticated);
    }
    // The system trusts no such certificate.
    let distrusted = client(Some("secret"), None).stats().await.unwrap_err();
    assert!(said(&distrusted).to_lowercase().contains("certificate"), "{distrusted:?}");

    let engine = Engine::There(Box::new(client(Some("secret"), ca())));
    let mut chat = chat_over(engine, &Out::default(), &Arc::<Notify>::default()).await;
    assert_eq!(chat.on("x").await, "a⟦bc⟧d⟦e⟧.\n");
    server.of.wait_until_empty().await;
    server.stop().await;
}

#[tokio::test]
async fn figures_come_again_when_a_server_does() {
    let (listener, address) = listen().await;
    let server = Server::start(Setup::default(), listener, Security::default()).await;
    let address = ServerAddress { url: format!("http://{address}"), ..ServerAddress::default() };
    let client = Client::new(&address).unwrap();
    let messages = client.generate(streaming(&[5, 6], 20)).await.unwrap();
    assert!(messages.collect::<Vec<_>>().await.iter().all(Result::is_ok));
    server.of.wait_until_empty().await;
    let sample = Sample::of(&client).await.unwrap();
    assert_eq!((sample.stats.completion_tokens, sample.stats.prompt_tokens), (20, 2));
    assert_eq!(sample.model.served_model_name, "counting");
    server.stop().await;

    let gone = Sample::of(&client).await.unwrap_err();
    assert!(said(&gone).contains("onnect"), "{gone:?}");
    let listener = TcpListener::bind(address.url.trim_start_matches("http://")).await.unwrap();
    let server = Server::start(Setup::default(), listener, Security::default()).await;
    // The first calls may still get the error of an earlier try to connect.
    let started = Instant::now();
    let sample = loop {
        match Sample::of(&client).await {
            Ok(sample) => break sample,
            Err(status) => assert!(started.elapsed() < PATIENCE, "{status:?}"),
        }
    };
    assert_eq!(sample.stats.completion_tokens, 0);
    server.stop().await;
}

#[tokio::test]
async fn a_wrong_address_says_what_is_right() {
    let fault = |url: &str, api_key: Option<&str>, tls_ca: Option<&[u8]>| {
        let (api_key, tls_ca) = (api_key.map(str::to_owned), tls_ca.map(<[u8]>::to_vec));
        Client::new(&ServerAddress { url: url.to_owned(), api_key, tls_ca }).unwrap_err()
    };
    assert!(fault("127.0.0.1:50051", None, None).contains("http://HOST:PORT"));
    assert!(fault("http://", None, None).starts_with("http://: "));
    assert!(fault("http://localhost:1", None, Some(b"")).contains("for https://"));
    let key = fault("http://localhost:1", Some("se\ncret"), None);
    assert!(key.contains("key") && !key.contains("cret"), "{key}");
}

//! A listener on a loopback port, and requests to it that need no HTTP library.

use std::net::SocketAddr;
use std::ops::Deref;
use std::sync::Arc;

use admin_http::{HttpConfig, Metrics, Names, serve};
use serde_json::Value;
use serving::{FrontendConfig, InferenceEngine};
pub(crate) use test_engine::*;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::timeout;

/// A listener around any engine; it is stopped by [`stop`](Self::stop).
pub(crate) struct Listener {
    pub(crate) address: SocketAddr,
    stop: oneshot::Sender<()>,
    serving: JoinHandle<()>,
}

impl Listener {
    pub(crate) async fn start(
        engine: Arc<dyn InferenceEngine>,
        config: HttpConfig,
        metrics: Arc<Metrics>,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, stopped) = oneshot::channel();
        let stopped = async { stopped.await.unwrap_or_default() };
        let serving =
            tokio::spawn(async { serve(listener, config, engine, metrics, stopped).await });
        Self { address, stop, serving }
    }

    /// Stops it and waits until it has.
    pub(crate) async fn stop(self) {
        self.stop.send(()).unwrap();
        timeout(PATIENCE, self.serving).await.unwrap().unwrap();
    }

    /// Sends a whole request, and gives what is left to read.
    pub(crate) async fn send(&self, request: &str) -> TcpStream {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        stream
    }

    /// The answer to a whole request.
    pub(crate) async fn ask(&self, request: &str) -> Answer {
        let mut stream = self.send(request).await;
        let mut text = String::new();
        timeout(PATIENCE, stream.read_to_string(&mut text)).await.unwrap().unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        Answer { status, head: head.to_lowercase(), body: body.to_owned() }
    }

    pub(crate) async fn get(&self, path: &str) -> Answer {
        self.get_with(path, "").await
    }

    /// With further header lines, each ending in CRLF.
    pub(crate) async fn get_with(&self, path: &str, headers: &str) -> Answer {
        let host = self.address;
        self.ask(&format!("GET {path} HTTP/1.0\r\nHost: {host}\r\n{headers}\r\n")).await
    }

    /// The text of `POST /api/generate` as the page sends it.
    pub(crate) fn prompt(&self, body: &Value) -> String {
        let (host, body) = (self.address, body.to_string());
        let length = body.len();
        format!(
            "POST /api/generate HTTP/1.0\r\nHost: {host}\r\nOrigin: http://{host}\r\n\
             Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}"
        )
    }

    pub(crate) async fn generate(&self, body: &Value) -> Answer {
        self.ask(&self.prompt(body)).await
    }
}

pub(crate) struct Answer {
    pub(crate) status: u16,
    /// In lower case.
    pub(crate) head: String,
    pub(crate) body: String,
}

impl Answer {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap()
    }

    /// The server-sent events of the body: names and data.
    pub(crate) fn events(&self) -> Vec<(&str, Value)> {
        assert!(self.head.contains("content-type: text/event-stream"), "{}", self.head);
        let parts = self.body.split("\n\n").filter(|part| part.starts_with("event: "));
        parts
            .map(|part| {
                let (name, data) = part.split_once('\n').unwrap();
                let data = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
                (name.strip_prefix("event: ").unwrap(), data)
            })
            .collect()
    }
}

/// A listener around an engine under test.
pub(crate) struct Server {
    pub(crate) of: TestEngine,
    pub(crate) listener: Listener,
}

impl Deref for Server {
    type Target = Listener;

    fn deref(&self) -> &Listener {
        &self.listener
    }
}

impl Server {
    pub(crate) async fn start(setup: Setup) -> Self {
        Self::start_with(Names::Own, HttpConfig::default(), setup).await
    }

    pub(crate) async fn start_with(names: Names, config: HttpConfig, setup: Setup) -> Self {
        let metrics = Arc::new(Metrics::new(names));
        let frontend = FrontendConfig { observer: metrics.clone(), ..setup.frontend };
        let of = TestEngine::start(Setup { frontend, ..setup });
        let listener = Listener::start(of.frontend.clone(), config, metrics).await;
        Self { of, listener }
    }
}

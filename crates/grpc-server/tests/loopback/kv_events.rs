//! What a router learns of the prefix cache, through a real port. A block has 16 tokens.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;
use std::time::Duration;

use grpc_api::control::v1::control_service_client::ControlServiceClient;
use grpc_api::control::v1::subscribe_kv_events_response::Change;
use grpc_api::control::v1::{
    ClearPrefixCacheRequest, SubscribeKvEventsRequest, SubscribeKvEventsResponse,
};
use grpc_api::inference::v1::GenerateRequest;
use serving::FrontendConfig;
use sha2::{Digest, Sha256};
use tokio::time::timeout;
use tonic::transport::Channel;
use tonic::{Code, Status, Streaming};

use crate::harness::{FAIL_FOR_GOOD, Server, Setup, unary};

/// A reader that knows no more than the messages and the documentation say.
struct Router {
    stream: Streaming<SubscribeKvEventsResponse>,
    /// `None` before the first message.
    sequence: Option<u64>,
    held: BTreeSet<Vec<u8>>,
    n_snapshots: u32,
}

impl Router {
    async fn subscribe(channel: &Channel) -> Result<Self, Status> {
        let mut control = ControlServiceClient::new(channel.clone());
        let stream = control.subscribe_kv_events(SubscribeKvEventsRequest {}).await?.into_inner();
        Ok(Self { stream, sequence: None, held: BTreeSet::new(), n_snapshots: 0 })
    }

    async fn of(server: &Server) -> Self {
        Self::subscribe(&server.channel).await.unwrap()
    }

    /// Reads a message; the stream may not end.
    async fn read(&mut self) -> Change {
        let message = timeout(Duration::from_secs(30), self.stream.message()).await.unwrap();
        let SubscribeKvEventsResponse { sequence, change } = message.unwrap().unwrap();
        let change = change.unwrap();
        if let Change::Snapshot(snapshot) = &change {
            assert!(!snapshot.has_more && self.sequence.is_none_or(|last| last < sequence));
            self.n_snapshots += 1;
            self.held = snapshot.keys.iter().cloned().collect();
        } else {
            assert_eq!(self.sequence.map(|last| last + 1), Some(sequence), "no gap");
        }
        self.sequence = Some(sequence);
        match &change {
            Change::Snapshot(_) => {}
            Change::Stored(blocks) => {
                let lookahead = blocks.lookahead as usize;
                assert_eq!(blocks.token_ids.len(), 16 * blocks.keys.len() + lookahead);
                let keys = keys_of(&blocks.parent_key, &blocks.token_ids, lookahead);
                assert_eq!(keys, blocks.keys);
                for key in &blocks.keys {
                    assert!(self.held.insert(key.clone()), "stored twice");
                }
            }
            Change::Removed(removed) => {
                for key in &removed.keys {
                    assert!(self.held.remove(key), "removed twice");
                }
            }
            Change::Cleared(_) => self.held.clear(),
        }
        change
    }

    /// Reads all that has happened, and checks what that comes to against a new snapshot; how many
    /// blocks are held.
    async fn catch_up(&mut self, server: &Server) -> usize {
        let mut other = Self::of(server).await;
        other.read().await;
        while self.sequence != other.sequence {
            self.read().await;
        }
        assert_eq!(self.held, other.held);
        self.held.len()
    }

    /// How many tokens the cache has of a prompt that is drafted for, by one draft layer.
    fn n_cached_tokens(&self, prompt: &[u32], salt: Option<&str>) -> u32 {
        let mut root = b"kv prefix space 1\x01".to_vec();
        root.push(u8::from(salt.is_some()));
        root.extend(1_u32.to_le_bytes());
        root.extend(salt.unwrap_or_default().as_bytes());
        let keys = keys_of(&Sha256::digest(root), prompt, 1);
        16 * keys.iter().take_while(|key| self.held.contains(*key)).count() as u32
    }

    /// Reads until the stream ends with an error.
    async fn end(mut self) -> Status {
        loop {
            match timeout(Duration::from_secs(30), self.stream.message()).await.unwrap() {
                Ok(message) => assert!(message.is_some(), "it ends with an error"),
                Err(status) => return status,
            }
        }
    }
}

/// The keys of the full blocks of `tokens` behind `parent`.
fn keys_of(parent: &[u8], tokens: &[u32], lookahead: usize) -> Vec<Vec<u8>> {
    let mut keys: Vec<Vec<u8>> = vec![];
    for start in (0..).step_by(16).take_while(|start| start + 16 + lookahead <= tokens.len()) {
        let mut bytes = keys.last().map_or(parent, |key| key).to_vec();
        let content = &tokens[start..start + 16 + lookahead];
        bytes.extend(content.iter().flat_map(|token| token.to_le_bytes()));
        keys.push(Sha256::digest(bytes).to_vec());
    }
    keys
}

/// Three blocks and two tokens, which start with `first`.
fn prompt(first: u32) -> Vec<u32> {
    (first..first + 50).collect()
}

/// Runs a request for 4 tokens; its cached prompt tokens.
async fn run(server: &Server, prompt: &[u32], salt: Option<&str>) -> u32 {
    let cache_salt = salt.map(str::to_owned);
    let request = GenerateRequest { cache_salt, ..unary(prompt, 4) };
    let reply = server.generate(request).await;
    reply.usage.unwrap().cached_prompt_tokens
}

#[tokio::test]
async fn a_router_foresees_what_the_cache_has_of_a_prompt() {
    let mut setup = Setup::default();
    (setup.limits.num_blocks, setup.limits.max_model_len) = (10, 160);
    let server = Server::start(setup).await;
    let mut router = Router::of(&server).await;
    assert_eq!(router.catch_up(&server).await, 0);
    let mixed = [&prompt(1000)[..32], &prompt(2000)].concat();
    let mut cached = vec![];
    for (prompt, salt) in [
        (prompt(1000), None),
        (prompt(1000), Some("a")),
        (prompt(1000), Some("a")),
        // The second block differs in the token behind it.
        (mixed, None),
        (prompt(3000), None),
        (prompt(1000), None),
        (prompt(3000), None),
    ] {
        let foreseen = router.n_cached_tokens(&prompt, salt);
        assert_eq!(run(&server, &prompt, salt).await, foreseen, "{prompt:?} {salt:?}");
        cached.push(foreseen);
        router.catch_up(&server).await;
    }
    assert_eq!(cached, [0, 0, 48, 16, 0, 16, 48]);
    assert!(server.engine.stats().scheduler.blocks.n_evictions > 0);
    assert_eq!(router.n_snapshots, 1);
}

#[tokio::test]
async fn clearing_is_seen_and_felt() {
    let server = Server::start(Setup::default()).await;
    let mut router = Router::of(&server).await;
    assert_eq!(run(&server, &prompt(1000), None).await, 0);
    assert_eq!(router.catch_up(&server).await, 3);
    let mut control = ControlServiceClient::new(server.channel.clone());
    control.clear_prefix_cache(ClearPrefixCacheRequest {}).await.unwrap();
    assert!(matches!(router.read().await, Change::Cleared(_)));
    assert_eq!(run(&server, &prompt(1000), None).await, 0);
    assert_eq!(router.catch_up(&server).await, 3);
    assert_eq!(run(&server, &prompt(1000), None).await, 48);
    assert_eq!(router.n_snapshots, 1);
}

#[tokio::test]
async fn a_reader_that_falls_behind_starts_anew() {
    let frontend = FrontendConfig { max_buffered_kv_events: 2, ..FrontendConfig::default() };
    let server = Server::start(Setup { frontend, ..Setup::default() }).await;
    // The transport holds little back, too.
    let slow = Channel::from_shared(format!("http://{}", server.address)).unwrap();
    let slow = slow.initial_stream_window_size(1024).connect().await.unwrap();
    let mut router = Router::subscribe(&slow).await.unwrap();
    for first in (1000..41_000).step_by(1000) {
        assert_eq!(run(&server, &prompt(first), None).await, 0);
    }
    assert_eq!(router.catch_up(&server).await, 3 * 40);
    assert!(router.n_snapshots > 1);
}

#[tokio::test]
async fn subscriptions_are_refused_where_they_are_of_no_use() {
    let server = Server::start(Setup { prefix_caching: false, ..Setup::default() }).await;
    let status = Router::subscribe(&server.channel).await.err().unwrap();
    assert_eq!(status.code(), Code::FailedPrecondition, "{status:?}");
    // To clear what is not there is no fault.
    let mut control = ControlServiceClient::new(server.channel.clone());
    control.clear_prefix_cache(ClearPrefixCacheRequest {}).await.unwrap();

    let server = Server::start(Setup::default()).await;
    let mut routers = vec![];
    let status = loop {
        match Router::subscribe(&server.channel).await {
            Ok(router) => routers.push(router),
            Err(status) => break status,
        }
        assert!(routers.len() < 100);
    };
    assert_eq!(status.code(), Code::ResourceExhausted, "{status:?}");
    // One that leaves makes room, though the engine is idle.
    routers.pop();
    let again = async {
        while Router::subscribe(&server.channel).await.is_err() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    timeout(Duration::from_secs(30), again).await.unwrap();
    server.check_serves().await;
}

#[tokio::test]
async fn a_server_that_stops_ends_its_subscriptions() {
    let mut server = Server::start(Setup::default()).await;
    let router = Router::of(&server).await;
    server.check_serves().await;
    server.stop.take().unwrap().send(()).unwrap();
    let status = router.end().await;
    assert_eq!(status.code(), Code::Unavailable, "{status:?}");
    drop(server.channel);
    timeout(Duration::from_secs(30), server.serving).await.unwrap().unwrap();
}

#[tokio::test]
async fn an_engine_that_dies_ends_its_subscriptions() {
    let server = Server::start(Setup::default()).await;
    let router = Router::of(&server).await;
    server.fault.store(FAIL_FOR_GOOD, Ordering::SeqCst);
    server.client().generate(unary(&[1], 4)).await.unwrap_err();
    let status = router.end().await;
    assert_eq!(status.code(), Code::Unavailable, "{status:?}");
    let status = Router::subscribe(&server.channel).await.err().unwrap();
    assert_eq!(status.code(), Code::Unavailable, "{status:?}");
}

//! What the service tells of the model, the program and the cache.

use std::io::{Cursor, Read as _};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use compat_smg::engine::kv_cache_event::Data;
use compat_smg::engine::{
    FlushCacheRequest, GetLoadsRequest, GetModelInfoRequest, GetServerInfoRequest,
    GetTokenizerRequest, HealthCheckRequest, KvCacheCleared, SubscribeKvEventsRequest,
};
use serving::{Frontend, FrontendConfig, InferenceEngine as _};
use sha2::{Digest as _, Sha256};
use tonic::Code;

use crate::harness::{Client, FAIL_FOR_GOOD, HOLD, OK, Server, Setup, read, request, serve};

async fn health(client: &mut Client) -> (bool, String) {
    let health = client.health_check(HealthCheckRequest {}).await.unwrap().into_inner();
    (health.healthy, health.message)
}

#[tokio::test]
async fn only_an_engine_that_serves_is_healthy() {
    let server = Server::start(Setup::default()).await;
    let mut client = server.client();
    assert_eq!(health(&mut client).await, (true, String::new()));
    server.fault.store(HOLD, Ordering::SeqCst);
    let running = client.generate(request("a", &[1], 4)).await.unwrap();
    server.frontend.drain();
    let (is_healthy, message) = health(&mut client).await;
    assert!(!is_healthy && message.contains("no more requests"), "{message}");
    server.fault.store(OK, Ordering::SeqCst);
    assert_eq!(read(running.into_inner()).await.unwrap().streamed(0), [2, 3, 4, 5]);

    let dead = Server::start(Setup::default()).await;
    dead.fault.store(FAIL_FOR_GOOD, Ordering::SeqCst);
    let status = dead.generate(request("a", &[1], 4)).await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);
    let (is_healthy, message) = health(&mut dead.client()).await;
    assert!(!is_healthy && message.contains("burnt out"), "{message}");

    let loading = Arc::new(Frontend::loading(FrontendConfig::default()));
    let (channel, serving) = serve(loading).await;
    let mut client = Client::new(channel);
    let refused = client.health_check(HealthCheckRequest {}).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unavailable);
    let refused = client.get_model_info(GetModelInfoRequest {}).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unavailable);
    serving.abort();
}

#[tokio::test]
async fn the_model_and_the_server_are_described() {
    let server = Server::start(Setup { eos_token_ids: &[1], ..Setup::default() }).await;
    let mut client = server.client();
    let model = client.get_model_info(GetModelInfoRequest {}).await.unwrap().into_inner();
    let folder = server.frontend.checkpoint_dir().unwrap().canonicalize().unwrap();
    assert_eq!(model.model_path, folder.to_str().unwrap());
    assert_eq!(model.tokenizer_path, model.model_path);
    assert_eq!((model.served_model_name.as_str(), model.is_generation), ("counting", true));
    assert_eq!((model.max_context_length, model.max_req_input_len), (4096, 4095));
    assert_eq!((model.bos_token_id, model.pad_token_id), (0, 2));
    assert_eq!((model.eos_token_ids, model.model_type.as_str()), (vec![1], "deepseek_v3"));
    assert_eq!(model.default_sampling_params_json, r#"{"temperature":0.0}"#);

    server.fault.store(HOLD, Ordering::SeqCst);
    let running = client.generate(request("a", &[1], 40)).await.unwrap();
    let about = client.get_server_info(GetServerInfoRequest {}).await.unwrap().into_inner();
    assert_eq!((about.active_requests, about.data_parallel_size), (1, 1));
    assert_eq!((about.block_size, about.max_num_seqs), (16, 8));
    while server.engine.stats().scheduler.n_running == 0 {
        tokio::task::yield_now().await;
    }
    let loads = client.get_loads(GetLoadsRequest::default()).await.unwrap().into_inner();
    let load = &loads.loads[0];
    assert_eq!((load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs), (1, 0, 1));
    assert_eq!((load.num_used_tokens, load.max_total_num_tokens), (16, 16 * 1024));
    assert_eq!((load.utilization, load.max_running_requests), (0.125, 8));
    let other = GetLoadsRequest { dp_rank: Some(1) };
    assert!(client.get_loads(other).await.unwrap().into_inner().loads.is_empty());
    drop(running);
    server.fault.store(OK, Ordering::SeqCst);
    server.wait_until_empty().await;
}

#[tokio::test]
async fn the_tokenizer_comes_whole() {
    let server = Server::start(Setup { tokenizer: true, ..Setup::default() }).await;
    let stream = server.client().get_tokenizer(GetTokenizerRequest {}).await.unwrap();
    let (mut stream, mut bytes, mut hashes) = (stream.into_inner(), vec![], vec![]);
    while let Some(chunk) = stream.message().await.unwrap() {
        assert!(chunk.data.len() <= 64 << 10);
        bytes.extend(chunk.data);
        hashes.push(chunk.sha256);
    }
    let last = hashes.pop().unwrap();
    assert!(!hashes.is_empty() && hashes.iter().all(String::is_empty));
    assert_eq!(last, format!("{:x}", Sha256::digest(&bytes)));
    let mut archive = zip::ZipArchive::new(Cursor::new(bytes)).unwrap();
    let folder = server.frontend.checkpoint_dir().unwrap();
    for name in ["config.json", "tokenizer.json", "tokenizer_config.json"] {
        let mut content = vec![];
        archive.by_name(name).unwrap().read_to_end(&mut content).unwrap();
        assert_eq!(content, std::fs::read(folder.join(name)).unwrap());
    }
    assert!(archive.file_names().all(|name| !name.unwrap().contains("safetensors")));

    let without = Server::start(Setup::default()).await;
    let refused = without.client().get_tokenizer(GetTokenizerRequest {}).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
}

#[tokio::test]
async fn the_prefix_cache_is_told_and_emptied() {
    let server = Server::start(Setup::default()).await;
    let mut client = server.client();
    let mut events =
        client.subscribe_kv_events(SubscribeKvEventsRequest {}).await.unwrap().into_inner();
    let mut next = async || {
        let batch = events.message().await.unwrap().unwrap();
        let [event] = &batch.events[..] else { panic!("{batch:?}") };
        event.data.clone().unwrap()
    };
    let cleared = Data::Cleared(KvCacheCleared {});
    assert_eq!(next().await, cleared);
    let prompt: Vec<u32> = (100..140).collect();
    server.generate(request("a", &prompt, 2)).await.unwrap();
    let mut tokens = vec![];
    let mut parent = None;
    while tokens.len() < 32 {
        let Data::Stored(stored) = next().await else { panic!("not stored") };
        assert_eq!(stored.parent_block_hash, parent);
        parent = stored.blocks.last().map(|block| block.block_hash);
        tokens.extend(stored.blocks.into_iter().flat_map(|block| block.token_ids));
    }
    assert_eq!(tokens, prompt[..32]);
    let flushed = client.flush_cache(FlushCacheRequest {}).await.unwrap().into_inner();
    assert!(flushed.success);
    // It is emptied before the next step.
    server.generate(request("b", &[1], 2)).await.unwrap();
    assert_eq!(next().await, cleared);
    let answer = server.generate(request("c", &prompt, 2)).await.unwrap();
    assert_eq!(answer.completes[0].cached_tokens, 0);

    let without = Server::start(Setup { prefix_caching: false, ..Setup::default() }).await;
    let refused =
        without.client().subscribe_kv_events(SubscribeKvEventsRequest {}).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
}

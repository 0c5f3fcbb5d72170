//! Who shares prefixes, and what usage and statistics say about it.

use std::time::Duration;

use grpc_api::control::v1::control_service_client::ControlServiceClient;
use grpc_api::control::v1::{GetServerInfoRequest, GetStatsRequest, GetStatsResponse};
use grpc_api::inference::v1::generate_stream_response::Event;
use grpc_api::inference::v1::{GenerateRequest, GenerateStreamRequest, SpeculationParams};

use crate::harness::{Server, Setup, streaming, unary};

/// Three blocks of 16 and two tokens.
fn prompt() -> Vec<u32> {
    (1000..1050).collect()
}

fn salted(salt: Option<&str>) -> GenerateRequest {
    GenerateRequest { cache_salt: salt.map(str::to_owned), ..unary(&prompt(), 4) }
}

/// Runs a request whose text must be right; its cached prompt tokens.
async fn cached_tokens(server: &Server, request: GenerateRequest) -> u32 {
    let reply = server.generate(request).await;
    assert_eq!(reply.token_ids, [1050, 1051, 1052, 1053]);
    let usage = reply.usage.unwrap();
    assert_eq!((usage.prompt_tokens, usage.completion_tokens), (50, 4));
    usage.cached_prompt_tokens
}

/// The same through a stream.
async fn cached_tokens_of_stream(server: &Server, request: GenerateStreamRequest) -> u32 {
    let mut stream = server.client().generate_stream(request).await.unwrap().into_inner();
    loop {
        let event = stream.message().await.unwrap().unwrap().event.unwrap();
        if let Event::Finished(finished) = event {
            return finished.usage.unwrap().cached_prompt_tokens;
        }
    }
}

async fn stats(server: &Server) -> GetStatsResponse {
    server.wait_until_empty().await;
    let mut control = ControlServiceClient::new(server.channel.clone());
    let stats = control.get_stats(GetStatsRequest {}).await.unwrap().into_inner();
    let n_by_kind = stats.decode_steps + stats.prefill_steps + stats.mixed_steps;
    assert_eq!(n_by_kind, stats.steps, "each step is of one kind");
    // Every token but a request's last one is computed or cached.
    let n_known = stats.prompt_tokens + stats.completion_tokens - stats.finished_requests;
    let n_told = stats.computed_tokens
        + stats.speculation.as_ref().unwrap().accepted_tokens
        + stats.prefix_hit_tokens
        + stats.shared_prompt_tokens;
    assert_eq!((n_told, stats.preempted_requests), (n_known, 0));
    stats
}

async fn has_prefix_caching(server: &Server) -> bool {
    let mut control = ControlServiceClient::new(server.channel.clone());
    let info = control.get_server_info(GetServerInfoRequest {}).await.unwrap().into_inner();
    info.prefix_caching
}

#[tokio::test]
async fn a_repeated_prompt_comes_from_the_cache_and_stays_there() {
    let server = Server::start(Setup::default()).await;
    assert!(has_prefix_caching(&server).await);
    assert_eq!(cached_tokens(&server, salted(None)).await, 0);
    let first = stats(&server).await;
    assert_eq!((first.used_blocks, first.cached_blocks), (0, 3));
    assert_eq!((first.prefix_queried_tokens, first.prefix_hit_tokens), (50, 0));

    assert_eq!(cached_tokens(&server, salted(None)).await, 48);
    assert_eq!(cached_tokens_of_stream(&server, streaming(&prompt(), 4)).await, 48);
    // The third block alone is different: it is known by the token behind it, too.
    let mut longer: Vec<u32> = prompt()[..48].to_vec();
    longer.extend([7; 20]);
    assert_eq!(cached_tokens_of_stream(&server, streaming(&longer, 4)).await, 32);

    let last = stats(&server).await;
    assert_eq!((last.used_blocks, last.cached_blocks, last.evicted_blocks), (0, 5, 0));
    assert_eq!(last.prefix_queried_tokens, 3 * 50 + 68);
    assert_eq!(last.prefix_queried_tokens, last.prompt_tokens);
    assert_eq!(last.prefix_hit_tokens, 48 + 48 + 32);
}

#[tokio::test]
async fn outputs_are_shared_as_prompts_are() {
    let server = Server::start(Setup::default()).await;
    let reply = server.generate(unary(&prompt(), 50)).await;
    assert_eq!(reply.usage.unwrap().cached_prompt_tokens, 0);
    // The next turn of a conversation: prompt, answer, and something new.
    let turn: Vec<u32> = prompt().into_iter().chain(reply.token_ids).chain([7, 8]).collect();
    assert_eq!(cached_tokens_of_stream(&server, streaming(&turn, 4)).await, 96);
}

#[tokio::test]
async fn only_equal_salts_share() {
    let server = Server::start(Setup::default()).await;
    for (salt, n_cached) in [
        (Some("tenant a"), 0),
        (None, 0),
        (Some("tenant b"), 0),
        (Some("tenant a"), 48),
        (Some("tenant b"), 48),
        (None, 48),
    ] {
        assert_eq!(cached_tokens(&server, salted(salt)).await, n_cached, "{salt:?}");
    }
    let mut request = streaming(&prompt(), 4);
    for (salt, n_cached) in [("tenant c", 0), ("tenant a", 48)] {
        request.cache_salt = Some(salt.to_owned());
        assert_eq!(cached_tokens_of_stream(&server, request.clone()).await, n_cached, "{salt}");
    }
    let stats = stats(&server).await;
    assert_eq!((stats.used_blocks, stats.cached_blocks), (0, 12), "three a salt");
    assert_eq!((stats.prefix_queried_tokens, stats.prefix_hit_tokens), (8 * 50, 4 * 48));
}

#[tokio::test]
async fn requests_with_drafts_and_without_do_not_share() {
    let server = Server::start(Setup::default()).await;
    for (k, n_cached) in [(3, 0), (0, 0), (1, 48), (0, 48)] {
        let mut request = salted(None);
        request.speculation = Some(SpeculationParams { num_speculative_tokens: Some(k) });
        assert_eq!(cached_tokens(&server, request).await, n_cached, "k = {k}");
    }
}

#[tokio::test]
async fn a_full_pool_gives_cached_blocks_up_and_counts_them() {
    let mut setup = Setup::default();
    setup.limits.num_blocks = 8;
    setup.limits.max_model_len = 128;
    let server = Server::start(setup).await;
    assert_eq!(cached_tokens(&server, salted(None)).await, 0);
    let other: Vec<u32> = (5000..5100).collect();
    assert_eq!(cached_tokens_of_stream(&server, streaming(&other, 4)).await, 0);
    let full = stats(&server).await;
    // The second needs seven blocks of eight, so two of the first's three had to go.
    assert_eq!((full.used_blocks, full.cached_blocks, full.evicted_blocks), (0, 7, 2));
    // Tail before prefix: the first block is still there.
    assert_eq!(cached_tokens(&server, salted(None)).await, 16);
}

#[tokio::test]
async fn without_prefix_caching_nothing_is_asked_for_or_kept() {
    let server = Server::start(Setup { prefix_caching: false, ..Setup::default() }).await;
    assert!(!has_prefix_caching(&server).await);
    for salt in [None, None, Some("tenant a"), Some("tenant a")] {
        assert_eq!(cached_tokens(&server, salted(salt)).await, 0);
    }
    let stats = stats(&server).await;
    assert_eq!((stats.used_blocks, stats.cached_blocks, stats.evicted_blocks), (0, 0, 0));
    assert_eq!((stats.prefix_queried_tokens, stats.prefix_hit_tokens), (0, 0));
    assert_eq!((stats.finished_requests, stats.prompt_tokens), (4, 200));
}

#[tokio::test]
async fn a_request_that_is_dropped_leaves_what_it_computed() {
    let setup = Setup { step_time: Duration::from_millis(10), ..Setup::default() };
    let server = Server::start(setup).await;
    let request = streaming(&prompt(), 4000);
    let mut stream = server.client().generate_stream(request).await.unwrap().into_inner();
    stream.message().await.unwrap().unwrap();
    drop(stream);
    server.wait_until_empty().await;
    assert_eq!(cached_tokens(&server, salted(None)).await, 48);
}

//! One run: a fresh engine behind its port, and clients that send request after request.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use engine_types::TokenId;
use integration_tests::bench::{Stream, request, stream};
use integration_tests::oracle::Checkpoint;
use integration_tests::server::Server;
use integration_tests::table::median;
use model_runner::RunnerOptions;
use models::ComputeDtype;
use tokio::task::JoinSet;
use tonic::transport::Channel;

/// What every run does.
pub(crate) struct Load {
    pub(crate) prompts: Vec<Vec<TokenId>>,
    pub(crate) concurrency: u32,
    pub(crate) output_len: u32,
    pub(crate) k: u32,
    pub(crate) dtype: ComputeDtype,
}

/// What a run measured and counted.
pub(crate) struct Run {
    /// Prompt tokens that were computed.
    pub(crate) n_computed: u64,
    /// Prompt tokens that the prefix cache had.
    pub(crate) n_cached: u64,
    pub(crate) mean_ttft_ms: f64,
    pub(crate) median_ttft_ms: f64,
    /// Output tokens by the time from the first request to the last token; prefill is in it.
    pub(crate) tokens_per_s: f64,
    /// In the order of the prompts.
    pub(crate) texts: Vec<Vec<TokenId>>,
}

/// Serves the load once, in an engine of its own that has served one short request before, which
/// has nothing in common with the load.
pub(crate) async fn run(load: &Load, caching: bool) -> Result<Run> {
    let options = RunnerOptions {
        num_speculative_tokens: load.k,
        max_num_seqs: load.concurrency,
        ..RunnerOptions::default()
    };
    let checkpoint = Checkpoint::TinyGlm52;
    let server = match caching {
        false => Server::start(checkpoint, load.dtype, &options).await?,
        true => Server::start_cached(checkpoint, load.dtype, &options).await?,
    };
    let unlike: Vec<TokenId> = load.prompts[0].iter().rev().copied().collect();
    stream(server.connect().await?, request(&unlike, 8)).await?;
    let before = server.engine.stats().scheduler;

    let started = Instant::now();
    let streams = send_all(load, &server).await?;
    let after = server.engine.stats();
    ensure!(after.n_unfinished == 0, "{} requests are still in the engine", after.n_unfinished);
    let after = after.scheduler;
    ensure!(after.n_preemptions == 0, "{} times the pool was too small", after.n_preemptions);
    let n_cached = after.n_prefix_hit_tokens - before.n_prefix_hit_tokens;
    let n_prompt = after.n_prompt_tokens - before.n_prompt_tokens;
    let told = streams.iter().filter_map(|stream| stream.finished.usage);
    let n_told: u64 = told.map(|usage| u64::from(usage.cached_prompt_tokens)).sum();
    ensure!(n_told == n_cached, "clients are told of {n_told} tokens, the engine of {n_cached}");
    summarize(started, streams, [n_prompt - n_cached, n_cached])
}

/// What became of each prompt, in their order.
async fn send_all(load: &Load, server: &Server) -> Result<Vec<Stream>> {
    let requests: Arc<[_]> =
        load.prompts.iter().map(|prompt| request(prompt, load.output_len)).collect();
    let next = Arc::new(AtomicUsize::new(0));
    let mut channels: Vec<Channel> = vec![];
    for _ in 0..load.concurrency {
        channels.push(server.connect().await?);
    }
    let mut clients = JoinSet::new();
    for channel in channels {
        let (requests, next) = (Arc::clone(&requests), Arc::clone(&next));
        clients.spawn(async move {
            let mut done = vec![];
            loop {
                let idx = next.fetch_add(1, Ordering::Relaxed);
                let Some(request) = requests.get(idx) else { return anyhow::Ok(done) };
                done.push((idx, stream(channel.clone(), request.clone()).await?));
            }
        });
    }
    let mut streams: Vec<(usize, Stream)> = vec![];
    while let Some(done) = clients.join_next().await {
        streams.extend(done??);
    }
    streams.sort_by_key(|(idx, _)| *idx);
    Ok(streams.into_iter().map(|(_, stream)| stream).collect())
}

fn summarize(
    started: Instant,
    streams: Vec<Stream>,
    [n_computed, n_cached]: [u64; 2],
) -> Result<Run> {
    let last = streams.iter().map(|stream| stream.last).max().context("no stream")?;
    let ttft = |stream: &Stream| (stream.first - stream.sent).as_secs_f64() * 1e3;
    let mut ttfts: Vec<f64> = streams.iter().map(ttft).collect();
    ttfts.sort_by(f64::total_cmp);
    let n_tokens: usize = streams.iter().map(|stream| stream.token_ids.len()).sum();
    Ok(Run {
        n_computed,
        n_cached,
        mean_ttft_ms: ttfts.iter().sum::<f64>() / ttfts.len() as f64,
        median_ttft_ms: median(&ttfts),
        tokens_per_s: n_tokens as f64 / (last - started).as_secs_f64(),
        texts: streams.into_iter().map(|stream| stream.token_ids).collect(),
    })
}

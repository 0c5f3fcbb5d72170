//! One run: a fresh engine behind its port, and clients that all stream at once.

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use engine::EngineStats;
use engine_types::TokenId;
use grpc_api::inference::v1::SpeculationStats;
use integration_tests::bench::{Stream, request, stream};
use integration_tests::oracle::Checkpoint;
use integration_tests::server::Server;
use model_runner::RunnerOptions;
use models::ComputeDtype;
use spec_decode::IndexShare;
use tokio::task::JoinSet;

/// What every run of a length does.
pub(crate) struct Load {
    pub(crate) prompts: Vec<Vec<TokenId>>,
    pub(crate) output_len: u32,
    pub(crate) k: u32,
    pub(crate) dtype: ComputeDtype,
}

/// What a run measured and counted.
#[derive(Clone, Debug)]
pub(crate) struct Run {
    /// Output tokens by the time from the first request to the last token; prefill is in it.
    pub(crate) tokens_per_s: f64,
    /// Mean over the requests of the time per token after the first message, in ms.
    pub(crate) mean_tpot_ms: f64,
    pub(crate) acceptance_length: f64,
    pub(crate) acceptance_rate: f64,
    /// The same at each draft position.
    pub(crate) rate_at: Vec<f64>,
    /// Of all passes, and of the draft steps.
    pub(crate) launches: [u64; 2],
    /// Of all passes, and of the draft steps.
    pub(crate) scored_keys: [u64; 2],
    pub(crate) launches_per_propose: f64,
}

/// Serves the load once, in an engine of its own that has served one short request before.
pub(crate) async fn run(load: &Load, index_share: IndexShare) -> Result<Run> {
    let options = RunnerOptions {
        num_speculative_tokens: load.k,
        max_num_seqs: u32::try_from(load.prompts.len())?,
        index_share,
        ..RunnerOptions::default()
    };
    let server = Server::start(Checkpoint::TinyGlm52, load.dtype, &options).await?;
    stream(server.connect().await?, request(&load.prompts[0], 8)).await?;
    let mut channels = Vec::new();
    for _ in &load.prompts {
        channels.push(server.connect().await?);
    }
    let before = server.engine.stats();

    let started = Instant::now();
    let mut clients = JoinSet::new();
    for (prompt, channel) in load.prompts.iter().zip(channels) {
        clients.spawn(stream(channel, request(prompt, load.output_len)));
    }
    let mut streams = Vec::new();
    while let Some(done) = clients.join_next().await {
        streams.push(done??);
    }
    let after = server.engine.stats();
    ensure!(after.n_unfinished == 0, "{} requests are still in the engine", after.n_unfinished);
    let n_preemptions = after.scheduler.n_preemptions;
    ensure!(n_preemptions == 0, "{n_preemptions} times the pool was too small");
    summarize(load, started, &streams, [&before, &after])
}

fn summarize(
    load: &Load,
    started: Instant,
    streams: &[Stream],
    [before, after]: [&EngineStats; 2],
) -> Result<Run> {
    let last = streams.iter().map(|stream| stream.last).max().context("no stream")?;
    let n_tokens: usize = streams.iter().map(|stream| stream.token_ids.len()).sum();
    ensure!(n_tokens == load.prompts.len() * load.output_len as usize, "{n_tokens}");
    let tpot = |stream: &Stream| -> f64 {
        let elapsed = (stream.last - stream.first).as_secs_f64();
        elapsed * 1e3 / (stream.token_ids.len() - stream.n_first) as f64
    };
    let speculation: Vec<&SpeculationStats> =
        streams.iter().filter_map(|stream| stream.finished.speculation.as_ref()).collect();
    ensure!(speculation.len() == streams.len(), "a stream without statistics");
    let sum = |count: fn(&SpeculationStats) -> u64| -> f64 {
        speculation.iter().map(|stats| count(stats)).sum::<u64>() as f64
    };
    let accepted = sum(|stats| stats.accepted_tokens);
    let at = |counts: fn(&SpeculationStats) -> &[u64], idx: usize| -> f64 {
        speculation.iter().filter_map(|stats| counts(stats).get(idx)).sum::<u64>() as f64
    };
    let rate_at = |idx| {
        at(|stats| &stats.accepted_per_position, idx) / at(|stats| &stats.drafted_per_position, idx)
    };

    let work = |stats: &EngineStats| {
        let draft = stats.indexer.draft();
        let mut all = draft;
        all += stats.indexer.target_prefill;
        all += stats.indexer.target_verify;
        let proposes = stats.indexer.draft_steps[0].n_launches;
        ([all.n_launches, draft.n_launches], [all.n_scored_keys, draft.n_scored_keys], proposes)
    };
    let (before, after) = (work(before), work(after));
    let minus = |after: [u64; 2], before: [u64; 2]| [0, 1].map(|idx| after[idx] - before[idx]);
    let launches = minus(after.0, before.0);
    Ok(Run {
        tokens_per_s: n_tokens as f64 / (last - started).as_secs_f64(),
        mean_tpot_ms: streams.iter().map(tpot).sum::<f64>() / streams.len() as f64,
        acceptance_length: 1.0 + accepted / sum(|stats| stats.verify_steps),
        acceptance_rate: accepted / sum(|stats| stats.draft_tokens),
        rate_at: (0..load.k as usize).map(rate_at).collect(),
        launches,
        scored_keys: minus(after.1, before.1),
        launches_per_propose: launches[1] as f64 / (after.2 - before.2) as f64,
    })
}

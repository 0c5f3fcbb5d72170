//! An engine's own figures under our names.

use grpc_api::control::v1 as control;
use prometheus_client::registry::Registry;
use serving::{EngineState, InferenceEngine};

use super::sample::{Sample, by_position};

/// Enters what an engine tells now. One that still loads tells its state alone.
pub(crate) fn register(registry: &mut Registry, engine: &dyn InferenceEngine) {
    let mut sample = Sample(registry);
    state(&mut sample, &engine.state());
    if let (Ok(model), Ok(server), Ok(stats)) =
        (engine.model_info(), engine.server_info(), engine.stats())
    {
        facts(&mut sample, &model, &server);
        load(&mut sample, &stats);
        totals(&mut sample, &stats);
        speculation(&mut sample, &stats, model.num_speculative_tokens);
        indexer(&mut sample, &stats);
    }
}

fn state(sample: &mut Sample<'_>, state: &EngineState) {
    let is = [
        ("loading", *state == EngineState::Loading),
        ("serving", *state == EngineState::Serving),
        ("draining", *state == EngineState::Draining),
        ("dead", matches!(state, EngineState::Dead(_))),
    ];
    let help = "1 for the state that the engine is in";
    sample.gauges("tandem_engine_state", help, "state", is.map(|(of, is)| (of, is.into())));
}

fn facts(
    sample: &mut Sample<'_>,
    model: &control::GetModelInfoResponse,
    server: &control::GetServerInfoResponse,
) {
    let facts = vec![
        ("model", model.served_model_name.clone()),
        ("architecture", model.architecture.clone()),
        ("dtype", model.dtype.clone()),
        ("max_model_len", model.max_model_len.to_string()),
        ("num_speculative_tokens", model.num_speculative_tokens.to_string()),
        ("block_size", server.block_size.to_string()),
        ("max_num_seqs", server.max_num_seqs.to_string()),
        ("max_num_batched_tokens", server.max_num_batched_tokens.to_string()),
        ("version", server.version.clone()),
    ];
    sample.facts("tandem_model_info", "The model and the limits that it is served with", facts);
}

fn load(sample: &mut Sample<'_>, stats: &control::GetStatsResponse) {
    let help = "Requests that are being worked on";
    sample.gauge("tandem_requests_running", help, stats.running_requests);
    let help = "Requests that wait, preempted ones included";
    sample.gauge("tandem_requests_waiting", help, stats.waiting_requests);
    let help = "Requests that wait since they gave their blocks up to others";
    sample.gauge("tandem_requests_preempted", help, stats.preempted_requests);
    let free = stats.total_blocks.saturating_sub(stats.used_blocks + stats.cached_blocks);
    let blocks = [("used", stats.used_blocks), ("cached", stats.cached_blocks), ("free", free)];
    let help = "KV blocks that requests hold, that the prefix cache keeps, and others";
    let blocks = blocks.map(|(of, n)| (of, i64::from(n)));
    sample.gauges("tandem_kv_blocks", help, "state", blocks);
    let help = "KV blocks that requests hold, as a part of all";
    sample.ratio("tandem_kv_blocks_used_ratio", help, stats.used_blocks, stats.total_blocks);
}

fn totals(sample: &mut Sample<'_>, stats: &control::GetStatsResponse) {
    let steps = [
        ("decode", stats.decode_steps),
        ("prefill", stats.prefill_steps),
        ("mixed", stats.mixed_steps),
    ];
    let help = "Planned steps: those that continue outputs, read prompts, or do both";
    let steps = steps.map(|(kind, n)| (kind.to_owned(), n));
    sample.counters("tandem_steps_planned", help, "kind", steps);
    let totals = [
        ("tandem_steps", "Steps executed", stats.steps),
        ("tandem_steps_failed", "Steps that failed", stats.failed_steps),
        ("tandem_prompt_tokens", "Prompt tokens of requests that were taken", stats.prompt_tokens),
        ("tandem_generation_tokens", "Generated tokens", stats.completion_tokens),
        (
            "tandem_computed_tokens",
            "Tokens computed, drafts apart; those of a preempted request again",
            stats.computed_tokens,
        ),
        (
            "tandem_shared_prompt_tokens",
            "Prompt tokens that outputs of one request got from each other",
            stats.shared_prompt_tokens,
        ),
        ("tandem_preemptions", "Times a request gave its blocks up", stats.preemptions),
        (
            "tandem_prefix_cache_queried_tokens",
            "Prompt tokens for which the prefix cache was asked",
            stats.prefix_queried_tokens,
        ),
        (
            "tandem_prefix_cache_hit_tokens",
            "Prompt tokens that the prefix cache had",
            stats.prefix_hit_tokens,
        ),
        (
            "tandem_prefix_cache_evicted_blocks",
            "KV blocks that the prefix cache gave up for their room",
            stats.evicted_blocks,
        ),
    ];
    for (name, help, value) in totals {
        sample.counter(name, help, value);
    }
}

fn speculation(
    sample: &mut Sample<'_>,
    stats: &control::GetStatsResponse,
    num_speculative_tokens: u32,
) {
    let stats = stats.speculation.clone().unwrap_or_default();
    let help = "Steps of outputs that verified at least one draft";
    sample.counter("tandem_spec_decode_verify_steps", help, stats.verify_steps);
    let help = "Drafts verified";
    sample.counter("tandem_spec_decode_draft_tokens", help, stats.draft_tokens);
    let help = "Drafts accepted and kept";
    sample.counter("tandem_spec_decode_accepted_tokens", help, stats.accepted_tokens);
    let help = "Drafts verified, by position from 0";
    let drafted = by_position(&stats.drafted_per_position, num_speculative_tokens);
    sample.counters("tandem_spec_decode_position_draft_tokens", help, "position", drafted);
    let help = "Drafts accepted, by position from 0";
    let accepted = by_position(&stats.accepted_per_position, num_speculative_tokens);
    sample.counters("tandem_spec_decode_position_accepted_tokens", help, "position", accepted);
    let help = "Verify steps by the number of drafts that they accepted";
    let runs = by_position(&stats.accepted_histogram, num_speculative_tokens + 1);
    sample.counters("tandem_spec_decode_runs", help, "accepted", runs);
}

fn indexer(sample: &mut Sample<'_>, stats: &control::GetStatsResponse) {
    let Some(stats) = &stats.indexer else { return };
    let mut passes = vec![
        ("target_prefill".to_owned(), stats.target_prefill.unwrap_or_default()),
        ("target_verify".to_owned(), stats.target_verify.unwrap_or_default()),
    ];
    let drafts = stats.draft_steps.iter().enumerate();
    passes.extend(drafts.map(|(step, counts)| (format!("draft_{step}"), *counts)));
    let by_pass = |of: fn(&control::IndexerCounts) -> u64| -> Vec<(String, u64)> {
        passes.iter().map(|(pass, counts)| (pass.clone(), of(counts))).collect()
    };
    let help = "Runs of an indexer of sparse attention over the rows of a pass";
    sample.counters("tandem_indexer_launches", help, "pass", by_pass(|counts| counts.launches));
    let help = "Rows for which indexers selected keys";
    sample.counters("tandem_indexer_rows", help, "pass", by_pass(|counts| counts.rows));
    let help = "Keys that indexers scored";
    sample.counters(
        "tandem_indexer_scored_keys",
        help,
        "pass",
        by_pass(|counts| counts.scored_keys),
    );
}

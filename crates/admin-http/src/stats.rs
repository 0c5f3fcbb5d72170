//! Figures as JSON, under the names of the own API's fields.

use grpc_api::control::v1 as control;
use grpc_api::inference::v1 as pb;
use serde_json::{Value, json};
use serving::{EngineState, InferenceEngine};

/// What `/api/stats` answers. What an engine that still loads does not know is null.
pub(crate) fn all(engine: &dyn InferenceEngine, prompts: bool) -> Value {
    let (state, reason) = match engine.state() {
        EngineState::Loading => ("loading", None),
        EngineState::Serving => ("serving", None),
        EngineState::Draining => ("draining", None),
        EngineState::Dead(fault) => ("dead", Some(fault)),
    };
    json!({
        "state": state,
        "reason": reason,
        "prompts": prompts,
        "model": engine.model_info().ok().map(model),
        "server": engine.server_info().ok().map(server),
        "stats": engine.stats().ok().map(stats),
    })
}

fn model(model: control::GetModelInfoResponse) -> Value {
    json!({
        "served_model_name": model.served_model_name,
        "architecture": model.architecture,
        "vocab_size": model.vocab_size,
        "max_model_len": model.max_model_len,
        "num_speculative_tokens": model.num_speculative_tokens,
        "dtype": model.dtype,
        "has_tokenizer": model.has_tokenizer,
        "index_topk": model.index_topk,
        "index_share": model.index_share,
        "synthetic_acceptance": model.synthetic_acceptance,
    })
}

fn server(server: control::GetServerInfoResponse) -> Value {
    json!({
        "version": server.version,
        "block_size": server.block_size,
        "total_blocks": server.total_blocks,
        "max_num_seqs": server.max_num_seqs,
        "max_num_batched_tokens": server.max_num_batched_tokens,
        "prefix_caching": server.prefix_caching,
    })
}

fn stats(stats: control::GetStatsResponse) -> Value {
    json!({
        "running_requests": stats.running_requests,
        "waiting_requests": stats.waiting_requests,
        "preempted_requests": stats.preempted_requests,
        "used_blocks": stats.used_blocks,
        "cached_blocks": stats.cached_blocks,
        "total_blocks": stats.total_blocks,
        "evicted_blocks": stats.evicted_blocks,
        "steps": stats.steps,
        "failed_steps": stats.failed_steps,
        "decode_steps": stats.decode_steps,
        "prefill_steps": stats.prefill_steps,
        "mixed_steps": stats.mixed_steps,
        "finished_requests": stats.finished_requests,
        "prompt_tokens": stats.prompt_tokens,
        "completion_tokens": stats.completion_tokens,
        "computed_tokens": stats.computed_tokens,
        "preemptions": stats.preemptions,
        "prefix_queried_tokens": stats.prefix_queried_tokens,
        "prefix_hit_tokens": stats.prefix_hit_tokens,
        "speculation": stats.speculation.as_ref().map(speculation),
        "indexer": stats.indexer.as_ref().map(indexer),
    })
}

/// What drafting did, of an engine or an output.
pub(crate) fn speculation(stats: &pb::SpeculationStats) -> Value {
    json!({
        "verify_steps": stats.verify_steps,
        "draft_tokens": stats.draft_tokens,
        "accepted_tokens": stats.accepted_tokens,
        "drafted_per_position": stats.drafted_per_position,
        "accepted_per_position": stats.accepted_per_position,
        "acceptance_length": stats.acceptance_length,
    })
}

fn indexer(stats: &control::IndexerStats) -> Value {
    let counts = |counts: &control::IndexerCounts| {
        json!({
            "launches": counts.launches,
            "rows": counts.rows,
            "scored_keys": counts.scored_keys,
        })
    };
    json!({
        "target_prefill": stats.target_prefill.as_ref().map(counts),
        "target_verify": stats.target_verify.as_ref().map(counts),
        "draft_steps": stats.draft_steps.iter().map(counts).collect::<Vec<_>>(),
    })
}

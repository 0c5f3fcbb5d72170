//! An engine's figures under vLLM's names, as of its `rust/src/metrics`.

use grpc_api::control::v1 as control;
use prometheus_client::registry::Registry;

use super::sample::{Sample, by_position};

/// Enters what an engine tells now. The registry adds the labels of the model and the engine.
pub(crate) fn register(
    registry: &mut Registry,
    model: &control::GetModelInfoResponse,
    server: &control::GetServerInfoResponse,
    stats: &control::GetStatsResponse,
) {
    let mut sample = Sample(registry);
    let help = "Requests that are being worked on";
    sample.gauge("vllm:num_requests_running", help, stats.running_requests);
    let help = "Requests that wait";
    sample.gauge("vllm:num_requests_waiting", help, stats.waiting_requests);
    let help = "KV blocks that requests hold, as a part of all";
    sample.ratio("vllm:kv_cache_usage_perc", help, stats.used_blocks, stats.total_blocks);
    let facts = vec![
        ("block_size", server.block_size.to_string()),
        ("num_gpu_blocks", server.total_blocks.to_string()),
        ("enable_prefix_caching", server.prefix_caching.to_string()),
        ("cache_dtype", model.dtype.clone()),
    ];
    sample.facts("vllm:cache_config_info", "What the KV cache is like", facts);
    let speculation = stats.speculation.clone().unwrap_or_default();
    let totals = [
        ("vllm:prompt_tokens", "Prompt tokens of requests that were taken", stats.prompt_tokens),
        ("vllm:generation_tokens", "Generated tokens", stats.completion_tokens),
        (
            "vllm:prompt_tokens_cached",
            "Prompt tokens that were not computed",
            stats.prefix_hit_tokens,
        ),
        (
            "vllm:prefix_cache_queries",
            "Prompt tokens for which the prefix cache was asked",
            stats.prefix_queried_tokens,
        ),
        (
            "vllm:prefix_cache_hits",
            "Prompt tokens that the prefix cache had",
            stats.prefix_hit_tokens,
        ),
        ("vllm:num_preemptions", "Times a request gave its blocks up", stats.preemptions),
        (
            "vllm:spec_decode_num_drafts",
            "Steps of outputs that verified at least one draft",
            speculation.verify_steps,
        ),
        ("vllm:spec_decode_num_draft_tokens", "Drafts verified", speculation.draft_tokens),
        ("vllm:spec_decode_num_accepted_tokens", "Drafts accepted", speculation.accepted_tokens),
    ];
    for (name, help, value) in totals {
        sample.counter(name, help, value);
    }
    let accepted = by_position(&speculation.accepted_per_position, model.num_speculative_tokens);
    let name = "vllm:spec_decode_num_accepted_tokens_per_pos";
    sample.counters(name, "Drafts accepted, by position from 0", "position", accepted);
}

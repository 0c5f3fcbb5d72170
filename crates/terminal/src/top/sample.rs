//! What a server says of itself at one time.

use std::time::Instant;

use grpc_api::control::v1::{
    GetModelInfoResponse, GetServerInfoResponse, GetStatsResponse, IndexerCounts, IndexerStats,
};
use grpc_api::inference::v1::SpeculationStats;
use serde_json::{Value, json};
use tonic::Status;

use crate::client::Client;

/// What a server says of itself at one time.
#[derive(Clone, Debug)]
pub struct Sample {
    /// The model.
    pub model: GetModelInfoResponse,
    /// The program.
    pub server: GetServerInfoResponse,
    /// Load and totals.
    pub stats: GetStatsResponse,
    /// When it said so.
    pub at: Instant,
}

impl Sample {
    /// Asks a server.
    ///
    /// # Errors
    ///
    /// What the server, or the way to it, answered.
    pub async fn of(client: &Client) -> Result<Self, Status> {
        let (model, server, stats) =
            tokio::try_join!(client.model_info(), client.server_info(), client.stats())?;
        Ok(Self { model, server, stats, at: Instant::now() })
    }

    pub(crate) fn speculation(&self) -> SpeculationStats {
        self.stats.speculation.clone().unwrap_or_default()
    }

    /// Blocks that nothing holds.
    pub(crate) fn free_blocks(&self) -> u32 {
        let GetStatsResponse { total_blocks, used_blocks, cached_blocks, .. } = &self.stats;
        total_blocks.saturating_sub(used_blocks + cached_blocks)
    }

    /// Shares of the drafts at each position that were accepted, 0 where none was verified.
    pub(crate) fn accepted_shares(&self) -> Vec<f64> {
        let stats = self.speculation();
        let pairs = stats.accepted_per_position.iter().zip(&stats.drafted_per_position);
        pairs.map(|(accepted, drafted)| share(*accepted, *drafted)).collect()
    }

    /// All of it by the names of the API's fields, as one JSON object.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let Self { model, server, stats, .. } = self;
        let drafts = self.speculation();
        json!({
            "model": {
                "served_model_name": model.served_model_name,
                "architecture": model.architecture,
                "dtype": model.dtype,
                "max_model_len": model.max_model_len,
                "num_speculative_tokens": model.num_speculative_tokens,
                "synthetic_acceptance": model.synthetic_acceptance,
            },
            "server": {
                "version": server.version,
                "block_size": server.block_size,
                "max_num_seqs": server.max_num_seqs,
                "max_num_batched_tokens": server.max_num_batched_tokens,
                "prefix_caching": server.prefix_caching,
            },
            "alive": stats.alive,
            "running_requests": stats.running_requests,
            "waiting_requests": stats.waiting_requests,
            "preempted_requests": stats.preempted_requests,
            "finished_requests": stats.finished_requests,
            "used_blocks": stats.used_blocks,
            "cached_blocks": stats.cached_blocks,
            "total_blocks": stats.total_blocks,
            "evicted_blocks": stats.evicted_blocks,
            "prompt_tokens": stats.prompt_tokens,
            "completion_tokens": stats.completion_tokens,
            "computed_tokens": stats.computed_tokens,
            "prefix_queried_tokens": stats.prefix_queried_tokens,
            "prefix_hit_tokens": stats.prefix_hit_tokens,
            "preemptions": stats.preemptions,
            "steps": stats.steps,
            "decode_steps": stats.decode_steps,
            "prefill_steps": stats.prefill_steps,
            "mixed_steps": stats.mixed_steps,
            "failed_steps": stats.failed_steps,
            "speculation": {
                "verify_steps": drafts.verify_steps,
                "draft_tokens": drafts.draft_tokens,
                "accepted_tokens": drafts.accepted_tokens,
                "drafted_per_position": drafts.drafted_per_position,
                "accepted_per_position": drafts.accepted_per_position,
                "acceptance_length": drafts.acceptance_length,
            },
            "indexer": stats.indexer.as_ref().map(|stats| {
                let passes = passes(stats).into_iter();
                passes.map(|(name, counts)| (name, indexer_json(counts))).collect::<Value>()
            }),
        })
    }
}

/// The kinds of passes that indexers run in, by name.
pub(crate) fn passes(stats: &IndexerStats) -> Vec<(String, IndexerCounts)> {
    let target = [
        ("target_prefill", stats.target_prefill.unwrap_or_default()),
        ("target_verify", stats.target_verify.unwrap_or_default()),
    ];
    let target = target.into_iter().map(|(name, counts)| (name.to_owned(), counts));
    let drafts = (1..).zip(&stats.draft_steps);
    target.chain(drafts.map(|(step, counts)| (format!("draft_step_{step}"), *counts))).collect()
}

fn indexer_json(counts: IndexerCounts) -> Value {
    let IndexerCounts { launches, rows, scored_keys } = counts;
    json!({ "launches": launches, "rows": rows, "scored_keys": scored_keys })
}

/// `part` of `whole`; 0 of nothing.
pub(crate) fn share(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

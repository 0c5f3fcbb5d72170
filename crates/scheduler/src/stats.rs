//! Counts.

use engine_types::SpecDecodeStats;
use kv_block_manager::PoolStats;

/// A snapshot of a scheduler; counts without another word are totals since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SchedulerStats {
    /// Requests that hold KV blocks now.
    pub n_running: usize,
    /// Requests that wait now: for their turn, preempted ones included, or for a sibling's prompt.
    pub n_waiting: usize,
    /// Requests among them that have lost their blocks to others.
    pub n_preempted: usize,
    /// Times that a request lost its blocks to another.
    pub n_preemptions: u64,
    /// Requests that ended, for whatever reason.
    pub n_finished: u64,
    /// KV blocks now.
    pub blocks: PoolStats,
    /// Prompt tokens of accepted requests.
    pub n_prompt_tokens: u64,
    /// Prompt tokens of requests that started, each once, while prefix caching is on; the prefix
    /// cache was asked for them.
    pub n_prefix_queried_tokens: u64,
    /// How many of those it had.
    pub n_prefix_hit_tokens: u64,
    /// Prompt tokens whose KV requests got from a sibling.
    pub n_shared_tokens: u64,
    /// Tokens queried in steps that were planned, drafts apart; those of a preempted request again.
    pub n_computed_tokens: u64,
    /// Tokens committed.
    pub n_generated_tokens: u64,
    /// What drafting did, over all requests.
    pub spec_decode: SpecDecodeStats,
    /// Steps planned that only continued outputs.
    pub n_decode_steps: u64,
    /// Steps planned that only read prompts (or recomputed after a preemption).
    pub n_prefill_steps: u64,
    /// Steps planned that did both.
    pub n_mixed_steps: u64,
}

impl SchedulerStats {
    /// Share of the prompt tokens asked for that the prefix cache had; `None` before the first.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "counts stay far below 2^52")]
    pub fn prefix_hit_rate(&self) -> Option<f64> {
        let n_queried = self.n_prefix_queried_tokens;
        (n_queried > 0).then(|| self.n_prefix_hit_tokens as f64 / n_queried as f64)
    }
}

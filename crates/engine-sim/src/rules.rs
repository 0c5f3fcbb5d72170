//! What a plan must keep to whoever its rows are of, and how long who runs may go without a row.

use engine_types::{ExecutorLimits, PlanRow, StepPlan};
use scheduler::SchedulerConfig;

/// The scheduler's configuration as far as it shows in plans.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rules {
    budget: u32,
    max_num_seqs: u32,
    /// Prompts that do not fit are cut at multiples of this.
    alignment: u32,
    /// The longest chunk of a prompt.
    max_chunk: u32,
    /// More blocks than an output ever needs at once.
    ample_blocks: u32,
    pub(crate) max_model_len: u32,
}

impl Rules {
    pub(crate) fn new(config: &SchedulerConfig, limits: &ExecutorLimits) -> Self {
        let max_num_seqs = config.max_num_seqs.min(limits.max_num_seqs);
        let threshold = config.long_prefill_token_threshold;
        Self {
            budget: config.max_num_batched_tokens.min(limits.max_num_batched_tokens),
            max_num_seqs,
            alignment: config.chunk_alignment.max(limits.block_size),
            max_chunk: if threshold == 0 { u32::MAX } else { threshold },
            ample_blocks: 2 + 3 * config.num_speculative_tokens / limits.block_size,
            max_model_len: limits.max_model_len,
        }
    }

    /// Checks sizes: of the plan, and of the chunks of prompts.
    pub(crate) fn check(&self, plan: &StepPlan) {
        assert!(plan.rows().len() <= self.max_num_seqs as usize, "rows");
        assert!(plan.n_queried() <= self.budget as usize, "the token budget");
        for (row_idx, row) in plan.rows().iter().enumerate() {
            let id = row.request_id;
            if !row.prefill {
                assert!(row.samples && row.n_query == 1 + row.n_draft, "{id}: an output's row");
                continue;
            }
            assert!(row.n_query - row.n_draft <= self.max_chunk, "{id}: a long chunk");
            let fills_step = row_idx == 0 && row.n_query == self.budget;
            let is_cut_well = row.samples
                || row.n_query == self.max_chunk
                || row.n_query.is_multiple_of(self.alignment)
                || fills_step;
            assert!(is_cut_well, "{id}: a chunk of {} tokens", row.n_query);
        }
    }

    /// Whether it is the budget that leaves a running request without a row.
    pub(crate) fn is_starved(&self, plan: &StepPlan, is_output: bool, n_available: u32) -> bool {
        let n_queried: u32 = plan.rows().iter().map(|row: &PlanRow| row.n_query).sum();
        let n_left = self.budget - n_queried;
        let n_wanted = if is_output { 1 } else { self.alignment };
        n_left < n_wanted && n_available >= self.ample_blocks
    }
}

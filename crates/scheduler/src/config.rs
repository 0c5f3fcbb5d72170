//! Configuration, validated once.

use engine_types::{ExecutorLimits, MAX_SPECULATIVE_TOKENS, OutputMode, TokenId};

use crate::drafting::DraftPolicy;
use crate::error::ConfigError;

/// Who goes first when not everybody can.
///
/// Every request has a fixed rank. Waiting requests start in the order of their ranks, nobody
/// overtakes, and the greatest rank is the first to lose its blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SchedulingPolicy {
    /// First come, first served: the rank is the order of submission.
    #[default]
    Fcfs,
    /// The rank is the step at which a request was submitted plus `priority * aging_steps`; the
    /// order of submission where two are equal. So a request never waits for one of a better
    /// priority that came more than `aging_steps` steps later for each level between them.
    Priority {
        /// How many steps of waiting make up for one level of priority, at least 1.
        aging_steps: u32,
    },
}

/// How the scheduler decides.
///
/// Where the executor's own limit on sequences or batched tokens is lower, that limit holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SchedulerConfig {
    /// Largest number of requests that run at once, at least 1.
    pub max_num_seqs: u32,
    /// Largest number of tokens that a step queries, at least 1.
    pub max_num_batched_tokens: u32,
    /// How many requests may be unfinished beyond `max_num_seqs`.
    pub max_queued_requests: u32,
    /// Who goes first.
    pub policy: SchedulingPolicy,
    /// Largest number of prompt tokens of one request and step: the block size at least; 0 sets no
    /// limit. Keeps long prompts from taking whole steps to themselves.
    pub long_prefill_token_threshold: u32,
    /// Where a prompt does not fit the token budget, the length of its chunk is a multiple of this
    /// or of the block size, whichever is greater; at least 1.
    pub chunk_alignment: u32,
    /// Whether the next step is planned before this one's tokens are known.
    pub output_mode: OutputMode,
    /// Drafts a step and request, 0 to 8; 0 turns drafting off. It is this number everywhere,
    /// never the width of the verify window.
    pub num_speculative_tokens: u32,
    /// How many of them a request makes in a step; fewer never change an output.
    pub drafting: DraftPolicy,
    /// The ids that end a request unless it ignores them.
    pub eos_token_ids: Vec<TokenId>,
    /// Whether requests with the same prefix share its KV. Outputs are the same either way.
    pub enable_prefix_caching: bool,
}

impl Default for SchedulerConfig {
    fn default() -> Self {
        Self {
            max_num_seqs: 256,
            max_num_batched_tokens: 8192,
            max_queued_requests: 1024,
            policy: SchedulingPolicy::Fcfs,
            long_prefill_token_threshold: 0,
            chunk_alignment: 64,
            output_mode: OutputMode::Immediate,
            num_speculative_tokens: 0,
            drafting: DraftPolicy::default(),
            eos_token_ids: vec![],
            enable_prefix_caching: true,
        }
    }
}

impl SchedulerConfig {
    /// Checks the configuration against the executor and merges their limits.
    pub(crate) fn validated(mut self, limits: &ExecutorLimits) -> Result<Self, ConfigError> {
        let aging_steps = match self.policy {
            SchedulingPolicy::Fcfs => 1,
            SchedulingPolicy::Priority { aging_steps } => aging_steps,
        };
        let positive = [
            ("max_num_seqs", self.max_num_seqs),
            ("max_num_batched_tokens", self.max_num_batched_tokens),
            ("chunk_alignment", self.chunk_alignment),
            ("policy.aging_steps", aging_steps),
            ("limits.block_size", limits.block_size),
            ("limits.num_blocks", limits.num_blocks),
            ("limits.max_num_seqs", limits.max_num_seqs),
            ("limits.max_num_batched_tokens", limits.max_num_batched_tokens),
            ("limits.vocab_size", limits.vocab_size),
        ];
        if let Some((field, _)) = positive.into_iter().find(|(_, value)| *value == 0) {
            return Err(ConfigError::Zero { field });
        }
        if limits.max_model_len < 2 {
            return Err(ConfigError::ModelTooShort { max_model_len: limits.max_model_len });
        }
        self.drafting.validate()?;
        let (value, block_size) = (self.long_prefill_token_threshold, limits.block_size);
        if value != 0 && value < block_size {
            return Err(ConfigError::PrefillThreshold { value, block_size });
        }
        let engine_max = u32::try_from(MAX_SPECULATIVE_TOKENS).expect("a small constant");
        let max = limits.max_num_speculative_tokens.min(engine_max);
        if self.num_speculative_tokens > max {
            let value = self.num_speculative_tokens;
            return Err(ConfigError::TooManySpeculativeTokens { value, max });
        }
        if let Some(&id) = self.eos_token_ids.iter().find(|id| **id >= limits.vocab_size) {
            return Err(ConfigError::EosOutsideVocab { id, vocab_size: limits.vocab_size });
        }
        self.max_num_seqs = self.max_num_seqs.min(limits.max_num_seqs);
        self.max_num_batched_tokens =
            self.max_num_batched_tokens.min(limits.max_num_batched_tokens);
        Ok(self)
    }
}

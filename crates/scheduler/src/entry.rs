//! One unfinished request.

use engine_types::{
    ExecutorLimits, FinishReason, MAX_SPECULATIVE_TOKENS, Request, RequestEvent, RequestId,
    SamplingParams, SpecDecodeStats, TokenId, Usage,
};
use kv_block_manager::{BlockPool, BlockTable, PrefixKeys, PrefixSpace, blocks_for};

/// What the scheduler keeps of a request. Its tokens are committed ones only, never drafts.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) id: RequestId,
    pub(crate) params: SamplingParams,
    /// Drafts a step for this request.
    pub(crate) k: u32,
    /// The prompt, then what was generated.
    pub(crate) tokens: Vec<TokenId>,
    pub(crate) n_prompt: u32,
    /// Tokens, from the front, whose KV is valid.
    pub(crate) n_computed: u32,
    /// Committed tokens, from the front, that the KV was made of, up to where it was made of
    /// anything else.
    n_sources: u32,
    /// Prompt tokens that the prefix cache had when the request started.
    pub(crate) n_cached: u32,
    pub(crate) table: BlockTable,
    /// Which of the executor's block tables is the request's, while it runs.
    pub(crate) table_slot: u32,
    /// How many of its blocks the executor has been told of.
    pub(crate) n_told: u32,
    pub(crate) keys: PrefixKeys,
    pub(crate) is_running: bool,
    /// Whether it lost its blocks and has not got them back.
    pub(crate) is_preempted: bool,
    pub(crate) spec_decode: SpecDecodeStats,
    /// The outcome's row for it, while an outcome is applied.
    pub(crate) outcome_row: Option<usize>,
    drafts: [TokenId; MAX_SPECULATIVE_TOKENS],
    n_drafts: usize,
}

impl Entry {
    /// A waiting request of an engine that makes `num_speculative_tokens` drafts a step. All that
    /// it can grow to has its room from here on, so that no step allocates for it \[INV-8]; memory
    /// that a short output never touches costs address space only.
    pub(crate) fn new(
        request: Request,
        num_speculative_tokens: u32,
        limits: &ExecutorLimits,
    ) -> Self {
        let k = request.params.num_speculative_tokens.unwrap_or(num_speculative_tokens);
        let space = PrefixSpace {
            salt: request.cache_salt.as_deref(),
            drafted: k > 0,
            n_lookahead: if k > 0 { limits.n_lookahead_max } else { 0 },
        };
        let n_prompt = to_u32(request.prompt.len());
        let n_tokens = n_prompt.saturating_add(request.params.max_tokens).min(limits.max_model_len);
        let n_blocks = blocks_for(n_tokens + k, limits.block_size).min(limits.num_blocks);
        let mut tokens = request.prompt;
        // Drafts stand behind the tokens for a moment while a row is planned.
        tokens.reserve_exact((n_tokens + k).saturating_sub(n_prompt) as usize);
        let mut keys = PrefixKeys::new(space);
        keys.reserve(n_blocks);
        Self {
            id: request.id,
            k,
            keys,
            params: request.params,
            n_prompt,
            tokens,
            n_computed: 0,
            n_sources: 0,
            n_cached: 0,
            table: BlockTable::with_capacity(n_blocks),
            table_slot: 0,
            n_told: 0,
            is_running: false,
            is_preempted: false,
            spec_decode: SpecDecodeStats::default(),
            outcome_row: None,
            drafts: [0; MAX_SPECULATIVE_TOKENS],
            n_drafts: 0,
        }
    }

    /// Committed tokens, prompt included.
    pub(crate) fn n_tokens(&self) -> u32 {
        to_u32(self.tokens.len())
    }

    /// Tokens without KV, at least 1.
    pub(crate) fn n_pending(&self) -> u32 {
        self.n_tokens() - self.n_computed
    }

    pub(crate) fn generated(&self) -> &[TokenId] {
        &self.tokens[self.n_prompt as usize..]
    }

    /// The proposals to verify next.
    pub(crate) fn drafts(&self) -> &[TokenId] {
        &self.drafts[..self.n_drafts]
    }

    pub(crate) fn set_drafts(&mut self, drafts: &[TokenId]) {
        self.n_drafts = drafts.len();
        self.drafts[..drafts.len()].copy_from_slice(drafts);
    }

    /// Drafts to propose after a step that computes up to `n_written` tokens, such that no
    /// position outside the model is written; 0 if the step's first token is surely the last.
    pub(crate) fn n_propose(&self, n_written: u32, max_model_len: u32) -> u32 {
        let n_generated = self.n_tokens() - self.n_prompt + 1;
        if n_generated >= self.params.max_tokens || self.n_tokens() + 1 >= max_model_len {
            return 0;
        }
        self.k.min(max_model_len + 1 - n_written)
    }

    /// Starts with the KV of the first `n_hit` tokens, which others have computed, and the
    /// executor's block table `table_slot`.
    pub(crate) fn start_at(&mut self, n_hit: u32, table_slot: u32) {
        self.table_slot = table_slot;
        self.n_told = 0;
        self.n_computed = n_hit;
        self.n_sources = n_hit + self.keys.n_lookahead();
        self.is_running = true;
        self.is_preempted = false;
    }

    /// Enters what KV was made of in a row from position `start` on that accepted `n_accepted`
    /// drafts and left KV up to `n_computed`.
    ///
    /// With `n` draft layers their KV at position `p` is made of the tokens up to `p + n`. A step
    /// that does not know them yet takes its own drafts instead, and nobody writes that KV again.
    /// Where the next row rejects those drafts it still serves the request itself, whose drafts
    /// are a little worse, but never another one. With one layer that does not happen.
    pub(crate) fn settle(&mut self, start: u32, n_accepted: u32) {
        let n_lookahead = self.keys.n_lookahead();
        let n_confirmed = n_accepted.min(n_lookahead.saturating_sub(1));
        if self.n_sources + n_confirmed >= start + n_lookahead {
            self.n_sources = self.n_tokens().min(self.n_computed + n_lookahead);
        }
    }

    /// Tokens, from the front, whose KV is final and made of committed tokens alone.
    pub(crate) fn n_settled(&self) -> u32 {
        self.n_sources.saturating_sub(self.keys.n_lookahead())
    }

    /// Lets others find the full blocks whose KV is final and made of committed tokens alone.
    pub(crate) fn publish(&mut self, pool: &mut BlockPool) {
        let n_settled = self.n_settled();
        pool.publish(&mut self.table, &mut self.keys, &self.tokens, n_settled);
    }

    /// The last event of this request.
    pub(crate) fn finished(&self, reason: FinishReason) -> RequestEvent {
        RequestEvent::Finished {
            request_id: self.id,
            reason,
            usage: Usage {
                prompt_tokens: self.n_prompt,
                completion_tokens: self.n_tokens() - self.n_prompt,
                cached_tokens: self.n_cached,
            },
            spec_decode: Box::new(self.spec_decode),
        }
    }
}

/// Token counts are below `max_model_len`, a `u32`.
pub(crate) fn to_u32(n: usize) -> u32 {
    u32::try_from(n).expect("a request's tokens are counted in u32")
}

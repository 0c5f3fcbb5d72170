//! One unfinished request.

use std::sync::Arc;

use engine_types::{
    BoxedGuide, BoxedStopTexts, ExecutorLimits, FinishReason, PlanRow, Request, RequestEvent,
    RequestId, Sampler, SamplingParams, StepTokens, TokenId, TokenLogprobs, Usage,
};
use kv_block_manager::{BlockPool, BlockTable, PrefixKeys, PrefixSpace, blocks_for};

use crate::drafting::Acceptance;
use crate::entries::Slot;
use crate::flight::Flight;
use crate::queue::Rank;
use crate::verify_counts::VerifyCounts;

/// Where a request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// It waits until the prompt of the request in this slot, its own as well, is computed.
    Held(Slot),
    /// It waits for its turn.
    Waiting,
    /// It lost its blocks and waits for its turn.
    Preempted,
    /// It has blocks.
    Running,
}

/// What the scheduler keeps of a request. Its tokens are committed ones only, never drafts.
///
/// A step goes through the entries of all running requests, which together do not fit into the
/// fastest memory. So what it reads lies in front, in this order.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Entry {
    pub(crate) id: RequestId,
    pub(crate) state: State,
    /// Its newest row of which the outcome is not known.
    pub(crate) flight: Option<Flight>,
    /// The prompt, then what was generated.
    pub(crate) tokens: Vec<TokenId>,
    /// The last of them, which most rows query alone: a look at the end of a long list is a wait
    /// for memory.
    pub(crate) last_token: TokenId,
    pub(crate) table: BlockTable,
    /// The proposals to verify next.
    pub(crate) drafts: StepTokens,
    /// How its drafts fared of late.
    pub(crate) acceptance: Acceptance,
    /// Drafts a step for this request.
    pub(crate) k: u32,
    pub(crate) n_prompt: u32,
    /// With so many tokens it has reached `max_tokens` or the model's length.
    pub(crate) n_tokens_max: u32,
    /// With fewer tokens nothing that `commit` looks at ends it.
    pub(crate) n_tokens_free: u32,
    /// Tokens, from the front, whose KV is valid.
    pub(crate) n_computed: u32,
    /// Tokens that it had when it got its blocks; positions before are prefill.
    pub(crate) n_prefill: u32,
    /// Committed tokens, from the front, that the KV was made of, up to where it was made of
    /// anything else.
    n_sources: u32,
    /// Which of the executor's block tables is the request's, while it runs.
    pub(crate) table_slot: u32,
    /// How many of its blocks the executor has been told of.
    pub(crate) n_told: u32,
    /// How often it lost its blocks: outcomes of earlier rows say nothing of its KV.
    pub(crate) epoch: u32,
    /// Log probabilities of the prompt that were handed out.
    pub(crate) n_prompt_logprobs: u32,
    /// What the executor is told of how its tokens are chosen; `None` if that is plainly greedy.
    pub(crate) sampler: Option<Arc<Sampler>>,
    /// Where its grammar is after the committed tokens.
    pub(crate) guide: Option<BoxedGuide>,
    /// What looks for stop texts, after the committed tokens.
    pub(crate) stop_texts: Option<BoxedStopTexts>,
    pub(crate) keys: PrefixKeys,
    pub(crate) verified: VerifyCounts,
    pub(crate) params: SamplingParams,
    pub(crate) rank: Rank,
    /// Prompt tokens that the prefix cache or a sibling had when the request started.
    pub(crate) n_cached: u32,
    /// Requests that are held until its prompt is computed.
    pub(crate) held: Vec<Slot>,
    /// The request with the same prompt that held it, and may still have the prompt's KV.
    pub(crate) source: Option<(Slot, RequestId)>,
    /// The outcome's row for it, while an outcome is applied.
    pub(crate) outcome_row: Option<usize>,
}

impl Entry {
    /// A waiting request of an engine that makes `num_speculative_tokens` drafts a step. All that
    /// it can grow to has its room from here on, so that no step allocates for it \[INV-8]; memory
    /// that a short output never touches costs address space only.
    pub(crate) fn new(
        request: Request,
        rank: Rank,
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
        // Before the last token, k drafts may be in flight, k verified and k proposed.
        let n_written = n_tokens.saturating_add(3 * k).min(limits.max_model_len);
        let n_blocks = blocks_for(n_written, limits.block_size).min(limits.num_blocks);
        let mut tokens = request.prompt;
        let last_token = *tokens.last().expect("a prompt has tokens");
        tokens.reserve_exact(n_tokens.saturating_sub(n_prompt) as usize);
        let mut keys = PrefixKeys::new(space);
        keys.reserve(n_blocks);
        Self {
            id: request.id,
            rank,
            k,
            keys,
            params: request.params,
            sampler: None,
            guide: request.guide,
            stop_texts: request.stop_texts,
            n_prompt_logprobs: 0,
            n_prompt,
            n_tokens_max: n_tokens,
            n_tokens_free: 0,
            tokens,
            last_token,
            n_computed: 0,
            n_prefill: 0,
            n_sources: 0,
            n_cached: 0,
            table: BlockTable::with_capacity(n_blocks),
            table_slot: 0,
            n_told: 0,
            state: State::Waiting,
            epoch: 0,
            flight: None,
            held: vec![],
            source: None,
            verified: VerifyCounts::default(),
            acceptance: Acceptance::default(),
            outcome_row: None,
            drafts: StepTokens::default(),
        }
    }

    /// Whether log probabilities of the prompt are wanted and have not all been handed out, so that
    /// the prompt has to be computed.
    pub(crate) fn lacks_prompt_logprobs(&self) -> bool {
        self.params.prompt_logprobs.is_some() && self.n_prompt_logprobs + 1 < self.n_prompt
    }

    /// Hands out the log probabilities of the prompt that `row` has computed, each once.
    pub(crate) fn hand_out_prompt_logprobs(
        &mut self,
        row: &PlanRow,
        logprobs: &[TokenLogprobs],
        events: &mut Vec<RequestEvent>,
    ) {
        let n_known = self.n_prompt_logprobs.saturating_sub(row.n_computed) as usize;
        let Some(new) = logprobs.get(n_known..).filter(|new| !new.is_empty()) else { return };
        self.n_prompt_logprobs += to_u32(new.len());
        let logprobs = new.to_vec();
        events.push(RequestEvent::PromptLogprobs { request_id: self.id, logprobs });
    }

    /// Whether it has blocks.
    pub(crate) fn is_running(&self) -> bool {
        self.state == State::Running
    }

    /// Committed tokens, prompt included.
    pub(crate) fn n_tokens(&self) -> u32 {
        to_u32(self.tokens.len())
    }

    pub(crate) fn generated(&self) -> &[TokenId] {
        &self.tokens[self.n_prompt as usize..]
    }

    /// Whether the request surely has ended by the time that it has `n_tokens` tokens.
    pub(crate) fn surely_ends(&self, n_tokens: u32) -> bool {
        n_tokens >= self.n_tokens_max
    }

    /// How many of `k` drafts to propose after a step that begins with `n_tokens` tokens at least
    /// and writes up to `n_written`, such that no position outside the model is written; 0 if the
    /// step's first token is surely the last.
    pub(crate) fn n_propose(&self, k: u32, n_tokens: u32, n_written: u32, max_len: u32) -> u32 {
        if self.surely_ends(n_tokens + 1) {
            return 0;
        }
        k.min(max_len + 1 - n_written)
    }

    /// Starts with the KV of the first `n_hit` tokens, which others have computed, and the
    /// executor's block table `table_slot`.
    pub(crate) fn start_at(&mut self, n_hit: u32, table_slot: u32) {
        self.table_slot = table_slot;
        self.n_told = 0;
        self.n_computed = n_hit;
        self.n_sources = n_hit + self.keys.n_lookahead();
        self.n_prefill = self.n_tokens();
        self.state = State::Running;
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

    /// Computes the keys of what [`publish`](Self::publish) enters.
    pub(crate) fn hash_blocks(&mut self, pool: &mut BlockPool) {
        let n_settled = self.n_settled();
        pool.hash_blocks(&mut self.keys, &self.tokens, n_settled);
    }

    /// Fetches the memory that [`publish`](Self::publish) needs.
    pub(crate) fn touch(&self, pool: &BlockPool) {
        pool.touch(&self.table, &self.keys);
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
            spec_decode: Box::new(self.verified.stats()),
        }
    }
}

/// Token counts are below `max_model_len`, a `u32`.
pub(crate) fn to_u32(n: usize) -> u32 {
    u32::try_from(n).expect("a request's tokens are counted in u32")
}

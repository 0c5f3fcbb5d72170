//! A scheduler with a scripted executor: the token at position `p` is `100 + p`.

use engine_types::{
    ExecutorLimits, FinishReason, Request, RequestEvent, RequestId, SamplingParams, StepOutcome,
    StepPlan, TokenId,
};

use crate::{Scheduler, SchedulerConfig, SchedulerStats};

pub(super) fn limits(block_size: u32, num_blocks: u32) -> ExecutorLimits {
    ExecutorLimits {
        block_size,
        num_blocks,
        max_model_len: 64,
        max_num_seqs: 4,
        max_num_batched_tokens: 64,
        max_num_speculative_tokens: 8,
        n_lookahead_max: 1,
        vocab_size: 1000,
    }
}

/// Without prefix caching, so that what is planned depends on lengths alone.
pub(super) fn config(k: u32) -> SchedulerConfig {
    SchedulerConfig {
        num_speculative_tokens: k,
        eos_token_ids: vec![2],
        enable_prefix_caching: false,
        ..Default::default()
    }
}

/// The same with prefix caching.
pub(super) fn caching(k: u32) -> SchedulerConfig {
    SchedulerConfig { enable_prefix_caching: true, ..config(k) }
}

pub(super) fn params(max_tokens: u32) -> SamplingParams {
    SamplingParams { max_tokens, ignore_eos: false, ..SamplingParams::default() }
}

pub(super) fn request(id: u64, n_prompt: u32, max_tokens: u32) -> Request {
    let prompt = (100..100 + n_prompt).collect();
    Request {
        id: RequestId(id),
        prompt,
        params: params(max_tokens),
        cache_salt: None,
        priority: 0,
        guide: None,
        stop_texts: None,
        siblings: vec![],
    }
}

/// The engine without its executor.
pub(super) struct Rig {
    pub(super) scheduler: Scheduler,
    pub(super) plan: StepPlan,
    pub(super) events: Vec<RequestEvent>,
    /// Accepted drafts of a verify row, at most.
    pub(super) n_right: u32,
}

impl Rig {
    pub(super) fn new(config: SchedulerConfig, limits: ExecutorLimits) -> Self {
        let scheduler = Scheduler::new(config, limits).unwrap();
        Self { scheduler, plan: StepPlan::default(), events: vec![], n_right: 8 }
    }

    pub(super) fn submit(&mut self, id: u64, n_prompt: u32, max_tokens: u32) {
        self.scheduler.submit(request(id, n_prompt, max_tokens)).unwrap();
    }

    pub(super) fn submit_prompt(&mut self, id: u64, prompt: &[TokenId], max_tokens: u32) {
        let request = Request { prompt: prompt.to_vec(), ..request(id, 1, max_tokens) };
        self.scheduler.submit(request).unwrap();
    }

    pub(super) fn plan(&mut self) -> bool {
        let has_work = self.scheduler.plan(&mut self.plan, &mut self.events);
        self.scheduler.check_invariants();
        has_work
    }

    /// Answers the plan: drafts are right up to `n_right` a row.
    pub(super) fn apply(&mut self) {
        let mut outcome = StepOutcome::default();
        for row in self.plan.rows() {
            let n_accepted = row.n_draft.min(self.n_right);
            let next = 100 + row.n_computed + row.n_query - row.n_draft;
            let run: Vec<_> = (next..=next + n_accepted).collect();
            let run = if row.samples { run } else { vec![] };
            let after = next + n_accepted + 1;
            // Beyond the right ones, drafts are wrong.
            let draft = |n| if n < self.n_right { after + n } else { 1 };
            let drafts: Vec<TokenId> = (0..row.n_propose).map(draft).collect();
            outcome.push_row(row.request_id, &run, n_accepted, &drafts);
        }
        self.scheduler.apply(&self.plan, &outcome, &mut self.events);
        self.scheduler.check_invariants();
    }

    pub(super) fn step(&mut self) -> bool {
        let has_work = self.plan();
        if has_work {
            self.apply();
        }
        has_work
    }

    pub(super) fn drain(&mut self) {
        for _ in 0..1000 {
            if !self.step() {
                return;
            }
        }
        panic!("a live-lock");
    }

    /// Per planned row: request, first position, queried tokens and drafts among them.
    pub(super) fn rows(&self) -> Vec<(u64, u32, u32, u32)> {
        let rows = self.plan.rows().iter();
        rows.map(|row| (row.request_id.0, row.n_computed, row.n_query, row.n_draft)).collect()
    }

    pub(super) fn tokens(&self, id: u64) -> Vec<TokenId> {
        let runs = self.events.iter().filter_map(|event| match event {
            RequestEvent::Tokens(event) if event.request_id.0 == id => Some(event.tokens),
            _ => None,
        });
        runs.flatten().collect()
    }

    /// Why a request ended; it must have ended at most once.
    pub(super) fn reason(&self, id: u64) -> Option<FinishReason> {
        let mut reasons = self.events.iter().filter_map(|event| match event {
            RequestEvent::Finished { request_id, reason, .. } if request_id.0 == id => {
                Some(reason.clone())
            }
            _ => None,
        });
        let reason = reasons.next();
        assert_eq!(reasons.next(), None, "one last event");
        reason
    }

    /// The prompt tokens of a finished request that came from the prefix cache.
    pub(super) fn cached_tokens(&self, id: u64) -> Option<u32> {
        self.events.iter().find_map(|event| match event {
            RequestEvent::Finished { request_id, usage, .. } if request_id.0 == id => {
                Some(usage.cached_tokens)
            }
            _ => None,
        })
    }

    pub(super) fn stats(&self) -> SchedulerStats {
        self.scheduler.stats()
    }
}

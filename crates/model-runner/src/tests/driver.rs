//! A plain driver of a [`Runner`]: fixed blocks, no scheduler.

use std::sync::Arc;

use engine_types::{
    BlockId, OutcomeRow, RequestId, RowSpec, RowTable, Sampler, SamplerSetup, SamplingParams,
    StepExecutor, StepOutcome, StepPlan, TokenId, TokenLogprobs,
};

use crate::runner::Runner;

/// A request and what became of it.
#[derive(Clone, Debug)]
pub(super) struct Job {
    /// The prompt, then what was generated.
    tokens: Vec<TokenId>,
    n_prompt: usize,
    max_tokens: usize,
    n_drafts: usize,
    n_computed: usize,
    /// Position of the first token that no row has queried yet.
    next: usize,
    /// Which row of the step before it has, if that one samples.
    last_row: Option<u32>,
    blocks: Vec<BlockId>,
    /// How many of the blocks the runner has been told of.
    n_told: usize,
    drafts: Vec<TokenId>,
    /// The drafts behind each sampling step, the first one's behind the first token.
    pub(super) proposed: Vec<Vec<TokenId>>,
    /// Accepted drafts of each verify step, also those behind the limit.
    pub(super) accepted: Vec<u32>,
    sampler: Option<Arc<Sampler>>,
    /// The tokens that any choice is limited to, as bits; empty for all.
    pub(super) mask: Vec<u32>,
    pub(super) logprobs: Vec<TokenLogprobs>,
    pub(super) prompt_logprobs: Vec<TokenLogprobs>,
    /// Why it has ended early.
    pub(super) failure: Option<String>,
}

impl Job {
    pub(super) fn new(prompt: &[TokenId], max_tokens: usize, n_drafts: usize) -> Self {
        Self {
            tokens: prompt.to_vec(),
            n_prompt: prompt.len(),
            max_tokens,
            n_drafts,
            n_computed: 0,
            next: 0,
            last_row: None,
            blocks: Vec::new(),
            n_told: 0,
            drafts: Vec::new(),
            proposed: Vec::new(),
            accepted: Vec::new(),
            sampler: None,
            mask: Vec::new(),
            logprobs: Vec::new(),
            prompt_logprobs: Vec::new(),
            failure: None,
        }
    }

    /// Its tokens are chosen with `params`, whose seed is given, and end with one of `end_ids`.
    pub(super) fn sampled(self, params: SamplingParams, end_token_ids: &[TokenId]) -> Self {
        let (seed, n_prompt) = (params.seed.unwrap(), to_u32(self.n_prompt));
        let end_token_ids = end_token_ids.to_vec();
        let sampler = Sampler { params, seed, n_prompt, end_token_ids };
        Self { sampler: Some(Arc::new(sampler)), ..self }
    }

    /// The request as it comes back after a preemption.
    pub(super) fn resumed(&self, max_tokens: usize) -> Self {
        let fresh = Self::new(&self.tokens[..self.n_prompt], max_tokens, self.n_drafts);
        Self { tokens: self.tokens.clone(), sampler: self.sampler.clone(), ..fresh }
    }

    /// Whether it has no sampler.
    pub(super) fn is_plain(&self) -> bool {
        self.sampler.is_none()
    }

    pub(super) fn generated(&self) -> &[TokenId] {
        &self.tokens[self.n_prompt..]
    }

    fn is_done(&self) -> bool {
        self.failure.is_some() || self.generated().len() >= self.max_tokens
    }

    /// Appends the row that comes next. In deferred mode it continues the row of the step in
    /// flight, once that samples.
    fn push_row(&mut self, plan: &mut StepPlan, id: RequestId, feed: Feed, pool: Pool) {
        let source = self.last_row.filter(|_| feed.deferred);
        if let Some(sampler) = self.sampler.clone().filter(|_| self.n_told == 0) {
            let slot = u32::try_from(id.0).unwrap();
            plan.push_sampler(SamplerSetup { slot, sampler, tokens: self.tokens.clone() });
        }
        let start = self.next;
        let end = self.tokens.len().min(start + feed.chunk);
        let samples = end == self.tokens.len();
        self.last_row = samples.then(|| to_u32(plan.rows().len()));
        self.next = end;
        let spec = RowSpec {
            n_computed: to_u32(start),
            n_draft: to_u32(self.drafts.len()),
            samples,
            prefill: start < self.n_prompt,
            drafting: self.n_drafts > 0,
            n_propose: if samples { to_u32(self.n_drafts) } else { 0 },
            has_sampler: self.sampler.is_some(),
        };
        if let Some(row) = source {
            let spec = RowSpec { n_computed: to_u32(end), n_draft: to_u32(self.n_drafts), ..spec };
            // The row in flight may accept all its drafts.
            let table = self.table(plan, id, end + 2 * self.n_drafts + 1, pool);
            plan.push_deferred_row(id, spec, row, table);
            return;
        }
        let query = [&self.tokens[start..end], &self.drafts].concat();
        let lookahead = end..self.tokens.len().min(end + pool.n_lookahead);
        let table = self.table(plan, id, start + query.len(), pool);
        plan.push_row(id, spec, &query, &self.tokens[lookahead], table);
        if samples && !self.mask.is_empty() {
            plan.mask_last_row(&self.mask.repeat(self.drafts.len() + 1));
        }
    }

    /// The block table of a row that queries up to position `n_queried`. Tells of the blocks that
    /// it needs first.
    fn table(
        &mut self,
        plan: &mut StepPlan,
        id: RequestId,
        n_queried: usize,
        pool: Pool,
    ) -> RowTable {
        let start = self.n_told;
        let n_positions = n_queried + self.n_drafts.saturating_sub(1);
        self.n_told = start.max(n_positions.div_ceil(pool.block_size));
        let slot = u32::try_from(id.0).unwrap();
        plan.update_table(slot, to_u32(start), &self.blocks[start..self.n_told])
    }

    fn apply(&mut self, outcome: &StepOutcome, row: &OutcomeRow, chunk: usize) {
        self.failure = outcome.failure(row).map(str::to_owned);
        if self.failure.is_some() {
            return;
        }
        let (run, drafts) = (outcome.tokens(row), outcome.drafts(row));
        self.logprobs.extend_from_slice(outcome.logprobs(row));
        self.logprobs.truncate(self.max_tokens);
        self.prompt_logprobs.extend_from_slice(outcome.prompt_logprobs(row));
        if run.is_empty() {
            self.n_computed += chunk;
            return;
        }
        if self.n_drafts > 0 && !self.proposed.is_empty() {
            self.accepted.push(to_u32(run.len() - 1));
        }
        self.n_computed = self.tokens.len() + run.len() - 1;
        self.next = self.n_computed;
        self.tokens.extend_from_slice(run);
        self.tokens.truncate(self.n_prompt + self.max_tokens);
        self.drafts = drafts.to_vec();
        self.proposed.push(drafts.to_vec());
    }

    /// The slots behind the valid ones.
    fn unused_slots(&self, block_size: usize) -> Vec<i64> {
        let slot = |position: usize| {
            let block = self.blocks[position / block_size].0 as usize;
            i64::try_from(block * block_size + position % block_size).unwrap()
        };
        (self.n_computed..self.blocks.len() * block_size).map(slot).collect()
    }
}

fn to_u32(value: usize) -> u32 {
    u32::try_from(value).unwrap()
}

/// How [`run`] feeds the jobs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Feed {
    /// Prompt tokens a step and job.
    pub(super) chunk: usize,
    /// After each step, fill every slot behind the valid ones with NaN.
    pub(super) poison: bool,
    /// Launch each step before the one before it is collected.
    pub(super) deferred: bool,
}

/// What a job needs to know of the runner.
#[derive(Clone, Copy, Debug)]
struct Pool {
    block_size: usize,
    n_lookahead: usize,
}

/// Runs all jobs to their ends, in one batch from the first step on.
pub(super) fn run(runner: &mut Runner, mut jobs: Vec<Job>, feed: Feed) -> Vec<Job> {
    let limits = runner.limits();
    let block_size = limits.block_size as usize;
    let pool = Pool { block_size, n_lookahead: limits.n_lookahead_max as usize };
    allocate(&mut jobs, block_size, limits.num_blocks);
    let (mut plan, mut outcome) = (StepPlan::default(), StepOutcome::default());
    let mut n_in_flight = 0;
    loop {
        plan.clear();
        for (id, job) in (0..).map(RequestId).zip(&mut jobs).filter(|(_, job)| !job.is_done()) {
            job.push_row(&mut plan, id, feed, pool);
        }
        if !plan.is_empty() {
            runner.launch(&plan);
            n_in_flight += 1;
            if feed.deferred && n_in_flight == 1 {
                continue;
            }
        } else if n_in_flight == 0 {
            return jobs;
        }
        runner.collect(&mut outcome).unwrap();
        n_in_flight -= 1;
        for row in outcome.rows() {
            let job = &mut jobs[usize::try_from(row.request_id.0).unwrap()];
            // A row that was launched before the end of its request was known.
            if job.is_done() {
                continue;
            }
            job.apply(&outcome, row, feed.chunk);
            if feed.poison {
                runner.kv_cache_mut().poison(&job.unused_slots(block_size));
            }
        }
    }
}

/// Deals the pool's blocks out one at a time from the last one, so that no table is contiguous.
fn allocate(jobs: &mut [Job], block_size: usize, num_blocks: u32) {
    let mut free = (0..num_blocks).map(BlockId);
    let needs: Vec<usize> = jobs
        .iter()
        .map(|job| (job.n_prompt + job.max_tokens + 3 * job.n_drafts).div_ceil(block_size))
        .collect();
    for nth in 0..needs.iter().copied().max().unwrap_or(0) {
        for (job, _) in jobs.iter_mut().zip(&needs).filter(|(_, need)| **need > nth) {
            job.blocks.push(free.next_back().expect("the test's pool is large enough"));
        }
    }
}

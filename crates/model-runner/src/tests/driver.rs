//! A plain driver of a [`Runner`]: fixed block tables, no scheduler.

use engine_types::{BlockId, RequestId, RowSpec, StepExecutor, StepOutcome, StepPlan, TokenId};

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
    blocks: Vec<BlockId>,
    drafts: Vec<TokenId>,
    /// The drafts behind each sampling step, the first one's behind the first token.
    pub(super) proposed: Vec<Vec<TokenId>>,
    /// Accepted drafts of each verify step, also those behind the limit.
    pub(super) accepted: Vec<u32>,
}

impl Job {
    pub(super) fn new(prompt: &[TokenId], max_tokens: usize, n_drafts: usize) -> Self {
        Self {
            tokens: prompt.to_vec(),
            n_prompt: prompt.len(),
            max_tokens,
            n_drafts,
            n_computed: 0,
            blocks: Vec::new(),
            drafts: Vec::new(),
            proposed: Vec::new(),
            accepted: Vec::new(),
        }
    }

    pub(super) fn generated(&self) -> &[TokenId] {
        &self.tokens[self.n_prompt..]
    }

    fn is_done(&self) -> bool {
        self.generated().len() >= self.max_tokens
    }

    fn push_row(&self, plan: &mut StepPlan, id: RequestId, chunk: usize, n_lookahead: usize) {
        let end = self.tokens.len().min(self.n_computed + chunk);
        let samples = end == self.tokens.len();
        let mut query = self.tokens[self.n_computed..end].to_vec();
        query.extend_from_slice(&self.drafts);
        let n_lookahead = n_lookahead.min(self.tokens.len() - end);
        let spec = RowSpec {
            n_computed: u32::try_from(self.n_computed).unwrap(),
            n_draft: u32::try_from(self.drafts.len()).unwrap(),
            samples,
            drafting: self.n_drafts > 0,
            n_propose: if samples { u32::try_from(self.n_drafts).unwrap() } else { 0 },
        };
        plan.push_row(id, spec, &query, &self.tokens[end..end + n_lookahead], &self.blocks);
    }

    fn apply(&mut self, run: &[TokenId], drafts: &[TokenId], chunk: usize) {
        if run.is_empty() {
            self.n_computed += chunk;
            return;
        }
        if !self.drafts.is_empty() {
            self.accepted.push(u32::try_from(run.len() - 1).unwrap());
        }
        self.n_computed = self.tokens.len() + run.len() - 1;
        self.tokens.extend_from_slice(run);
        self.tokens.truncate(self.n_prompt + self.max_tokens);
        self.drafts = drafts.to_vec();
        self.proposed.push(drafts.to_vec());
    }
}

/// How [`run`] feeds the jobs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Feed {
    /// Prompt tokens a step and job.
    pub(super) chunk: usize,
    /// After each step, fill every slot behind the valid ones with NaN.
    pub(super) poison: bool,
}

/// Runs all jobs to their ends, in one batch from the first step on.
pub(super) fn run(runner: &mut Runner, mut jobs: Vec<Job>, feed: Feed) -> Vec<Job> {
    let limits = runner.limits();
    let block_size = limits.block_size as usize;
    allocate(&mut jobs, block_size, limits.num_blocks);
    let (mut plan, mut outcome) = (StepPlan::default(), StepOutcome::default());
    while jobs.iter().any(|job| !job.is_done()) {
        plan.clear();
        for (id, job) in (0..).map(RequestId).zip(&jobs).filter(|(_, job)| !job.is_done()) {
            job.push_row(&mut plan, id, feed.chunk, limits.n_lookahead_max as usize);
        }
        runner.execute(&plan, &mut outcome).unwrap();
        for row in outcome.rows() {
            let job = &mut jobs[usize::try_from(row.request_id.0).unwrap()];
            job.apply(outcome.tokens(row), outcome.drafts(row), feed.chunk);
            if feed.poison {
                let slots = |position: usize| {
                    let block = job.blocks[position / block_size].0 as usize;
                    i64::try_from(block * block_size + position % block_size).unwrap()
                };
                let behind: Vec<i64> =
                    (job.n_computed..job.blocks.len() * block_size).map(slots).collect();
                runner.kv_cache.poison(&behind);
            }
        }
    }
    jobs
}

/// Deals the pool's blocks out one at a time from the last one, so that no table is contiguous.
fn allocate(jobs: &mut [Job], block_size: usize, num_blocks: u32) {
    let mut free = (0..num_blocks).map(BlockId);
    let needs: Vec<usize> = jobs
        .iter()
        .map(|job| (job.n_prompt + job.max_tokens + 2 * job.n_drafts).div_ceil(block_size))
        .collect();
    for nth in 0..needs.iter().copied().max().unwrap_or(0) {
        for (job, _) in jobs.iter_mut().zip(&needs).filter(|(_, need)| **need > nth) {
            job.blocks.push(free.next_back().expect("the test's pool is large enough"));
        }
    }
}

//! How the tokens of each block table's request are chosen.

use engine_types::{
    ExecutorLimits, MAX_LOGPROBS, PlanRow, Sampler, SamplerSetup, StepPlan, TokenId,
};
use sampler::{SamplingParams, TokenHistory};

/// The samplers of the requests that are not plainly greedy, by block table.
#[derive(Debug, Default)]
pub(crate) struct Samplers {
    tables: Vec<Option<TableSampler>>,
}

/// What a request asks for, and its tokens so far.
#[derive(Debug)]
pub(crate) struct TableSampler {
    pub(crate) params: SamplingParams,
    /// What drafts are drawn with, if they are.
    pub(crate) draft_params: SamplingParams,
    /// The committed tokens: of steps that failed, nothing is entered.
    pub(crate) history: TokenHistory,
    pub(crate) n_logprobs: Option<u32>,
    pub(crate) n_prompt_logprobs: Option<u32>,
    n_prompt: usize,
}

impl Samplers {
    /// Takes over the plan's setups. One that cannot be honoured leaves its table without a sampler
    /// and does not keep the others from theirs; the text says what is wrong with it.
    pub(crate) fn update(
        &mut self,
        plan: &StepPlan,
        limits: &ExecutorLimits,
    ) -> Result<(), String> {
        let mut result = Ok(());
        for setup in plan.sampler_setups() {
            let slot = setup.slot as usize;
            if self.tables.len() <= slot {
                self.tables.resize_with(slot + 1, || None);
            }
            let made = TableSampler::new(setup, limits.vocab_size);
            self.tables[slot] = made.map_err(|fault| result = Err(fault)).ok();
        }
        result.and_then(|()| plan.rows().iter().try_for_each(|row| self.check(row)))
    }

    /// The sampler of `row`; none if it is plainly greedy.
    pub(crate) fn of(&self, row: &PlanRow) -> Option<&TableSampler> {
        let table = self.tables.get(row.table.slot as usize).filter(|_| row.has_sampler);
        table.and_then(Option::as_ref)
    }

    /// Enters the accepted run of `row`.
    pub(crate) fn extend(&mut self, row: &PlanRow, run: &[TokenId]) {
        if row.has_sampler {
            let table = self.tables[row.table.slot as usize].as_mut();
            table.expect("the row was checked").history.extend(run);
        }
    }

    /// Checks that the known tokens of `row` are those of its sampler.
    fn check(&self, row: &PlanRow) -> Result<(), String> {
        if !row.has_sampler {
            return Ok(());
        }
        let id = row.request_id;
        let Some(sampler) = self.of(row) else {
            return Err(format!("{id}: block table {} has no sampler", row.table.slot));
        };
        let (n_known, end) = (sampler.history.tokens().len(), row.n_computed + n_known(row));
        if (row.samples && n_known != end as usize) || n_known < end as usize {
            return Err(format!("{id}: the row ends at position {end}, its sampler at {n_known}"));
        }
        Ok(())
    }
}

/// How many queried tokens of `row` are not drafts.
fn n_known(row: &PlanRow) -> u32 {
    row.n_query - row.n_draft
}

impl TableSampler {
    fn new(setup: &SamplerSetup, vocab_size: u32) -> Result<Self, String> {
        let SamplerSetup { slot, sampler, tokens } = setup;
        let refused = |fault: String| format!("the sampler of block table {slot}: {fault}");
        let wanted = &sampler.params;
        for (field, n) in
            [("logprobs", wanted.logprobs), ("prompt_logprobs", wanted.prompt_logprobs)]
        {
            if let Some(n) = n.filter(|&n| n > MAX_LOGPROBS) {
                return Err(refused(format!("{field} is {n}, the limit is {MAX_LOGPROBS}")));
            }
        }
        let n_prompt = sampler.n_prompt as usize;
        if n_prompt > tokens.len() {
            return Err(refused(format!("{} tokens, {n_prompt} of the prompt", tokens.len())));
        }
        let params = params(sampler);
        params.check(vocab_size).map_err(|error| refused(error.to_string()))?;
        let (prompt, generated) = tokens.split_at(n_prompt);
        let mut history = TokenHistory::new(prompt);
        history.extend(generated);
        Ok(Self {
            draft_params: draft_params(&params),
            params,
            history,
            n_logprobs: wanted.logprobs,
            n_prompt_logprobs: wanted.prompt_logprobs,
            n_prompt,
        })
    }

    /// The tokens behind the queried ones of `row`, as far as they belong to the prompt; none where
    /// nobody wants to know how likely they are.
    pub(crate) fn prompt_behind(&self, row: &PlanRow) -> &[TokenId] {
        if self.n_prompt_logprobs.is_none() {
            return &[];
        }
        let start = (row.n_computed as usize + 1).min(self.n_prompt);
        let end = ((row.n_computed + row.n_query) as usize + 1).min(self.n_prompt);
        &self.history.tokens()[start..end]
    }
}

fn params(sampler: &Sampler) -> SamplingParams {
    let wanted = &sampler.params;
    SamplingParams {
        temperature: wanted.temperature,
        top_k: wanted.top_k,
        top_p: wanted.top_p,
        min_p: wanted.min_p,
        presence_penalty: wanted.presence_penalty,
        frequency_penalty: wanted.frequency_penalty,
        repetition_penalty: wanted.repetition_penalty,
        logit_bias: wanted.logit_bias.clone(),
        bad_words: wanted.bad_words.clone(),
        allowed_token_ids: wanted.allowed_token_ids.clone(),
        min_tokens: wanted.min_tokens,
        end_ids: sampler.end_token_ids.clone(),
        seed: sampler.seed,
    }
}

/// What a draft of a request with `params` is drawn with: whatever needs neither history nor the
/// host. Verification is exact for any distribution of drafts; a close one is accepted more often.
fn draft_params(params: &SamplingParams) -> SamplingParams {
    let SamplingParams { temperature, top_k, top_p, min_p, seed, .. } = *params;
    SamplingParams { temperature, top_k, top_p, min_p, seed, ..SamplingParams::default() }
}

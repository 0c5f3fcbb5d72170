//! A model that follows a script, for tests of what requests ask of the choice of tokens.
//!
//! It does what the contract says of masks, logit biases, penalties, `min_tokens`, allowed ids,
//! temperature and log probabilities, one row at a time; the other parameters it only writes down.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use engine_types::{PlanRow, Sampler, SamplerSetup, StepOutcome, StepPlan, TokenId, TokenLogprobs};

/// The position of a token and the token before it.
type Place = (usize, TokenId);

/// What the model says and what the drafter guesses.
#[derive(Clone)]
pub struct Script {
    /// The logits of the token at a place.
    pub logits: Arc<dyn Fn(Place) -> Vec<f32> + Send + Sync>,
    /// The draft for a place.
    pub draft: Arc<dyn Fn(Place) -> TokenId + Send + Sync>,
    /// How the tokens of each request were to be chosen, in the order of their starts.
    pub seen: Arc<Mutex<Vec<Sampler>>>,
}

impl Script {
    /// A model with these logits and a drafter with these drafts, by place.
    pub fn new(
        logits: impl Fn(Place) -> Vec<f32> + Send + Sync + 'static,
        draft: impl Fn(Place) -> TokenId + Send + Sync + 'static,
    ) -> Self {
        Self { logits: Arc::new(logits), draft: Arc::new(draft), seen: Arc::default() }
    }

    /// Emits `tokens` behind a prompt of `n_prompt`, the last one for ever; all drafts are right.
    pub fn fixed(n_vocab: usize, n_prompt: usize, tokens: &'static [TokenId]) -> Self {
        let token_at =
            move |(at, _): Place| tokens[at.saturating_sub(n_prompt).min(tokens.len() - 1)];
        let logits = move |place| {
            let mut logits = vec![0.0; n_vocab];
            logits[token_at(place) as usize] = 5.0;
            logits
        };
        Self::new(logits, token_at)
    }
}

/// Runs rows as the script says.
pub(crate) struct Scripted {
    script: Script,
    /// The samplers of block tables, and the tokens of the requests that have them.
    setups: HashMap<u32, SamplerSetup>,
}

impl Scripted {
    pub(crate) fn new(script: Script) -> Self {
        Self { script, setups: HashMap::new() }
    }

    pub(crate) fn run(&mut self, plan: &StepPlan, outcome: &mut StepOutcome) {
        for setup in plan.sampler_setups() {
            self.script.seen.lock().unwrap().push((*setup.sampler).clone());
            self.setups.insert(setup.slot, setup.clone());
        }
        for row in plan.rows() {
            self.run_row(plan, row, outcome);
        }
    }

    fn run_row(&mut self, plan: &StepPlan, row: &PlanRow, outcome: &mut StepOutcome) {
        let Script { logits, draft, .. } = &self.script;
        let setup = row.has_sampler.then(|| self.setups.get_mut(&row.table.slot).unwrap());
        let (tokens, drafts) = (plan.tokens(row), plan.drafts(row));
        let n_known = tokens.len() - drafts.len();
        let start = row.n_computed as usize;
        let (mut run, mut logprobs) = (vec![], vec![]);
        let mut last = tokens[n_known - 1];
        for choice in 0..=drafts.len() {
            if !row.samples {
                break;
            }
            let at = start + n_known + choice;
            let mut raw = logits((at, last));
            mask(&mut raw, plan.masks(row), choice, drafts.len() + 1);
            let sampler = setup.as_ref().map(|setup| (&*setup.sampler, &setup.tokens));
            last = sampler
                .map_or_else(|| likeliest(&raw), |(sampler, old)| choose(&raw, sampler, old, &run));
            run.push(last);
            if let Some(n_top) = sampler.and_then(|(sampler, _)| sampler.params.logprobs) {
                logprobs.push(log_probability(&raw, last, n_top));
            }
            if drafts.get(choice) != Some(&last) {
                break;
            }
        }
        let mut proposals = vec![];
        for idx in 0..row.n_propose as usize {
            let before = proposals.last().copied().unwrap_or(last);
            proposals.push(draft((start + n_known + run.len() + idx, before)));
        }
        let n_accepted = u32::try_from(run.len().saturating_sub(1)).unwrap();
        outcome.push_row(row.request_id, &run, n_accepted, &proposals);
        let Some(setup) = setup else { return };
        if !logprobs.is_empty() {
            outcome.push_logprobs(logprobs);
        }
        if let Some(n_top) = setup.sampler.params.prompt_logprobs {
            let n_prompt = setup.sampler.n_prompt as usize;
            let behind = start + 1..(start + n_known + 1).min(n_prompt);
            let prompt = behind.map(|at| {
                let raw = logits((at, setup.tokens[at - 1]));
                log_probability(&raw, setup.tokens[at], n_top)
            });
            outcome.push_prompt_logprobs(prompt.collect::<Vec<_>>());
        }
        setup.tokens.extend(&run);
    }
}

/// Forbids what the mask of a choice forbids, of `n_choices` masks.
fn mask(logits: &mut [f32], masks: &[u32], choice: usize, n_choices: usize) {
    let n_words = masks.len() / n_choices;
    for (id, logit) in logits.iter_mut().enumerate().filter(|_| n_words > 0) {
        if masks[choice * n_words + id / 32] >> (id % 32) & 1 == 0 {
            *logit = f32::NEG_INFINITY;
        }
    }
}

fn likeliest(logits: &[f32]) -> TokenId {
    let mut best = 0;
    for (id, logit) in logits.iter().enumerate() {
        if *logit > logits[best] {
            best = id;
        }
    }
    TokenId::try_from(best).unwrap()
}

/// The token behind the committed tokens `old` and the drafts `run` that were accepted.
fn choose(raw: &[f32], sampler: &Sampler, old: &[TokenId], run: &[TokenId]) -> TokenId {
    let params = &sampler.params;
    let mut logits = raw.to_vec();
    for (id, bias) in &params.logit_bias {
        logits[*id as usize] += bias;
    }
    let n_prompt = sampler.n_prompt as usize;
    let is_generated = |idx: usize| idx >= n_prompt;
    for (id, logit) in logits.iter_mut().enumerate() {
        let all = old.iter().chain(run).enumerate().filter(|(_, token)| **token as usize == id);
        let (mut is_known, mut n_generated) = (false, 0.0);
        for (idx, _) in all {
            is_known = true;
            n_generated += f32::from(u8::from(is_generated(idx)));
        }
        if is_known {
            let factor = params.repetition_penalty;
            *logit = if *logit > 0.0 { *logit / factor } else { *logit * factor };
        }
        *logit -= params.frequency_penalty * n_generated;
        *logit -= if n_generated > 0.0 { params.presence_penalty } else { 0.0 };
        let id = TokenId::try_from(id).unwrap();
        let is_early = old.len() + run.len() - n_prompt < params.min_tokens as usize;
        let is_forbidden = is_early && sampler.end_token_ids.contains(&id)
            || params.allowed_token_ids.as_ref().is_some_and(|allowed| !allowed.contains(&id));
        if is_forbidden {
            *logit = f32::NEG_INFINITY;
        } else if params.temperature > 0.0 {
            let at = (old.len() + run.len()) as u64;
            *logit = *logit / params.temperature + gumbel(sampler.seed, at, id);
        }
    }
    likeliest(&logits)
}

/// Noise that makes the likeliest token one drawn from the distribution.
fn gumbel(seed: u64, at: u64, id: TokenId) -> f32 {
    let mut state = seed ^ (at << 32) ^ u64::from(id);
    for _ in 0..3 {
        state = (state ^ (state >> 31)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
    let uniform = ((state >> 40) as f32 + 0.5) / (1_u64 << 24) as f32;
    -(-uniform.ln()).ln()
}

fn log_probability(raw: &[f32], token: TokenId, n_top: u32) -> TokenLogprobs {
    let log_sum = raw.iter().map(|logit| logit.exp()).sum::<f32>().ln();
    let mut top: Vec<(TokenId, f32)> = (0..).zip(raw.iter().map(|logit| logit - log_sum)).collect();
    let logprob = top[token as usize].1;
    // Stable: of equal ones the lower id stays first.
    top.sort_by(|one, other| other.1.total_cmp(&one.1));
    top.truncate(n_top as usize);
    TokenLogprobs { logprob, top }
}

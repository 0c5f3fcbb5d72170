//! Workloads of a seed.

use engine_types::{ExecutorLimits, Request, RequestId, SamplingParams, TokenId};
use scheduler::SchedulerConfig;

use crate::model::{Drafter, State};
use crate::oracle::SerialDrafter;
use crate::rng::Rng;

/// A request and what happens to it from outside.
#[derive(Clone, Debug)]
pub(crate) struct Arrival {
    pub(crate) request: Request,
    /// The step before which it is submitted.
    pub(crate) step: u64,
    /// The step at which it is aborted, and whether while that step runs.
    pub(crate) abort: Option<(u64, bool)>,
}

/// All that a seed decides.
#[derive(Clone, Debug)]
pub(crate) struct Workload {
    pub(crate) config: SchedulerConfig,
    pub(crate) limits: ExecutorLimits,
    pub(crate) arrivals: Vec<Arrival>,
    pub(crate) draft_accuracy_percent: u32,
    pub(crate) failure_percent: u32,
}

impl Workload {
    pub(crate) fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let block_size = rng.pick(&[1, 2, 3, 4, 4, 8, 16, 64]);
        let num_blocks = if rng.chance(50) { rng.between(4, 12) } else { rng.between(12, 96) };
        let k = rng.between(0, 8);
        let limits = ExecutorLimits {
            block_size,
            num_blocks,
            max_model_len: rng.between(8, 200),
            max_num_seqs: rng.between(1, 12),
            max_num_batched_tokens: rng.pick(&[1, 5, 16, 64, 70, 130, 200, 512]),
            max_num_speculative_tokens: rng.between(k, 8),
            n_lookahead_max: rng.between(1, 3),
            vocab_size: rng.between(3, 60),
        };
        let eos_token_ids = (0..rng.between(0, 2)).map(|_| token(&mut rng, &limits)).collect();
        let config = SchedulerConfig {
            max_num_seqs: rng.between(1, 12),
            max_num_batched_tokens: 256,
            max_queued_requests: rng.between(0, 16),
            num_speculative_tokens: k,
            eos_token_ids,
            enable_prefix_caching: rng.chance(75),
        };
        let draft_accuracy_percent = rng.pick(&[0, 30, 60, 90, 100]);
        let drafter =
            Drafter { accuracy_percent: draft_accuracy_percent, vocab_size: limits.vocab_size };
        let texts = (0..rng.between(1, 3)).map(|_| Text::new(&mut rng, &limits)).collect();
        let texts = Texts { texts, drafter };
        let n_requests = rng.between(1, 24);
        let arrivals = (0..n_requests).map(|n| arrival(&mut rng, n, (&limits, k), &texts));
        let arrivals = arrivals.collect();
        Self {
            config,
            limits,
            arrivals,
            draft_accuracy_percent,
            failure_percent: rng.pick(&[0, 0, 0, 1, 5]),
        }
    }
}

fn token(rng: &mut Rng, limits: &ExecutorLimits) -> TokenId {
    rng.between(0, limits.vocab_size - 1)
}

/// The longest sequence that has room in the model and in the pool.
fn longest(limits: &ExecutorLimits) -> u32 {
    limits.max_model_len.min(limits.num_blocks * limits.block_size)
}

/// A text whose parts are several prompts: random tokens, then what the model makes of them. So a
/// prompt may begin with what another request was answered.
struct Text {
    tokens: Vec<TokenId>,
    n_random: usize,
}

impl Text {
    fn new(rng: &mut Rng, limits: &ExecutorLimits) -> Self {
        let longest = longest(limits);
        let n_random = rng.between(1, longest.min(40)) as usize;
        let mut tokens: Vec<_> = (0..n_random).map(|_| token(rng, limits)).collect();
        let mut state = tokens.iter().fold(State::EMPTY, |state, token| state.extend(*token));
        while tokens.len() < longest as usize {
            tokens.push(state.next_token(limits.vocab_size));
            state = state.extend(tokens[tokens.len() - 1]);
        }
        Self { tokens, n_random }
    }

    /// The text shortly after its random part, going on with what is drafted there, right or not:
    /// tokens that a request for the random part sees rejected.
    fn with_drafts(&self, rng: &mut Rng, drafter: Drafter) -> Vec<TokenId> {
        let n_tokens = self.n_random + rng.between(1, 3) as usize;
        let mut tokens = self.tokens[..n_tokens.min(self.tokens.len())].to_vec();
        let mut serial = SerialDrafter::new(drafter);
        tokens.iter().for_each(|token| serial.push(*token));
        tokens.extend(serial.drafts(8));
        tokens
    }
}

/// What the prompts of a workload have in common.
struct Texts {
    texts: Vec<Text>,
    drafter: Drafter,
}

/// A prompt, of `n_tokens` tokens unless it is one of a text's two special parts.
fn prompt(rng: &mut Rng, n_tokens: u32, limits: &ExecutorLimits, texts: &Texts) -> Vec<TokenId> {
    let text = &texts.texts[rng.between(0, texts.texts.len() as u32 - 1) as usize];
    let mut tokens: Vec<_> = (0..n_tokens).map(|_| token(rng, limits)).collect();
    match rng.between(0, 9) {
        0 => text.tokens[..text.n_random].to_vec(),
        1 => text.with_drafts(rng, texts.drafter),
        2..=7 => {
            let n_tail = if rng.chance(60) { rng.between(0, n_tokens.min(4)) } else { 0 };
            let n_common = text.tokens.len().min((n_tokens - n_tail) as usize);
            tokens[..n_common].copy_from_slice(&text.tokens[..n_common]);
            tokens
        }
        _ => tokens,
    }
}

fn arrival(rng: &mut Rng, n: u32, (limits, k): (&ExecutorLimits, u32), texts: &Texts) -> Arrival {
    // A few prompts are too long for the model or the pool.
    let longest = longest(limits);
    let n_prompt = match rng.between(0, 9) {
        0 => rng.between(1, longest + 2),
        1..=4 => rng.between(1, longest / 2),
        _ => rng.between(1, 12.min(longest - 1)),
    };
    let n_stop_ids = if rng.chance(20) { rng.between(1, 2) } else { 0 };
    let n_stops = if rng.chance(30) { rng.between(1, 2) } else { 0 };
    let params = SamplingParams {
        max_tokens: rng.between(1, 60),
        ignore_eos: rng.chance(40),
        stop_token_ids: (0..n_stop_ids).map(|_| token(rng, limits)).collect(),
        stop_sequences: (0..n_stops)
            .map(|_| (0..rng.between(1, 3)).map(|_| token(rng, limits)).collect())
            .collect(),
        num_speculative_tokens: rng.chance(30).then(|| rng.between(0, k)),
    };
    let step = u64::from(rng.between(0, 40));
    Arrival {
        request: Request {
            id: RequestId(u64::from(n)),
            prompt: prompt(rng, n_prompt, limits, texts),
            params,
            cache_salt: rng.chance(25).then(|| vec![1; rng.pick(&[1, 2])]),
            priority: 0,
            siblings: vec![],
        },
        step,
        abort: rng.chance(15).then(|| (step + u64::from(rng.between(0, 30)), rng.chance(50))),
    }
}

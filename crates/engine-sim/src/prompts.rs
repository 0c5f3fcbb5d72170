//! Prompts that have much in common with each other and with what the model makes of them.

use engine_types::{ExecutorLimits, TokenId};

use crate::model::{Drafter, State, Voice};
use crate::oracle::SerialDrafter;
use crate::rng::Rng;

pub(crate) fn token(rng: &mut Rng, limits: &ExecutorLimits) -> TokenId {
    rng.between(0, limits.vocab_size - 1)
}

/// The longest sequence that has room in the model and in the pool.
pub(crate) fn longest(limits: &ExecutorLimits) -> u32 {
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
            tokens.push(state.next_token(limits.vocab_size, Voice::FIRST));
            state = state.extend(tokens[tokens.len() - 1]);
        }
        Self { tokens, n_random }
    }

    /// The text shortly after its random part, going on with what is drafted there, right or not:
    /// tokens that a request for the random part sees rejected.
    fn with_drafts(&self, rng: &mut Rng, drafter: Drafter) -> Vec<TokenId> {
        let n_tokens = self.n_random + rng.between(1, 3) as usize;
        let mut tokens = self.tokens[..n_tokens.min(self.tokens.len())].to_vec();
        let mut serial = SerialDrafter::new(drafter, Voice::FIRST);
        tokens.iter().for_each(|token| serial.push(*token));
        tokens.extend(serial.drafts(8));
        tokens
    }
}

/// What the prompts of a workload have in common.
pub(crate) struct Texts {
    texts: Vec<Text>,
    drafter: Drafter,
    limits: ExecutorLimits,
    /// What most prompts are no longer than.
    pub(crate) n_short: u32,
}

impl Texts {
    pub(crate) fn new(rng: &mut Rng, limits: ExecutorLimits, drafter: Drafter) -> Self {
        let texts = (0..rng.between(1, 3)).map(|_| Text::new(rng, &limits)).collect();
        // Of very short ones many start at once, more than a small budget has rows for.
        let n_short = rng.pick(&[2, 12, 12]).min(longest(&limits) - 1);
        Self { texts, drafter, limits, n_short }
    }

    /// A prompt, of `n_tokens` tokens unless it is one of a text's two special parts.
    pub(crate) fn prompt(&self, rng: &mut Rng, n_tokens: u32) -> Vec<TokenId> {
        let text = &self.texts[rng.between(0, self.texts.len() as u32 - 1) as usize];
        let mut tokens: Vec<_> = (0..n_tokens).map(|_| token(rng, &self.limits)).collect();
        match rng.between(0, 9) {
            0 => text.tokens[..text.n_random].to_vec(),
            1 => text.with_drafts(rng, self.drafter),
            2..=7 => {
                let n_tail = if rng.chance(60) { rng.between(0, n_tokens.min(4)) } else { 0 };
                let n_common = text.tokens.len().min((n_tokens - n_tail) as usize);
                tokens[..n_common].copy_from_slice(&text.tokens[..n_common]);
                tokens
            }
            _ => tokens,
        }
    }
}

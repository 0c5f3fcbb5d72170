//! What a request must yield: one token after the other, without paging, batches or drafts.

use engine_types::{ExecutorLimits, FinishReason, Request, TokenId};

use crate::guide::choose;
use crate::model::{Drafter, State, Voice, draft_entry};

/// A request's output if nothing interrupts it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expected {
    /// The generated tokens.
    pub tokens: Vec<TokenId>,
    /// Why it ends.
    pub reason: FinishReason,
}

/// Generates a request's output alone.
#[must_use]
pub fn serial(request: &Request, limits: &ExecutorLimits, eos_token_ids: &[TokenId]) -> Expected {
    let mut state = State::EMPTY;
    for token in &request.prompt {
        state = state.extend(*token);
    }
    let params = &request.params;
    let pool_tokens = limits.num_blocks as usize * limits.block_size as usize;
    let (mut guide, mut stop_texts) = (request.guide.clone(), request.stop_texts.clone());
    let mut mask = vec![];
    let mut tokens = vec![];
    loop {
        if let Some(guide) = &mut guide {
            mask.resize(limits.vocab_size.div_ceil(u32::BITS) as usize, 0);
            guide.0.fill_mask(&mut mask);
        }
        let wanted = state.next_token(limits.vocab_size, Voice::of(request.id));
        let token = choose(wanted, &mask, limits.vocab_size);
        let text = stop_texts.as_mut().and_then(|texts| texts.0.push(token));
        let is_complete = guide.as_mut().is_some_and(|guide| {
            assert!(guide.0.accept(token));
            guide.0.is_complete()
        });
        tokens.push(token);
        state = state.extend(token);
        let n_tokens = request.prompt.len() + tokens.len();
        let stop = params.stop_sequences.iter().position(|stop| tokens.ends_with(stop));
        let may_end = tokens.len() >= params.min_tokens as usize;
        let reason = if may_end && eos_token_ids.contains(&token) && !params.ignore_eos {
            FinishReason::Eos(token)
        } else if may_end && params.stop_token_ids.contains(&token) {
            FinishReason::StopToken(token)
        } else if let Some(index) = stop.filter(|_| may_end) {
            FinishReason::StopSequence(index)
        } else if let Some(index) = text.filter(|_| may_end) {
            FinishReason::StopText(index)
        } else if is_complete {
            FinishReason::GrammarComplete
        } else if tokens.len() == params.max_tokens as usize {
            FinishReason::MaxTokens
        } else if n_tokens == limits.max_model_len as usize {
            FinishReason::ModelLength
        } else if n_tokens > pool_tokens {
            FinishReason::OutOfBlocks
        } else {
            continue;
        };
        return Expected { tokens, reason };
    }
}

/// A request's committed tokens and the drafts that one draft layer makes of them, without paging,
/// batches or a prefix cache.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SerialDrafter {
    drafter: Drafter,
    voice: Voice,
    state: State,
    /// The target's KV entry of the last token: the layer's own follows with the token behind it.
    last_entry: Option<u64>,
    read: State,
}

impl SerialDrafter {
    pub(crate) fn new(drafter: Drafter, voice: Voice) -> Self {
        Self { drafter, voice, state: State::EMPTY, last_entry: None, read: State::EMPTY }
    }

    pub(crate) fn push(&mut self, token: TokenId) {
        if let Some(below) = self.last_entry {
            self.read = self.read.read(draft_entry(below, token));
        }
        self.last_entry = Some(self.state.entry(token));
        self.state = self.state.extend(token);
    }

    /// The next `n` drafts.
    pub(crate) fn drafts(&self, n: usize) -> Vec<TokenId> {
        let (mut state, mut read) = (self.state, self.read);
        let next = |_| {
            let right = state.next_token(self.drafter.vocab_size, self.voice);
            let draft = self.drafter.draft(read, right);
            (state, read) = (state.extend(draft), read.extend(draft));
            draft
        };
        (0..n).map(next).collect()
    }
}

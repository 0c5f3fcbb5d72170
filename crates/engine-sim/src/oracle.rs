//! What a request must yield: one token after the other, without paging, batches or drafts.

use engine_types::{ExecutorLimits, FinishReason, Request, TokenId};

use crate::model::{Drafter, State, draft_entry};

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
    let mut tokens = vec![];
    loop {
        let token = state.next_token(limits.vocab_size);
        tokens.push(token);
        state = state.extend(token);
        let n_tokens = request.prompt.len() + tokens.len();
        let stop = params.stop_sequences.iter().position(|stop| tokens.ends_with(stop));
        let reason = if eos_token_ids.contains(&token) && !params.ignore_eos {
            FinishReason::Eos(token)
        } else if params.stop_token_ids.contains(&token) {
            FinishReason::StopToken(token)
        } else if let Some(index) = stop {
            FinishReason::StopSequence(index)
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
    state: State,
    /// The target's KV entry of the last token: the layer's own follows with the token behind it.
    last_entry: Option<u64>,
    read: State,
}

impl SerialDrafter {
    pub(crate) fn new(drafter: Drafter) -> Self {
        Self { drafter, state: State::EMPTY, last_entry: None, read: State::EMPTY }
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
            let draft = self.drafter.draft(read, state.next_token(self.drafter.vocab_size));
            (state, read) = (state.extend(draft), read.extend(draft));
            draft
        };
        (0..n).map(next).collect()
    }
}

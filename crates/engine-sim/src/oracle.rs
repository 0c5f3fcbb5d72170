//! What a request must yield: one token after the other, without paging, batches or drafts.

use engine_types::{ExecutorLimits, FinishReason, Request, TokenId};

use crate::model::State;

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

//! Which requests can be served at all.

use engine_types::{ExecutorLimits, MAX_CACHE_SALT_BYTES, Request, TokenId};

use crate::error::SubmitError;
use crate::sampling;

/// What a request must keep to, whatever the load; cheap to copy to where requests come in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestRules {
    /// The executor's limits.
    pub limits: ExecutorLimits,
    /// The engine's `num_speculative_tokens`.
    pub num_speculative_tokens: u32,
}

impl RequestRules {
    /// Checks a request by itself.
    ///
    /// # Errors
    ///
    /// Says which field cannot be served and what would do instead.
    pub fn check(&self, request: &Request) -> Result<(), SubmitError> {
        let n_tokens = request.prompt.len();
        let max_model_len = self.limits.max_model_len;
        if n_tokens == 0 {
            return Err(SubmitError::EmptyPrompt);
        }
        if n_tokens >= max_model_len as usize {
            return Err(SubmitError::PromptTooLong { n_tokens, max_model_len });
        }
        let pool_tokens = u64::from(self.limits.num_blocks) * u64::from(self.limits.block_size);
        if n_tokens as u64 + 1 > pool_tokens {
            return Err(SubmitError::NeverFits { n_tokens, pool_tokens });
        }
        let params = &request.params;
        if params.max_tokens == 0 {
            return Err(SubmitError::ZeroMaxTokens);
        }
        if let Some(index) = params.stop_sequences.iter().position(Vec::is_empty) {
            return Err(SubmitError::EmptyStopSequence { index });
        }
        let mut siblings = request.siblings.iter().enumerate();
        if let Some((_, id)) =
            siblings.find(|(idx, id)| **id == request.id || request.siblings[..*idx].contains(id))
        {
            return Err(SubmitError::DuplicateId(*id));
        }
        self.check_ids("prompt", &request.prompt)?;
        sampling::check(params)?;
        let biased: Vec<TokenId> = params.logit_bias.iter().map(|(id, _)| *id).collect();
        self.check_ids("logit_bias", &biased)?;
        self.check_ids("allowed_token_ids", params.allowed_token_ids.as_deref().unwrap_or(&[]))?;
        for word in &params.bad_words {
            self.check_ids("bad_words", word)?;
        }
        self.check_ids("stop_token_ids", &params.stop_token_ids)?;
        for stop in &params.stop_sequences {
            self.check_ids("stop_sequences", stop)?;
        }
        Self::check_salt(request.cache_salt.as_deref())?;
        let max = self.num_speculative_tokens;
        match params.num_speculative_tokens {
            Some(value) if value > max => Err(SubmitError::TooManySpeculativeTokens { value, max }),
            _ => Ok(()),
        }
    }

    fn check_salt(salt: Option<&[u8]>) -> Result<(), SubmitError> {
        let max = MAX_CACHE_SALT_BYTES;
        match salt.map(<[u8]>::len) {
            Some(0) => Err(SubmitError::EmptyCacheSalt),
            Some(n_bytes) if n_bytes > max => Err(SubmitError::CacheSaltTooLong { n_bytes, max }),
            _ => Ok(()),
        }
    }

    fn check_ids(&self, field: &'static str, ids: &[TokenId]) -> Result<(), SubmitError> {
        let vocab_size = self.limits.vocab_size;
        match ids.iter().find(|id| **id >= vocab_size) {
            Some(&id) => Err(SubmitError::TokenOutsideVocab { field, id, vocab_size }),
            None => Ok(()),
        }
    }
}

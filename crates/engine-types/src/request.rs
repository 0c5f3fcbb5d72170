//! What a user asks for, after validation of its form.

use crate::ids::{RequestId, TokenId};

/// How a request's tokens are chosen and where it ends. Decoding is greedy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SamplingParams {
    /// Largest number of generated tokens, at least 1.
    pub max_tokens: u32,
    /// Whether the model's end-of-sequence ids are generated like any other token.
    pub ignore_eos: bool,
    /// Further ids that end the request; the id itself is kept in the output.
    pub stop_token_ids: Vec<TokenId>,
    /// Token sequences that end the request once generated; kept in the output. None is empty.
    pub stop_sequences: Vec<Vec<TokenId>>,
    /// Drafts a step for this request, at most the engine's `num_speculative_tokens`; `None` is
    /// the engine's value, `Some(0)` turns drafting off.
    pub num_speculative_tokens: Option<u32>,
}

/// A request: prompt ids and parameters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Chosen by the caller, unique in the engine's life.
    pub id: RequestId,
    /// Prompt token ids, at least one.
    pub prompt: Vec<TokenId>,
    /// How to continue it.
    pub params: SamplingParams,
    /// Requests share cached prefixes only with requests of the same salt, or of none as well;
    /// 1 to [`MAX_CACHE_SALT_BYTES`](crate::MAX_CACHE_SALT_BYTES) bytes. Whoever cannot name the
    /// salt cannot learn from a request's timing what other requests said.
    pub cache_salt: Option<Vec<u8>>,
    /// Lower is served first, where the scheduling policy looks at it.
    pub priority: i32,
    /// Ids of further requests with the same prompt and parameters (`n > 1`), each with its own
    /// events and unique like `id`. They share the KV of the prompt.
    pub siblings: Vec<RequestId>,
}

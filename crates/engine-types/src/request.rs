//! What a user asks for, after validation of its form.

use crate::guide::{BoxedGuide, BoxedStopTexts};
use crate::ids::{RequestId, TokenId};
use crate::sampling::SamplingParams;

/// A request: prompt ids and parameters.
#[derive(Clone, Debug)]
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
    /// A grammar that the output keeps to.
    pub guide: Option<BoxedGuide>,
    /// Texts that end the output.
    pub stop_texts: Option<BoxedStopTexts>,
    /// Ids of further requests with the same prompt and parameters (`n > 1`), each with its own
    /// events and unique like `id`. They share the KV of the prompt.
    pub siblings: Vec<RequestId>,
}

impl Request {
    /// A request with nothing but what every request has.
    #[must_use]
    pub fn new(id: RequestId, prompt: Vec<TokenId>, params: SamplingParams) -> Self {
        Self {
            id,
            prompt,
            params,
            cache_salt: None,
            priority: 0,
            guide: None,
            stop_texts: None,
            siblings: vec![],
        }
    }
}

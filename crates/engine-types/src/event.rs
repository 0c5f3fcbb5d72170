//! What a user gets back.

use crate::ids::{RequestId, TokenId};
use crate::sampling::TokenLogprobs;
use crate::spec_stats::SpecDecodeStats;
use crate::step_tokens::StepTokens;

/// Why a request ended.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FinishReason {
    /// The model's end-of-sequence id was generated.
    Eos(TokenId),
    /// One of the request's `stop_token_ids` was generated.
    StopToken(TokenId),
    /// The request's stop sequence of this index was generated.
    StopSequence(usize),
    /// The request's stop text of this index was generated.
    StopText(usize),
    /// The request's grammar was completed.
    GrammarComplete,
    /// `max_tokens` were generated.
    MaxTokens,
    /// The sequence reached the model's length.
    ModelLength,
    /// The sequence alone needs more KV blocks than the pool has.
    OutOfBlocks,
    /// The client left or asked for it.
    Aborted,
    /// The time that the request was given is over.
    DeadlineExceeded,
    /// A step failed; the text says how.
    Failed(String),
}

/// Tokens that one step added to a request.
#[derive(Clone, Debug, PartialEq)]
pub struct TokensEvent {
    /// Whose tokens.
    pub request_id: RequestId,
    /// The committed run: `n_accepted` accepted drafts, then one token that the target chose.
    pub tokens: StepTokens,
    /// How many of `tokens`, from the front, are accepted drafts.
    pub n_accepted: u32,
    /// The drafts that this step verified; empty after a prefill or a plain decode.
    pub drafts: StepTokens,
    /// One entry for each of `tokens`, if the request asks for log probabilities.
    pub logprobs: Box<[TokenLogprobs]>,
}

/// Token counts of a finished request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Prompt tokens.
    pub prompt_tokens: u32,
    /// Generated tokens that were committed and streamed.
    pub completion_tokens: u32,
    /// Prompt tokens whose KV came from the prefix cache when the request started; those of the
    /// request's own that came back after a preemption do not count.
    pub cached_tokens: u32,
}

/// One event of a request. `Finished` is the last one and comes exactly once.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum RequestEvent {
    /// The request's first step is planned: it waits no longer. Comes once, before any other event,
    /// unless the request ends without a step.
    Started {
        /// Which request.
        request_id: RequestId,
    },
    /// A step committed tokens.
    Tokens(TokensEvent),
    /// A step computed log probabilities of the prompt, if the request asks for them.
    PromptLogprobs {
        /// Which request.
        request_id: RequestId,
        /// Those of the tokens behind the ones that earlier events told of; the first of all is
        /// that of the prompt's second token.
        logprobs: Vec<TokenLogprobs>,
    },
    /// The request ended.
    Finished {
        /// Which request.
        request_id: RequestId,
        /// Why.
        reason: FinishReason,
        /// Token counts.
        usage: Usage,
        /// What drafting did.
        spec_decode: Box<SpecDecodeStats>,
    },
}

impl RequestEvent {
    /// Whose event this is.
    #[must_use]
    pub fn request_id(&self) -> RequestId {
        match self {
            Self::Tokens(event) => event.request_id,
            Self::Started { request_id }
            | Self::PromptLogprobs { request_id, .. }
            | Self::Finished { request_id, .. } => *request_id,
        }
    }
}

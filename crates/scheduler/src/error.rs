//! Why a configuration or a request is refused.

use std::error::Error;
use std::fmt;

use engine_types::{RequestId, TokenId};

/// Why a scheduler cannot be made.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ConfigError {
    /// A field that must be at least 1 is 0.
    Zero {
        /// Which field.
        field: &'static str,
    },
    /// A field is outside its range.
    OutOfRange {
        /// Which field.
        field: &'static str,
        /// Its value.
        value: u32,
        /// The smallest possible one.
        min: u32,
        /// The largest possible one.
        max: u32,
    },
    /// The executor's `max_model_len` has no room for a prompt and an output.
    ModelTooShort {
        /// Its value.
        max_model_len: u32,
    },
    /// `long_prefill_token_threshold` is below the block size.
    PrefillThreshold {
        /// Its value.
        value: u32,
        /// Tokens a block.
        block_size: u32,
    },
    /// `num_speculative_tokens` is above what the executor can draft.
    TooManySpeculativeTokens {
        /// The value.
        value: u32,
        /// The largest possible one; 0 where the executor has no drafter.
        max: u32,
    },
    /// One of `eos_token_ids` is not in the vocabulary.
    EosOutsideVocab {
        /// The id.
        id: TokenId,
        /// Number of ids.
        vocab_size: u32,
    },
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Zero { field } => write!(f, "{field} must be at least 1"),
            Self::OutOfRange { field, value, min, max } => {
                write!(f, "{field} is {value} and must be {min} to {max}")
            }
            Self::ModelTooShort { max_model_len } => {
                write!(f, "limits.max_model_len is {max_model_len} and must be at least 2")
            }
            Self::PrefillThreshold { value, block_size } => write!(
                f,
                "long_prefill_token_threshold is {value}; set it to 0 for no limit, or to at least \
                 the block size {block_size}"
            ),
            Self::TooManySpeculativeTokens { value, max: 0 } => write!(
                f,
                "num_speculative_tokens is {value}, but the model has no draft layers; set it to 0"
            ),
            Self::TooManySpeculativeTokens { value, max } => {
                write!(f, "num_speculative_tokens is {value} and must be at most {max}")
            }
            Self::EosOutsideVocab { id, vocab_size } => {
                write!(f, "eos_token_ids has {id}, but token ids are below {vocab_size}")
            }
        }
    }
}

impl Error for ConfigError {}

/// Why a request is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SubmitError {
    /// As many requests as may be unfinished already are.
    QueueFull {
        /// That number.
        limit: u64,
    },
    /// An unfinished request has this id.
    DuplicateId(RequestId),
    /// The prompt has no token.
    EmptyPrompt,
    /// The prompt leaves no room for an output.
    PromptTooLong {
        /// Tokens of the prompt.
        n_tokens: usize,
        /// Largest number of tokens, prompt and output together.
        max_model_len: u32,
    },
    /// The prompt and one output token need more KV than the whole pool.
    NeverFits {
        /// Tokens of the prompt.
        n_tokens: usize,
        /// Tokens that the pool holds.
        pool_tokens: u64,
    },
    /// A token id is not in the vocabulary.
    TokenOutsideVocab {
        /// The request's field.
        field: &'static str,
        /// The id.
        id: TokenId,
        /// Number of ids.
        vocab_size: u32,
    },
    /// `max_tokens` is 0.
    ZeroMaxTokens,
    /// A parameter is outside its range.
    OutOfRange {
        /// The request's field.
        field: &'static str,
        /// Its value.
        value: String,
        /// What it may be.
        allowed: &'static str,
    },
    /// `logit_bias` names an id twice.
    RepeatedBias {
        /// The id.
        id: TokenId,
    },
    /// One of `bad_words` is empty.
    EmptyBadWord {
        /// Its index.
        index: usize,
    },
    /// `allowed_token_ids` names no id.
    NothingAllowed,
    /// A stop sequence is empty.
    EmptyStopSequence {
        /// Its index.
        index: usize,
    },
    /// `cache_salt` is empty.
    EmptyCacheSalt,
    /// `cache_salt` is too long.
    CacheSaltTooLong {
        /// Its length in bytes.
        n_bytes: usize,
        /// The largest possible one.
        max: usize,
    },
    /// The request wants more drafts than the engine makes.
    TooManySpeculativeTokens {
        /// What it wants.
        value: u32,
        /// The engine's `num_speculative_tokens`.
        max: u32,
    },
}

impl fmt::Display for SubmitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::QueueFull { limit } => {
                write!(f, "the queue is full: {limit} requests are unfinished; try again later")
            }
            Self::DuplicateId(id) => write!(f, "id: {id} is unfinished; choose another id"),
            Self::EmptyPrompt => write!(f, "prompt: it is empty; give at least one token"),
            Self::PromptTooLong { n_tokens, max_model_len } => write!(
                f,
                "prompt: {n_tokens} tokens leave no room for an output within max_model_len \
                 {max_model_len}; shorten it"
            ),
            Self::NeverFits { n_tokens, pool_tokens } => write!(
                f,
                "prompt: {n_tokens} tokens and an output never fit the KV pool of {pool_tokens} \
                 tokens; shorten it or give the engine more KV blocks"
            ),
            Self::TokenOutsideVocab { field, id, vocab_size } => {
                write!(f, "{field}: token id {id} is not below the vocabulary size {vocab_size}")
            }
            Self::ZeroMaxTokens => write!(f, "max_tokens: it is 0; ask for at least one token"),
            Self::OutOfRange { field, value, allowed } => {
                write!(f, "{field}: it is {value} and must be {allowed}")
            }
            Self::RepeatedBias { id } => {
                write!(f, "logit_bias: it names token {id} twice; add the values up")
            }
            Self::EmptyBadWord { index } => {
                write!(f, "bad_words: number {index} is empty; leave it out")
            }
            Self::NothingAllowed => {
                write!(f, "allowed_token_ids: it is empty; name an id, or leave it out")
            }
            Self::EmptyStopSequence { index } => {
                write!(f, "stop_sequences: number {index} is empty; leave it out")
            }
            Self::EmptyCacheSalt => write!(f, "cache_salt: it is empty; leave it out"),
            Self::CacheSaltTooLong { n_bytes, max } => {
                write!(f, "cache_salt: {n_bytes} bytes are too long; use at most {max}")
            }
            Self::TooManySpeculativeTokens { value, max } => write!(
                f,
                "num_speculative_tokens: {value} is above the engine's {max}; ask for at most that"
            ),
        }
    }
}

impl Error for SubmitError {}

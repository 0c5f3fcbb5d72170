//! How tokens are chosen: what a user asks for, and what an executor is told of it.

use std::sync::Arc;

use crate::ids::TokenId;

/// How a request's tokens are chosen and where it ends.
///
/// The default is greedy decoding up to the model's length. Logits are processed in the order of
/// transformers' `generate`: `logit_bias`, `repetition_penalty`, `presence_penalty` and
/// `frequency_penalty`, `bad_words`, `min_tokens`, `allowed_token_ids`, a grammar, `temperature`,
/// `top_k`, `top_p`, `min_p`. A verify row counts the drafts before it as generated.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// Largest number of generated tokens, at least 1.
    pub max_tokens: u32,
    /// Number of generated tokens before which nothing ends the request but `max_tokens`: the ids
    /// that would end it cannot be chosen. At most `max_tokens`.
    pub min_tokens: u32,
    /// Whether the model's end-of-sequence ids are generated like any other token.
    pub ignore_eos: bool,
    /// Further ids that end the request; the id itself is kept in the output.
    pub stop_token_ids: Vec<TokenId>,
    /// Token sequences that end the request once generated; kept in the output. None is empty.
    pub stop_sequences: Vec<Vec<TokenId>>,
    /// Drafts a step for this request, at most the engine's `num_speculative_tokens`; `None` is
    /// the engine's value, `Some(0)` turns drafting off.
    pub num_speculative_tokens: Option<u32>,
    /// Divides the logits; 0 chooses the likeliest token, always. Finite and not negative.
    pub temperature: f32,
    /// How many of the likeliest tokens may be chosen; 0 is all.
    pub top_k: u32,
    /// The smallest set of the likeliest tokens whose probability reaches this may be chosen, in
    /// (0, 1].
    pub top_p: f32,
    /// Only tokens may be chosen that have this share of the likeliest one's probability, in
    /// [0, 1].
    pub min_p: f32,
    /// Taken off the logit of every token that was generated, in [-2, 2].
    pub presence_penalty: f32,
    /// Taken off the logit of every token for each time that it was generated, in [-2, 2].
    pub frequency_penalty: f32,
    /// Divides positive logits, and multiplies negative ones, of every token of the prompt and the
    /// output; above 0, and 1 changes nothing.
    pub repetition_penalty: f32,
    /// Added to logits; each id once.
    pub logit_bias: Vec<(TokenId, f32)>,
    /// The only ids that may be chosen, if any are named.
    pub allowed_token_ids: Option<Vec<TokenId>>,
    /// Sequences of ids that are never generated; none is empty.
    pub bad_words: Vec<Vec<TokenId>>,
    /// Makes the choices reproducible: they follow from the seed, the prompt and the parameters
    /// alone, whatever runs beside. `None` takes another seed each time.
    pub seed: Option<u64>,
    /// For each generated token its log probability and those of this many likeliest tokens, 0 to
    /// [`MAX_LOGPROBS`](crate::MAX_LOGPROBS).
    pub logprobs: Option<u32>,
    /// The same for the tokens of the prompt, from the second one on.
    pub prompt_logprobs: Option<u32>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            max_tokens: u32::MAX,
            min_tokens: 0,
            ignore_eos: false,
            stop_token_ids: vec![],
            stop_sequences: vec![],
            num_speculative_tokens: None,
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            logit_bias: vec![],
            allowed_token_ids: None,
            bad_words: vec![],
            seed: None,
            logprobs: None,
            prompt_logprobs: None,
        }
    }
}

impl SamplingParams {
    /// Whether every token is the likeliest one of unchanged logits and nothing else is asked for,
    /// so that an executor need not know of the parameters.
    #[must_use]
    pub fn is_plain(&self) -> bool {
        let Self { presence_penalty, frequency_penalty, repetition_penalty, .. } = *self;
        let penalties = [presence_penalty, frequency_penalty, repetition_penalty];
        self.temperature == 0.0
            && penalties == [0.0, 0.0, 1.0]
            && self.min_tokens == 0
            && self.logit_bias.is_empty()
            && self.allowed_token_ids.is_none()
            && self.bad_words.is_empty()
            && self.logprobs.is_none()
            && self.prompt_logprobs.is_none()
    }
}

/// What an executor is told of a request that is not plain, with its first row.
///
/// It keeps it, and the request's tokens, under the row's block table: the step's accepted runs
/// extend them. Whoever gets the table next begins anew.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplerSetup {
    /// The request's block table.
    pub slot: u32,
    /// How its tokens are chosen.
    pub sampler: Arc<Sampler>,
    /// Its committed tokens: the prompt and, after a preemption, what was generated.
    pub tokens: Vec<TokenId>,
}

/// How a request's tokens are chosen.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampler {
    /// What the user asked for.
    pub params: SamplingParams,
    /// The seed of this request's choices.
    pub seed: u64,
    /// Tokens of the prompt.
    pub n_prompt: u32,
    /// The ids that end the request, which cannot be chosen before `min_tokens`.
    pub end_token_ids: Vec<TokenId>,
}

/// Log probabilities at one position.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TokenLogprobs {
    /// That of the token there.
    pub logprob: f32,
    /// The likeliest tokens and theirs, in falling order; of equal ones the lower id first.
    pub top: Vec<(TokenId, f32)>,
}

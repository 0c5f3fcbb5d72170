//! What the rows of a step are sampled with.

use std::collections::{HashMap, HashSet};

use crate::error::SamplerError;
use crate::noise::{self, Purpose};

/// The sampling parameters of a request. The default is greedy, with every processor off.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// Divides the logits, at least 0; 0 chooses the largest one.
    pub temperature: f32,
    /// Keeps this many of the most likely tokens; 0 keeps all.
    pub top_k: u32,
    /// Keeps the fewest most likely tokens whose probabilities add up to this much, in `(0, 1]`.
    pub top_p: f32,
    /// Keeps tokens at least this many times as likely as the most likely one, in `[0, 1]`.
    pub min_p: f32,
    /// Taken off the logit of every generated token, once.
    pub presence_penalty: f32,
    /// Taken off the logit of every generated token as often as it was generated.
    pub frequency_penalty: f32,
    /// Divides positive and multiplies negative logits of tokens in the prompt or generated;
    /// above 0, 1 is off.
    pub repetition_penalty: f32,
    /// Added to the logits of these tokens; each token once.
    pub logit_bias: Vec<(u32, f32)>,
    /// Token sequences that must not come to be; one of several tokens forbids its last token
    /// where the tokens before it are the history's last.
    pub bad_words: Vec<Vec<u32>>,
    /// The only tokens that may be chosen.
    pub allowed_token_ids: Option<Vec<u32>>,
    /// While fewer tokens are generated, none of `end_ids` is chosen.
    pub min_tokens: u32,
    /// Tokens that would end the request.
    pub end_ids: Vec<u32>,
    /// Key of the request's noise.
    pub seed: u64,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            logit_bias: Vec::new(),
            bad_words: Vec::new(),
            allowed_token_ids: None,
            min_tokens: 0,
            end_ids: Vec::new(),
            seed: 0,
        }
    }
}

impl SamplingParams {
    /// Checks every value against its range and every id against the vocabulary. To be called once
    /// for each request: rows with unchecked parameters may panic or choose nonsense.
    ///
    /// # Errors
    ///
    /// [`SamplerError::InvalidParam`] for the first value that is wrong.
    pub fn check(&self, vocab_size: u32) -> Result<(), SamplerError> {
        let finite = |value: f32, field| {
            require(value.is_finite(), field, || format!("is {value}, not a finite number"))
        };
        let Self { temperature, top_p, min_p, repetition_penalty, .. } = *self;
        finite(temperature, "temperature")?;
        require(temperature >= 0.0, "temperature", || format!("is {temperature}, below 0"))?;
        let in_range = top_p > 0.0 && top_p <= 1.0;
        require(in_range, "top_p", || format!("is {top_p}, outside (0, 1]"))?;
        let in_range = (0.0..=1.0).contains(&min_p);
        require(in_range, "min_p", || format!("is {min_p}, outside [0, 1]"))?;
        finite(self.presence_penalty, "presence_penalty")?;
        finite(self.frequency_penalty, "frequency_penalty")?;
        finite(repetition_penalty, "repetition_penalty")?;
        require(repetition_penalty > 0.0, "repetition_penalty", || {
            format!("is {repetition_penalty}, not above 0")
        })?;
        let mut biased = HashSet::new();
        for &(id, bias) in &self.logit_bias {
            known(id, vocab_size, "logit_bias")?;
            finite(bias, "logit_bias")?;
            require(biased.insert(id), "logit_bias", || format!("holds token {id} twice"))?;
        }
        for word in &self.bad_words {
            require(!word.is_empty(), "bad_words", || "holds an empty sequence".to_owned())?;
            word.iter().try_for_each(|&id| known(id, vocab_size, "bad_words"))?;
        }
        if let Some(allowed) = &self.allowed_token_ids {
            require(!allowed.is_empty(), "allowed_token_ids", || "is empty".to_owned())?;
            allowed.iter().try_for_each(|&id| known(id, vocab_size, "allowed_token_ids"))?;
        }
        self.end_ids.iter().try_for_each(|&id| known(id, vocab_size, "end_ids"))
    }

    /// Whether the most likely token is chosen instead of drawing one.
    #[must_use]
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0
    }

    /// Whether the choice is the largest of the model's own logits, so that neither history nor
    /// this crate's processors are needed. A grammar mask is not part of the parameters.
    #[must_use]
    pub fn is_plain_greedy(&self) -> bool {
        self.is_greedy()
            && self.logit_bias.is_empty()
            && self.allowed_token_ids.is_none()
            && !self.uses_history()
    }

    /// Whether the choice depends on the tokens before it. If not, an empty [`TokenHistory`] will
    /// do.
    #[must_use]
    pub fn uses_history(&self) -> bool {
        self.has_penalties() || !self.bad_words.is_empty() || self.min_tokens > 0
    }

    pub(crate) fn has_penalties(&self) -> bool {
        self.presence_penalty != 0.0
            || self.frequency_penalty != 0.0
            || self.repetition_penalty != 1.0
    }

    pub(crate) fn truncates(&self) -> bool {
        self.top_k > 0 || self.top_p < 1.0 || self.min_p > 0.0
    }
}

fn require(
    is_right: bool,
    field: &'static str,
    problem: impl FnOnce() -> String,
) -> Result<(), SamplerError> {
    if is_right { Ok(()) } else { Err(SamplerError::InvalidParam { field, problem: problem() }) }
}

fn known(id: u32, vocab_size: u32, field: &'static str) -> Result<(), SamplerError> {
    require(id < vocab_size, field, || {
        format!("holds token {id}, outside the vocabulary of {vocab_size}")
    })
}

/// The tokens of a request so far, counted. Rows of one request share it.
#[derive(Clone, Debug, Default)]
pub struct TokenHistory {
    tokens: Vec<u32>,
    n_prompt: usize,
    /// How often each token of the history was generated; 0 for one of the prompt alone.
    generated: HashMap<u32, u32>,
}

impl TokenHistory {
    /// The history of a request that has generated nothing yet.
    #[must_use]
    pub fn new(prompt: &[u32]) -> Self {
        let generated = prompt.iter().map(|&id| (id, 0)).collect();
        Self { tokens: prompt.to_vec(), n_prompt: prompt.len(), generated }
    }

    /// Appends generated tokens: those that the request keeps, so not what was cut behind an end.
    pub fn extend(&mut self, generated: &[u32]) {
        self.tokens.extend_from_slice(generated);
        for &id in generated {
            *self.generated.entry(id).or_default() += 1;
        }
    }

    /// Prompt and generated tokens.
    #[must_use]
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Number of generated tokens.
    #[must_use]
    pub fn n_generated(&self) -> usize {
        self.tokens.len() - self.n_prompt
    }

    /// Each token of the history with how often it was generated, in no order.
    pub(crate) fn counts(&self) -> impl Iterator<Item = (u32, u32)> + '_ {
        self.generated.iter().map(|(&id, &n)| (id, n))
    }

    pub(crate) fn contains(&self, id: u32) -> bool {
        self.generated.contains_key(&id)
    }
}

/// One row of logits and what its token is chosen with.
#[derive(Clone, Copy, Debug)]
pub struct SamplingRow<'a> {
    /// The request's parameters, [checked](SamplingParams::check).
    pub params: &'a SamplingParams,
    /// The request's tokens before this step's drafts.
    pub history: &'a TokenHistory,
    /// Drafts before this row in its verify window; they count as generated.
    pub drafts: &'a [u32],
    /// Absolute position of the token that this row chooses; the prompt starts at 0.
    pub position: u64,
    /// Tokens that the request's grammar allows here: bit `i % 32` of word `i / 32` is token `i`.
    /// Tokens behind the last word are forbidden.
    pub grammar_mask: Option<&'a [u32]>,
}

impl SamplingRow<'_> {
    /// Whether the largest of the model's own logits is chosen.
    #[must_use]
    pub fn is_plain_greedy(&self) -> bool {
        self.grammar_mask.is_none() && self.params.is_plain_greedy()
    }

    /// The row's uniform number in `[0, 1)`.
    #[must_use]
    pub fn uniform(&self, purpose: Purpose) -> f64 {
        noise::uniform(self.params.seed, self.position, purpose)
    }

    /// Whether `prefix` are the last tokens of the history and the drafts.
    pub(crate) fn ends_with(&self, prefix: &[u32]) -> bool {
        let n_drafts = self.drafts.len().min(prefix.len());
        let (older, newer) = prefix.split_at(prefix.len() - n_drafts);
        self.drafts.ends_with(newer) && (older.is_empty() || self.history.tokens().ends_with(older))
    }

    /// Tokens that `bad_words` and `min_tokens` forbid here; one may come twice.
    pub(crate) fn forbidden(&self) -> impl Iterator<Item = u32> + '_ {
        let bad = self.params.bad_words.iter().filter_map(|word| {
            let (&last, prefix) = word.split_last()?;
            self.ends_with(prefix).then_some(last)
        });
        bad.chain(
            self.is_too_short().then_some(&self.params.end_ids).into_iter().flatten().copied(),
        )
    }

    pub(crate) fn is_too_short(&self) -> bool {
        self.history.n_generated() + self.drafts.len() < self.params.min_tokens as usize
    }
}

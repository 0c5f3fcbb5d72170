//! Where an accepted run ends.

use engine_types::{FinishReason, SamplingParams, TokenId};

/// What can end a request.
#[derive(Clone, Copy, Debug)]
pub struct EndRules<'a> {
    /// The request's own rules.
    pub params: &'a SamplingParams,
    /// The model's end-of-sequence ids.
    pub eos_token_ids: &'a [TokenId],
    /// Tokens of the prompt.
    pub n_prompt: usize,
    /// Largest number of tokens, prompt and output together.
    pub max_model_len: usize,
}

/// How much of an accepted run is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Commit {
    /// Tokens kept, from the front of the run.
    pub n_kept: usize,
    /// Why the request ends with the last of them; `None` where it goes on.
    pub reason: Option<FinishReason>,
}

/// Whether anything but its length can end a request, as far as [`commit`] decides.
pub(crate) fn looks_at_tokens(params: &SamplingParams, eos_token_ids: &[TokenId]) -> bool {
    let has_eos = !params.ignore_eos && !eos_token_ids.is_empty();
    has_eos || !params.stop_token_ids.is_empty() || !params.stop_sequences.is_empty()
}

/// Walks an accepted run from left to right and stops at the first end.
///
/// `generated` are the tokens committed before. Where several ends meet at one token, the order is
/// EOS, stop id, stop sequence, `max_tokens`, model length. Stop sequences may begin in
/// `generated`, never in the prompt. Before `min_tokens` only the last two count.
#[must_use]
pub fn commit(rules: &EndRules, generated: &[TokenId], run: &[TokenId]) -> Commit {
    for n_kept in 1..=run.len() {
        if let Some(reason) = end(rules, generated, &run[..n_kept]) {
            return Commit { n_kept, reason: Some(reason) };
        }
    }
    Commit { n_kept: run.len(), reason: None }
}

/// Why the request ends with the last token of `run`, if it does.
fn end(rules: &EndRules, generated: &[TokenId], run: &[TokenId]) -> Option<FinishReason> {
    let n_generated = generated.len() + run.len();
    if n_generated >= rules.params.min_tokens as usize
        && let Some(reason) = end_by_content(rules, generated, run)
    {
        return Some(reason);
    }
    if n_generated >= rules.params.max_tokens as usize {
        return Some(FinishReason::MaxTokens);
    }
    (rules.n_prompt + n_generated >= rules.max_model_len).then_some(FinishReason::ModelLength)
}

/// Why the last token of `run` ends the request, whatever its length.
fn end_by_content(
    rules: &EndRules,
    generated: &[TokenId],
    run: &[TokenId],
) -> Option<FinishReason> {
    let params = rules.params;
    let token = *run.last()?;
    if !params.ignore_eos && rules.eos_token_ids.contains(&token) {
        return Some(FinishReason::Eos(token));
    }
    if params.stop_token_ids.contains(&token) {
        return Some(FinishReason::StopToken(token));
    }
    let stops = &params.stop_sequences;
    let index = stops.iter().position(|stop| ends_with(generated, run, stop))?;
    Some(FinishReason::StopSequence(index))
}

/// Whether `head` followed by `tail` ends with `stop`.
fn ends_with(head: &[TokenId], tail: &[TokenId], stop: &[TokenId]) -> bool {
    match stop.len().checked_sub(tail.len()) {
        None | Some(0) => tail.ends_with(stop),
        Some(n_head) => stop.ends_with(tail) && head.ends_with(&stop[..n_head]),
    }
}

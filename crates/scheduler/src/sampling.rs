//! What a request may ask for of the choice of its tokens, and what executors are told of it.

use std::sync::Arc;

use engine_types::{MAX_LOGPROBS, Request, Sampler, SamplingParams, TokenId};

use crate::error::SubmitError;

/// Checks everything but the ids.
///
/// # Errors
///
/// Names the field, its value and what it may be.
pub(crate) fn check(params: &SamplingParams) -> Result<(), SubmitError> {
    let numbers = [
        ("temperature", params.temperature, (0.0..f32::INFINITY).contains(&params.temperature)),
        ("top_p", params.top_p, params.top_p > 0.0 && params.top_p <= 1.0),
        ("min_p", params.min_p, (0.0..=1.0).contains(&params.min_p)),
        ("presence_penalty", params.presence_penalty, is_penalty(params.presence_penalty)),
        ("frequency_penalty", params.frequency_penalty, is_penalty(params.frequency_penalty)),
        (
            "repetition_penalty",
            params.repetition_penalty,
            params.repetition_penalty > 0.0 && params.repetition_penalty.is_finite(),
        ),
    ];
    for (field, value, is_valid) in numbers {
        if !is_valid {
            let allowed = match field {
                "temperature" => "finite and at least 0",
                "top_p" => "above 0 and at most 1",
                "min_p" => "from 0 to 1",
                "repetition_penalty" => "finite and above 0",
                _ => "from -2 to 2",
            };
            return Err(SubmitError::OutOfRange { field, value: value.to_string(), allowed });
        }
    }
    if params.min_tokens > params.max_tokens {
        let value = params.min_tokens.to_string();
        let allowed = "at most max_tokens";
        return Err(SubmitError::OutOfRange { field: "min_tokens", value, allowed });
    }
    for (field, n) in [("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)] {
        if let Some(n) = n.filter(|n| *n > MAX_LOGPROBS) {
            let (value, allowed) = (n.to_string(), "from 0 to 20");
            return Err(SubmitError::OutOfRange { field, value, allowed });
        }
    }
    check_bias(&params.logit_bias)?;
    if let Some(index) = params.bad_words.iter().position(Vec::is_empty) {
        return Err(SubmitError::EmptyBadWord { index });
    }
    if params.allowed_token_ids.as_ref().is_some_and(Vec::is_empty) {
        return Err(SubmitError::NothingAllowed);
    }
    Ok(())
}

fn is_penalty(value: f32) -> bool {
    (-2.0..=2.0).contains(&value)
}

fn check_bias(bias: &[(TokenId, f32)]) -> Result<(), SubmitError> {
    let mut ids: Vec<TokenId> = bias.iter().map(|(id, _)| *id).collect();
    ids.sort_unstable();
    if let Some(pair) = ids.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(SubmitError::RepeatedBias { id: pair[0] });
    }
    match bias.iter().find(|(_, value)| !value.is_finite()) {
        Some((_, value)) => {
            let value = value.to_string();
            Err(SubmitError::OutOfRange { field: "logit_bias", value, allowed: "finite" })
        }
        None => Ok(()),
    }
}

/// What executors are told of `request`; nothing if it is plainly greedy.
pub(crate) fn sampler(request: &Request, eos_token_ids: &[TokenId]) -> Option<Arc<Sampler>> {
    let params = &request.params;
    if params.is_plain() && request.guide.is_none() {
        return None;
    }
    let eos = if params.ignore_eos { &[] } else { eos_token_ids };
    Some(Arc::new(Sampler {
        seed: params.seed.unwrap_or(request.id.0),
        n_prompt: u32::try_from(request.prompt.len()).expect("below the model's length"),
        end_token_ids: [eos, &params.stop_token_ids[..]].concat(),
        params: params.clone(),
    }))
}

/// The seed of the `index`-th sibling of a request with `seed`: another one for each, and the same
/// on every run.
pub(crate) fn sibling_seed(seed: u64, index: usize) -> u64 {
    // The output function of SplitMix64 (Steele, Lea and Flood, 2014).
    let mut mixed = seed.wrapping_add((index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

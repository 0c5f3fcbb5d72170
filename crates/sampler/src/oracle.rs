//! The definitions, one row and one token at a time in f64: what the vectorised code is tested
//! against. Nothing here is fast, and nothing here is shared with what it checks but the noise.

use crate::params::SamplingRow;

/// The logits of a row after all processors, before the temperature.
#[must_use]
pub fn process(logits: &[f32], row: &SamplingRow<'_>) -> Vec<f64> {
    let params = row.params;
    let generated: Vec<u32> = {
        let n_prompt = row.history.tokens().len() - row.history.n_generated();
        [&row.history.tokens()[n_prompt..], row.drafts].concat()
    };
    let all = [row.history.tokens(), row.drafts].concat();
    let is_too_short = generated.len() < params.min_tokens as usize;
    (0..logits.len() as u32)
        .map(|id| {
            let mut logit = f64::from(logits[id as usize]);
            for &(_, bias) in params.logit_bias.iter().filter(|(biased, _)| *biased == id) {
                logit += f64::from(bias);
            }
            if all.contains(&id) {
                let penalty = f64::from(params.repetition_penalty);
                logit = if logit < 0.0 { logit * penalty } else { logit / penalty };
            }
            let count = generated.iter().filter(|&&token| token == id).count();
            logit -= count as f64 * f64::from(params.frequency_penalty);
            if count > 0 {
                logit -= f64::from(params.presence_penalty);
            }
            let completes_bad_word = params.bad_words.iter().any(|word| {
                let (last, prefix) = word.split_last().expect("bad words are not empty");
                *last == id && all.ends_with(prefix)
            });
            let is_end = is_too_short && params.end_ids.contains(&id);
            let is_listed = params.allowed_token_ids.as_ref().is_none_or(|ids| ids.contains(&id));
            let in_grammar = row.grammar_mask.is_none_or(|mask| {
                mask.get(id as usize / 32).is_some_and(|word| word >> (id % 32) & 1 == 1)
            });
            let is_allowed = !completes_bad_word && !is_end && is_listed && in_grammar;
            if is_allowed { logit } else { f64::NEG_INFINITY }
        })
        .collect()
}

/// The probabilities of a row's tokens: all on the largest processed logit if it is greedy.
///
/// # Panics
///
/// If no token is left.
#[must_use]
pub fn distribution(logits: &[f32], row: &SamplingRow<'_>) -> Vec<f64> {
    let params = row.params;
    let processed = process(logits, row);
    let mut ranked: Vec<usize> = (0..logits.len()).collect();
    ranked.sort_by(|&a, &b| processed[b].total_cmp(&processed[a]).then(a.cmp(&b)));
    let max = processed[ranked[0]];
    assert!(max.is_finite(), "a token is left");
    if params.is_greedy() {
        ranked.truncate(1);
    }
    let scale = if params.is_greedy() { 1.0 } else { f64::from(params.temperature) };
    let weight = |id: usize| ((processed[id] - max) / scale).exp();
    if params.top_k > 0 {
        ranked.truncate(params.top_k as usize);
    }
    if params.top_p < 1.0 {
        let total: f64 = ranked.iter().map(|&id| weight(id)).sum();
        let (mut above, mut n_kept) = (0.0, 0);
        while n_kept < ranked.len() && above / total < f64::from(params.top_p) {
            above += weight(ranked[n_kept]);
            n_kept += 1;
        }
        ranked.truncate(n_kept);
    }
    let least = f64::from(params.min_p) * weight(ranked[0]);
    ranked.retain(|&id| weight(id) >= least);
    let mut probs = vec![0.0; logits.len()];
    let total: f64 = ranked.iter().map(|&id| weight(id)).sum();
    ranked.iter().for_each(|&id| probs[id] = weight(id) / total);
    probs
}

/// The token at the point `uniform`, in `[0, 1)`, of the cumulative `weights`.
///
/// # Panics
///
/// If all weights are 0.
#[must_use]
pub fn choose(weights: &[f64], uniform: f64) -> u32 {
    let point = uniform * weights.iter().sum::<f64>();
    let mut cumulative = 0.0;
    for (id, &weight) in weights.iter().enumerate() {
        cumulative += weight;
        if cumulative > point {
            return id as u32;
        }
    }
    panic!("a weight is above 0");
}

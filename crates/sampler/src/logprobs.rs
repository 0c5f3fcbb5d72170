//! Log probabilities of chosen and of the most likely tokens.

use tch::{Kind, Tensor};

use crate::error::SamplerError;
use crate::processors::upload;
use crate::ranking;

/// The most likely tokens that may be asked for at a position.
pub const MAX_TOP_LOGPROBS: u32 = 20;

/// A row of logits whose log probabilities are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogprobsQuery {
    /// Which row.
    pub row_idx: usize,
    /// The chosen token.
    pub id: u32,
    /// How many of the most likely tokens are wanted, at most [`MAX_TOP_LOGPROBS`] and the
    /// vocabulary.
    pub n_top: u32,
}

/// What a [`LogprobsQuery`] asks for. Natural logarithms, at most 0.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    /// That of the chosen token.
    pub chosen: f32,
    /// The most likely tokens with theirs, best first, of equally likely ones the lower id first.
    /// The chosen token is among them only if it is that likely.
    pub top: Vec<(u32, f32)>,
}

/// Answers all `queries` of a step's `logits`, `[R, vocab]`, in their order, with one copy to the
/// host. The softmax runs in f32, whatever the kind of `logits`.
///
/// Log probabilities are the model's own: of the logits before all processors, so before the
/// temperature, too, as vLLM gives them by default. Hence a row's values do not depend on the
/// request's other parameters, and a chosen token is not always one of the likely ones.
///
/// # Errors
///
/// [`SamplerError::Tensor`] if a row or id is out of range or a tensor operation fails.
///
/// # Panics
///
/// If a query wants more than [`MAX_TOP_LOGPROBS`] tokens.
pub fn logprobs(
    logits: &Tensor,
    queries: &[LogprobsQuery],
) -> Result<Vec<TokenLogprobs>, SamplerError> {
    if queries.is_empty() {
        return Ok(Vec::new());
    }
    let n_top = queries.iter().map(|query| query.n_top).max().unwrap_or(0);
    assert!(n_top <= MAX_TOP_LOGPROBS, "at most {MAX_TOP_LOGPROBS} log probabilities");
    let (_, vocab) = logits.size2()?;
    let n_top = i64::from(n_top).min(vocab);
    let device = logits.device();
    let rows: Vec<i64> = queries.iter().map(|query| query.row_idx as i64).collect();
    let rows = logits.f_index_select(0, &upload(&rows, device)?)?.f_to_kind(Kind::Float)?;
    let log_probs = rows.f_log_softmax(-1, None)?;

    let ids: Vec<i64> = queries.iter().map(|query| i64::from(query.id)).collect();
    let mut ids = upload(&ids, device)?.f_unsqueeze(-1)?;
    if n_top > 0 {
        ids = Tensor::f_cat(&[ids, ranking::top(&rows, n_top)?], -1)?;
    }
    // Ids are exact in f64, so one tensor carries both.
    let values = log_probs.f_gather(-1, &ids, false)?.f_to_kind(Kind::Double)?;
    let answers = Tensor::f_stack(&[ids.f_to_kind(Kind::Double)?, values], -1)?;
    let answers = Vec::<f64>::try_from(&answers.f_view(-1)?)?;
    let per_query = answers.chunks_exact(2 * (1 + n_top as usize));
    Ok(queries.iter().zip(per_query).map(|(query, pairs)| answer(query, pairs)).collect())
}

fn answer(query: &LogprobsQuery, pairs: &[f64]) -> TokenLogprobs {
    let (chosen, top) = pairs.split_at(2);
    let top = top.chunks_exact(2).take(query.n_top as usize);
    TokenLogprobs {
        chosen: chosen[1] as f32,
        top: top.map(|pair| (pair[0] as u32, pair[1] as f32)).collect(),
    }
}

/// Log probability of `ids[r]`, i64 `[R]`, under row `r` of `logits`, `[R, vocab]`: f32 `[R]`.
/// The softmax runs in f32 whatever the kind of `logits`.
///
/// # Errors
///
/// [`SamplerError::Tensor`] if the shapes differ, an id is outside the vocabulary, or a tensor
/// operation fails.
pub fn token_logprobs(logits: &Tensor, ids: &Tensor) -> Result<Tensor, SamplerError> {
    let log_probs = logits.f_log_softmax(-1, Kind::Float)?;
    Ok(log_probs.f_gather(-1, &ids.f_unsqueeze(-1)?, false)?.f_squeeze_dim(-1)?)
}

//! One token for each row of a batch that mixes greedy and sampled rows.

use tch::Tensor;

use crate::distribution::Distribution;
use crate::error::{RowFault, SamplerError};
use crate::greedy::greedy_of_processed;
use crate::noise::Purpose;
use crate::params::SamplingRow;
use crate::processors::{explain, upload};

/// What [`sample`] chose.
#[derive(Debug)]
pub struct Sampled {
    /// The token of each row, or why it has none.
    pub ids: Vec<Result<u32, RowFault>>,
    /// What the sampled rows, those that are not greedy, drew from, in their order; absent if
    /// there are none.
    pub distribution: Option<Distribution>,
}

/// Chooses a token for each row of `logits`, `[R, vocab]`: the largest logit after all processors
/// where the row is greedy, else a draw from its [`Distribution`] for `purpose`. The ids cross to
/// the host in one copy.
///
/// A verify window is not sampled row by row; see the rejection sampler of `spec-decode`.
///
/// # Errors
///
/// [`SamplerError::Tensor`] if a tensor operation fails.
///
/// # Panics
///
/// As [`process`](crate::process).
pub fn sample(
    logits: &Tensor,
    rows: &[SamplingRow<'_>],
    purpose: Purpose,
) -> Result<Sampled, SamplerError> {
    let (greedy, sampled): (Vec<usize>, Vec<usize>) =
        (0..rows.len()).partition(|&row_idx| rows[row_idx].params.is_greedy());
    let (mut chosen, mut distribution) = (Vec::new(), None);
    if !greedy.is_empty() {
        let (logits, rows) = select_rows(logits, rows, &greedy)?;
        chosen.push(greedy_of_processed(&logits, &rows)?);
    }
    if !sampled.is_empty() {
        let (logits, rows) = select_rows(logits, rows, &sampled)?;
        let of_rows = Distribution::new(&logits, &rows)?;
        chosen.push(of_rows.sample(&rows, purpose)?);
        distribution = Some(of_rows);
    }
    let mut codes = vec![0; rows.len()];
    if !chosen.is_empty() {
        let chosen = Vec::<i64>::try_from(&Tensor::f_cat(&chosen, 0)?)?;
        for (&row_idx, code) in greedy.iter().chain(&sampled).zip(chosen) {
            codes[row_idx] = code;
        }
    }
    let ids = codes.iter().enumerate().map(|(row_idx, &code)| {
        u32::try_from(code).map_err(|_| explain(code, row_idx, &rows[row_idx]))
    });
    Ok(Sampled { ids: ids.collect(), distribution })
}

/// Some rows of a batch, with their logits; no copy if it is all of them.
///
/// # Errors
///
/// [`SamplerError::Tensor`] if a tensor operation fails.
pub fn select_rows<'a>(
    logits: &Tensor,
    rows: &[SamplingRow<'a>],
    chosen: &[usize],
) -> Result<(Tensor, Vec<SamplingRow<'a>>), SamplerError> {
    let of_chosen = chosen.iter().map(|&row_idx| rows[row_idx]).collect();
    if chosen.len() == rows.len() {
        return Ok((logits.shallow_clone(), of_chosen));
    }
    let index: Vec<i64> = chosen.iter().map(|&row_idx| row_idx as i64).collect();
    Ok((logits.f_index_select(0, &upload(&index, logits.device())?)?, of_chosen))
}

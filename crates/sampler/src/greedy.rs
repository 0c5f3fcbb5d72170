//! The largest logit of each row.

use tch::Tensor;

use crate::error::SamplerError;
use crate::params::SamplingRow;
use crate::processors::{NAN, check_rows, process};

/// Fills `ids` with the id of the largest logit of each row of `logits`, `[R, vocab]`; the lowest
/// id where several are largest. Copies R ids to the host, which waits for the device once.
///
/// # Errors
///
/// [`SamplerError::NotANumber`] if a row holds a NaN, which has no largest element;
/// [`SamplerError::Tensor`] if a tensor operation fails.
///
/// # Panics
///
/// If `logits` is not a matrix.
pub fn greedy(logits: &Tensor, ids: &mut Vec<u32>) -> Result<(), SamplerError> {
    ids.clear();
    let n_rows = logits.size2().expect("logits are [R, vocab]").0;
    if n_rows == 0 {
        return Ok(());
    }
    // libtorch defines argmax as the first of equal maxima, and a NaN as larger than any number.
    let best = logits.f_argmax(-1, true)?;
    let is_nan = logits.f_gather(-1, &best, false)?.f_isnan()?;
    // One copy carries both: a NaN row reads as a negative code.
    let checked = best.f_masked_fill(&is_nan, NAN)?.f_flatten(0, 1)?;
    for (row_idx, id) in Vec::<i64>::try_from(&checked)?.into_iter().enumerate() {
        let id = u32::try_from(id).map_err(|_| SamplerError::NotANumber { row_idx })?;
        ids.push(id);
    }
    Ok(())
}

/// The largest logit of each row after [all processors](process), i64 `[R]` on the device of the
/// logits: the lowest id where several are largest, or a negative code where there is none, which
/// [`explain`](crate::explain) turns into words. The temperature plays no part.
///
/// # Errors
///
/// [`SamplerError::Tensor`] if a tensor operation fails.
///
/// # Panics
///
/// As [`process`].
pub fn greedy_of_processed(
    logits: &Tensor,
    rows: &[SamplingRow<'_>],
) -> Result<Tensor, SamplerError> {
    let processed = process(logits, rows)?;
    let best = processed.f_argmax(-1, true)?;
    let codes = check_rows(&processed.f_gather(-1, &best, false)?, false)?;
    Ok(codes.f_where_self(&codes.f_lt(0)?, &best)?.f_squeeze_dim(-1)?)
}

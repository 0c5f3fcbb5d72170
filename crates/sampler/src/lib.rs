//! Logits to tokens and log probabilities.
//!
//! **Owns** the step from a row of logits to a chosen token id (greedy) or to the log probability
//! of a given one. **Must not know** requests, drafts, layouts or models.
//!
//! Invariants: equal logits resolve to the lowest id, on every device; a row's result does not
//! depend on the other rows \[INV-11]; only ids cross to the host, never logits.
//!
//! # Example
//!
//! ```
//! use tch::Tensor;
//!
//! let logits = Tensor::from_slice2(&[[0.5f32, 2.0, 2.0], [3.0, 1.0, 0.0]]);
//! let mut ids = Vec::new();
//! sampler::greedy(&logits, &mut ids).unwrap();
//! assert_eq!(ids, [1, 0]);
//!
//! let of_ids = sampler::token_logprobs(&logits, &Tensor::from_slice(&[1i64, 1])).unwrap();
//! let first = of_ids.double_value(&[0]);
//! assert!((first - (2.0 - (0.5f64.exp() + 2.0 * 2.0f64.exp()).ln())).abs() < 1e-6);
//! ```

use std::fmt;

use tch::{Kind, TchError, Tensor};

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
    // One copy carries both: a NaN row reads as -1.
    let checked = best.f_masked_fill(&is_nan, -1)?.f_flatten(0, 1)?;
    for (row_idx, id) in Vec::<i64>::try_from(&checked)?.into_iter().enumerate() {
        let id = u32::try_from(id).map_err(|_| SamplerError::NotANumber { row_idx })?;
        ids.push(id);
    }
    Ok(())
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

/// Why no token was chosen.
#[derive(Debug)]
#[non_exhaustive]
pub enum SamplerError {
    /// This row of the logits holds a NaN.
    NotANumber {
        /// Which row.
        row_idx: usize,
    },
    /// A tensor operation failed.
    Tensor(TchError),
}

impl fmt::Display for SamplerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotANumber { row_idx } => write!(f, "row {row_idx} of the logits holds a NaN"),
            Self::Tensor(error) => write!(f, "a tensor operation of the sampler failed: {error}"),
        }
    }
}

impl std::error::Error for SamplerError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::NotANumber { .. } => None,
            Self::Tensor(error) => Some(error),
        }
    }
}

impl From<TchError> for SamplerError {
    fn from(error: TchError) -> Self {
        Self::Tensor(error)
    }
}

#[cfg(test)]
mod tests;

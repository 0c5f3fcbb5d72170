//! Why no token was chosen, for a whole step and for one row.

use std::fmt;

use tch::TchError;

/// Why no token was chosen.
#[derive(Debug)]
#[non_exhaustive]
pub enum SamplerError {
    /// This row of the logits holds a NaN.
    NotANumber {
        /// Which row.
        row_idx: usize,
    },
    /// A sampling parameter has a value that it must not have.
    InvalidParam {
        /// Its name.
        field: &'static str,
        /// What is wrong with it.
        problem: String,
    },
    /// A tensor operation failed.
    Tensor(TchError),
}

impl fmt::Display for SamplerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotANumber { row_idx } => write!(f, "row {row_idx} of the logits holds a NaN"),
            Self::InvalidParam { field, problem } => write!(f, "{field} {problem}"),
            Self::Tensor(error) => write!(f, "a tensor operation of the sampler failed: {error}"),
        }
    }
}

impl std::error::Error for SamplerError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::NotANumber { .. } | Self::InvalidParam { .. } => None,
            Self::Tensor(error) => Some(error),
        }
    }
}

impl From<TchError> for SamplerError {
    fn from(error: TchError) -> Self {
        Self::Tensor(error)
    }
}

/// Why one row has no token. The other rows of its step have theirs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowFault {
    /// Which row.
    pub row_idx: usize,
    /// Why.
    pub cause: FaultCause,
}

/// What is wrong with a row.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FaultCause {
    /// Its logits hold a NaN.
    NotANumber,
    /// It samples, and its logits hold an infinity, which leaves no distribution.
    Infinite,
    /// Every token is excluded.
    NoTokenLeft {
        /// The parameters that exclude tokens of this row, with commas between them; empty if the
        /// model itself excludes all.
        excluded_by: String,
    },
}

impl fmt::Display for RowFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { row_idx, cause } = self;
        match cause {
            FaultCause::NotANumber => write!(f, "row {row_idx} of the logits holds a NaN"),
            FaultCause::Infinite => write!(f, "row {row_idx} of the logits holds an infinity"),
            FaultCause::NoTokenLeft { excluded_by } if excluded_by.is_empty() => {
                write!(f, "row {row_idx}: every logit of the model is negative infinity")
            }
            FaultCause::NoTokenLeft { excluded_by } => {
                write!(f, "row {row_idx} has no token left after {excluded_by}")
            }
        }
    }
}

impl std::error::Error for RowFault {}

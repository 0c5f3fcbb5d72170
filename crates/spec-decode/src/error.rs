//! Why speculation cannot start or a step of it failed.

use std::fmt;

use engine_types::MAX_SPECULATIVE_TOKENS;
use sampler::SamplerError;
use tch::TchError;
use torch_ext::TensorError;

use crate::draft_model::DraftError;

/// An error of the proposer.
#[derive(Debug)]
#[non_exhaustive]
pub enum SpecDecodeError {
    /// Drafts are wanted, but the checkpoint has no MTP layer.
    NoMtpLayers {
        /// The drafts wanted.
        num_speculative_tokens: usize,
    },
    /// More drafts are wanted than the engine allows.
    TooManyDrafts {
        /// The drafts wanted.
        num_speculative_tokens: usize,
    },
    /// A draft step failed.
    Draft(DraftError),
    /// A token could not be chosen.
    Sampler(SamplerError),
    /// Synthetic acceptance cannot be had as asked for.
    SyntheticAcceptance {
        /// Which option.
        option: &'static str,
        /// Its value.
        value: f64,
        /// The smallest value that it may have.
        least: f64,
        /// The largest value that it may have.
        most: f64,
    },
}

impl fmt::Display for SpecDecodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoMtpLayers { num_speculative_tokens } => write!(
                f,
                "num_speculative_tokens is {num_speculative_tokens}, but the checkpoint has no \
                 MTP layer to draft with; use 0"
            ),
            Self::TooManyDrafts { num_speculative_tokens } => write!(
                f,
                "num_speculative_tokens is {num_speculative_tokens}, the largest value is \
                 {MAX_SPECULATIVE_TOKENS}"
            ),
            Self::Draft(error) => error.fmt(f),
            Self::Sampler(error) => write!(f, "no token could be chosen: {error}"),
            Self::SyntheticAcceptance { option, value, least, most } => {
                write!(f, "the acceptance {option} is {value}, it must lie in [{least}, {most}]")
            }
        }
    }
}

impl std::error::Error for SpecDecodeError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::NoMtpLayers { .. }
            | Self::TooManyDrafts { .. }
            | Self::SyntheticAcceptance { .. } => None,
            Self::Draft(error) => error.source(),
            Self::Sampler(error) => Some(error),
        }
    }
}

impl From<DraftError> for SpecDecodeError {
    fn from(error: DraftError) -> Self {
        Self::Draft(error)
    }
}

impl From<SamplerError> for SpecDecodeError {
    fn from(error: SamplerError) -> Self {
        Self::Sampler(error)
    }
}

impl From<TensorError> for SpecDecodeError {
    fn from(error: TensorError) -> Self {
        Self::Draft(error.into())
    }
}

impl From<TchError> for SpecDecodeError {
    fn from(error: TchError) -> Self {
        Self::Draft(error.into())
    }
}

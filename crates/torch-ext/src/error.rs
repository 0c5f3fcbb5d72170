//! Why a tensor operation failed.

use std::fmt;

use tch::{Device, Kind, TchError};

/// Why a tensor operation failed.
#[derive(Debug)]
#[non_exhaustive]
pub enum TensorError {
    /// libtorch refused; its text says why.
    Torch(TchError),
    /// A slice was asked of a tensor that is not in CPU memory.
    NotOnCpu(Device),
    /// A slice was asked of a tensor of another dtype.
    WrongKind {
        /// The dtype of the tensor.
        found: Kind,
        /// The dtype of the slice.
        expected: Kind,
    },
    /// A slice was asked of a tensor whose elements do not lie in order.
    NotContiguous {
        /// Shape of the tensor.
        shape: Vec<i64>,
    },
    /// A tensor has another shape than the operation needs.
    WrongShape {
        /// What the tensor is.
        what: &'static str,
        /// Shape of the tensor.
        found: Vec<i64>,
        /// Shape that the operation needs.
        expected: Vec<i64>,
    },
    /// A tensor holds NaN or infinity where the operation needs numbers.
    NotFinite {
        /// What the tensor is.
        what: &'static str,
    },
}

impl fmt::Display for TensorError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Torch(error) => write!(f, "a tensor operation failed: {error}"),
            Self::NotOnCpu(device) => write!(f, "a tensor on {device:?} has no slice"),
            Self::WrongKind { found, expected } => {
                write!(f, "a tensor of {found:?} is not a slice of {expected:?}")
            }
            Self::NotContiguous { shape } => {
                write!(f, "a tensor of shape {shape:?} is not contiguous")
            }
            Self::WrongShape { what, found, expected } => {
                write!(f, "{what} has shape {found:?}, not {expected:?}")
            }
            Self::NotFinite { what } => write!(
                f,
                "{what} hold NaN or infinity: weights of the checkpoint do, or its numbers overflow"
            ),
        }
    }
}

impl std::error::Error for TensorError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Torch(error) => Some(error),
            _ => None,
        }
    }
}

impl From<TchError> for TensorError {
    fn from(error: TchError) -> Self {
        Self::Torch(error)
    }
}

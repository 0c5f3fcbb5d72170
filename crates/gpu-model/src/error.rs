//! What can go wrong between a checkpoint and a pass.

use std::fmt;

use gpu_runtime::GpuError;
use model_config::Architecture;
use torch_ext::TensorError;
use weights::WeightsError;

/// A model cannot be loaded or run.
#[derive(Debug)]
#[non_exhaustive]
pub enum ModelError {
    /// The device, its compiler or one of its libraries failed.
    Gpu(GpuError),
    /// A tensor is missing.
    Weights(WeightsError),
    /// A tensor is not what it should be.
    Tensor(TensorError),
    /// No model of this architecture runs here.
    Architecture(Architecture),
    /// The device cannot hold it; the text has the sum.
    Memory(String),
}

impl fmt::Display for ModelError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gpu(error) => error.fmt(f),
            Self::Weights(error) => error.fmt(f),
            Self::Tensor(error) => error.fmt(f),
            Self::Architecture(architecture) => {
                write!(f, "{architecture:?} does not run on a GPU: give --device cpu")
            }
            Self::Memory(sum) => f.write_str(sum),
        }
    }
}

impl std::error::Error for ModelError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Gpu(error) => Some(error),
            Self::Weights(error) => Some(error),
            Self::Tensor(error) => Some(error),
            Self::Architecture(_) | Self::Memory(_) => None,
        }
    }
}

impl From<GpuError> for ModelError {
    fn from(error: GpuError) -> Self {
        Self::Gpu(error)
    }
}

impl From<WeightsError> for ModelError {
    fn from(error: WeightsError) -> Self {
        Self::Weights(error)
    }
}

impl From<TensorError> for ModelError {
    fn from(error: TensorError) -> Self {
        Self::Tensor(error)
    }
}

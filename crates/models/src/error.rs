//! Why a model cannot be loaded.

use std::fmt;

use model_config::ConfigError;
use torch_ext::TensorError;
use weights::WeightsError;

/// Why a model cannot be loaded.
#[derive(Debug)]
#[non_exhaustive]
pub enum LoadError {
    /// The configuration was refused.
    Config(ConfigError),
    /// The checkpoint was refused.
    Weights(WeightsError),
    /// A layer could not be built from its tensors.
    Tensor(TensorError),
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Config(error) => error.fmt(f),
            Self::Weights(error) => error.fmt(f),
            Self::Tensor(error) => write!(f, "a layer cannot be built: {error}"),
        }
    }
}

impl std::error::Error for LoadError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Config(error) => error.source(),
            Self::Weights(error) => error.source(),
            Self::Tensor(error) => Some(error),
        }
    }
}

impl From<ConfigError> for LoadError {
    fn from(error: ConfigError) -> Self {
        Self::Config(error)
    }
}

impl From<WeightsError> for LoadError {
    fn from(error: WeightsError) -> Self {
        Self::Weights(error)
    }
}

impl From<TensorError> for LoadError {
    fn from(error: TensorError) -> Self {
        Self::Tensor(error)
    }
}

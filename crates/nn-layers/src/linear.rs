//! Linear layers without bias.

use std::sync::Arc;

use kernels::PackedLinear;
use tch::Tensor;
use torch_ext::{TensorError, empty, slice_mut};

use crate::ops::{Ops, matrix, pack, rows};

/// `y = x W^T`.
#[derive(Debug)]
pub struct Linear {
    weight: Weight,
}

#[derive(Debug)]
enum Weight {
    Torch(Tensor),
    Packed(Arc<PackedLinear>),
}

impl Linear {
    /// From a weight `[n_out, n_in]`.
    ///
    /// # Errors
    ///
    /// [`TensorError`] if it is not a matrix, or cannot be packed.
    pub fn new(weight: &Tensor, ops: Ops) -> Result<Self, TensorError> {
        matrix(weight)?;
        let weight = match ops {
            Ops::Torch => Weight::Torch(weight.shallow_clone()),
            Ops::Fused => Weight::Packed(Arc::new(pack(weight)?)),
        };
        Ok(Self { weight })
    }

    /// The same weight, not copied.
    #[must_use]
    pub fn share(&self) -> Self {
        let weight = match &self.weight {
            Weight::Torch(weight) => Weight::Torch(weight.shallow_clone()),
            Weight::Packed(weight) => Weight::Packed(Arc::clone(weight)),
        };
        Self { weight }
    }

    /// `x` `[T, n_in]` to `[T, n_out]`.
    ///
    /// # Errors
    ///
    /// [`TensorError`] if `x` does not fit.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor, TensorError> {
        match &self.weight {
            Weight::Torch(weight) => Ok(x.f_linear(weight, None::<&Tensor>)?),
            Weight::Packed(weight) => {
                let (x, n_rows) = rows(x, weight.n_in())?;
                let mut y = empty::<f32>(&[n_rows as i64, weight.n_out() as i64])?;
                weight.forward(x, slice_mut(&mut y)?);
                Ok(y)
            }
        }
    }
}

//! Linear layers without bias.

use std::sync::Arc;

use kernels::PackedLinear;
use tch::Tensor;
use torch_ext::{TensorError, empty, slice_mut};
use weights::LoadedWeight;

use crate::ops::{Ops, matrix, pack, rows, wrong_shape};

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
    pub fn new(weight: impl Into<LoadedWeight>, ops: Ops) -> Result<Self, TensorError> {
        Self::stack([weight.into()], ops)
    }

    /// One layer of the outputs of some weights with the same inputs, one behind the other.
    ///
    /// # Errors
    ///
    /// [`TensorError`] if their inputs differ, or as [`Linear::new`].
    pub fn stack<const N: usize>(
        weights: [LoadedWeight; N],
        ops: Ops,
    ) -> Result<Self, TensorError> {
        const { assert!(N > 0, "a layer has a weight") };
        let n_in = matrix(&weights[0])?.1;
        for weight in &weights {
            if matrix(weight)?.1 != n_in {
                return Err(wrong_shape("a stacked weight", weight, vec![-1, n_in as i64]));
            }
        }
        let weight = match ops {
            Ops::Torch => {
                let tensors = weights.iter().map(LoadedWeight::to_tensor);
                let tensors = tensors.collect::<Result<Vec<_>, _>>()?;
                Weight::Torch(match &tensors[..] {
                    [one] => one.shallow_clone(),
                    _ => Tensor::f_cat(&tensors, 0)?,
                })
            }
            Ops::Fused => {
                let layers = weights.into_iter().map(|weight| pack(&weight));
                let layers = layers.collect::<Result<Vec<_>, _>>()?;
                Weight::Packed(Arc::new(PackedLinear::stack(layers)))
            }
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

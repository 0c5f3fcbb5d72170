//! Normalisation of rows.

use tch::{Kind, Tensor};
use torch_ext::{TensorError, empty, slice, slice_mut};

use crate::ops::{Ops, rows};

/// `x / sqrt(mean(x^2) + eps) * weight`, with float32 statistics.
#[derive(Debug)]
pub struct RmsNorm {
    weight: Weight,
    eps: f64,
}

#[derive(Debug)]
enum Weight {
    Torch(Tensor),
    Fused(Vec<f32>),
}

impl Weight {
    fn new(weight: &Tensor, ops: Ops) -> Result<Self, TensorError> {
        Ok(match ops {
            Ops::Torch => Self::Torch(weight.shallow_clone()),
            Ops::Fused => Self::Fused(slice(&weight.f_to_kind(Kind::Float)?)?.to_vec()),
        })
    }
}

impl RmsNorm {
    /// From a weight `[n]`.
    ///
    /// # Errors
    ///
    /// [`TensorError`] if the weight cannot be read.
    pub fn new(weight: &Tensor, eps: f64, ops: Ops) -> Result<Self, TensorError> {
        Ok(Self { weight: Weight::new(weight, ops)?, eps })
    }

    /// `x` `[T, n]` to `[T, n]`.
    ///
    /// # Errors
    ///
    /// [`TensorError`] if `x` does not fit.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor, TensorError> {
        match &self.weight {
            Weight::Torch(weight) => plain(x, weight, self.eps),
            Weight::Fused(weight) => {
                let (x, n_rows) = rows(x, weight.len())?;
                let mut out = empty::<f32>(&[n_rows as i64, weight.len() as i64])?;
                kernels::rms_norm(x, weight, self.eps as f32, slice_mut(&mut out)?);
                Ok(out)
            }
        }
    }

    /// Adds `x` to `residual`, both `[T, n]`, and normalises the sum.
    ///
    /// # Errors
    ///
    /// [`TensorError`] if the shapes do not fit.
    pub fn add_forward(&self, residual: &mut Tensor, x: &Tensor) -> Result<Tensor, TensorError> {
        match &self.weight {
            Weight::Torch(weight) => {
                let _ = residual.f_add_(x)?;
                plain(residual, weight, self.eps)
            }
            Weight::Fused(weight) => {
                let (x, n_rows) = rows(x, weight.len())?;
                let mut out = empty::<f32>(&[n_rows as i64, weight.len() as i64])?;
                let residual = slice_mut(residual)?;
                let eps = self.eps as f32;
                kernels::add_rms_norm(x, residual, weight, eps, slice_mut(&mut out)?);
                Ok(out)
            }
        }
    }

    /// Normalises one row of float32 values; fused form only.
    pub(crate) fn forward_slice(&self, x: &[f32], out: &mut [f32]) {
        let Weight::Fused(weight) = &self.weight else {
            unreachable!("slices are normalised by fused layers only")
        };
        kernels::rms_norm(x, weight, self.eps as f32, out);
    }
}

fn plain(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor, TensorError> {
    let x32 = x.f_to_kind(Kind::Float)?;
    let mean_square = x32.f_square()?.f_mean_dim(-1, true, Kind::Float)?;
    let scale = mean_square.f_add_scalar(eps)?.f_rsqrt()?;
    Ok(x32.f_mul(&scale)?.f_to_kind(x.f_kind()?)?.f_mul(weight)?)
}

/// `(x - mean(x)) / sqrt(var(x) + eps) * weight + bias`, with float32 statistics.
#[derive(Debug)]
pub struct LayerNorm {
    weight: Weight,
    bias: Weight,
    eps: f64,
}

impl LayerNorm {
    /// From a weight and a bias, `[n]` each.
    ///
    /// # Errors
    ///
    /// [`TensorError`] if they cannot be read.
    pub fn new(weight: &Tensor, bias: &Tensor, eps: f64, ops: Ops) -> Result<Self, TensorError> {
        Ok(Self { weight: Weight::new(weight, ops)?, bias: Weight::new(bias, ops)?, eps })
    }

    /// `x` `[T, n]` to `[T, n]`.
    ///
    /// # Errors
    ///
    /// [`TensorError`] if `x` does not fit.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor, TensorError> {
        match (&self.weight, &self.bias) {
            (Weight::Fused(weight), Weight::Fused(bias)) => {
                let (x, n_rows) = rows(x, weight.len())?;
                let mut out = empty::<f32>(&[n_rows as i64, weight.len() as i64])?;
                kernels::layer_norm(x, weight, bias, self.eps as f32, slice_mut(&mut out)?);
                Ok(out)
            }
            (Weight::Torch(weight), Weight::Torch(bias)) => {
                let as_f32 = |tensor: &Tensor| tensor.f_to_kind(Kind::Float);
                let (weight, bias) = (as_f32(weight)?, as_f32(bias)?);
                let n = weight.numel() as i64;
                let normed =
                    as_f32(x)?.f_layer_norm([n], Some(&weight), Some(&bias), self.eps, false)?;
                Ok(normed.f_to_kind(x.f_kind()?)?)
            }
            _ => unreachable!("weight and bias are made in one way"),
        }
    }
}

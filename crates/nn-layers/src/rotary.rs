//! Rotary position tables.

use kernels::{RopeHeads, RopeStyle};
use model_config::{RopeConfig, YarnConfig};
use tch::{Device, Kind, Tensor};
use torch_ext::{TensorError, slice};

/// Cosines and sines of every position, float32.
#[derive(Debug)]
pub struct RotaryTable {
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
}

/// Cosines and sines of the rows of one pass.
#[derive(Debug)]
pub struct RotaryRows {
    /// `[T, rope_dim / 2]`.
    cos: Tensor,
    /// `[T, rope_dim / 2]`.
    sin: Tensor,
    interleaved: bool,
}

impl RotaryTable {
    /// For positions below `n_positions` and heads whose rotated part is `rope_dim` wide.
    ///
    /// # Errors
    ///
    /// [`TensorError`] if memory is short.
    pub fn new(
        rope: &RopeConfig,
        rope_dim: usize,
        n_positions: usize,
        device: Device,
    ) -> Result<Self, TensorError> {
        let frequencies: Vec<f32> =
            inverse_frequencies(rope, rope_dim).iter().map(|&f| f as f32).collect();
        let scale = rope.yarn.as_ref().map_or(1.0, YarnConfig::cos_sin_scale);
        let positions = Tensor::f_arange(n_positions as i64, (Kind::Float, Device::Cpu))?;
        let angles = positions.f_outer(&Tensor::f_from_slice(&frequencies)?)?;
        Ok(Self {
            cos: angles.f_cos()?.f_mul_scalar(scale)?.f_to_device(device)?,
            sin: angles.f_sin()?.f_mul_scalar(scale)?.f_to_device(device)?,
            interleaved: rope.interleaved,
        })
    }

    /// The same table, not copied.
    #[must_use]
    pub fn share(&self) -> Self {
        Self {
            cos: self.cos.shallow_clone(),
            sin: self.sin.shallow_clone(),
            interleaved: self.interleaved,
        }
    }

    /// Cosines and sines, `[n_positions, rope_dim / 2]` each.
    pub fn cos_sin(&self) -> (&Tensor, &Tensor) {
        (&self.cos, &self.sin)
    }

    /// The rows of `positions`, i32 or i64 `[T]`.
    ///
    /// # Errors
    ///
    /// [`TensorError`] if a position is outside the table.
    pub fn rows(&self, positions: &Tensor) -> Result<RotaryRows, TensorError> {
        Ok(RotaryRows {
            cos: self.cos.f_index_select(0, positions)?,
            sin: self.sin.f_index_select(0, positions)?,
            interleaved: self.interleaved,
        })
    }
}

/// Which part of a head is rotated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RotatedPart {
    /// The first `rope_dim` values, as in the heads of an indexer and of grouped-query attention.
    Start,
    /// The last `rope_dim` values, as in the heads of latent attention.
    End,
}

impl RotaryRows {
    /// Rows with given cosines and sines, `[T, rope_dim / 2]` each.
    #[cfg(test)]
    pub(crate) fn from_tables(cos: Tensor, sin: Tensor, interleaved: bool) -> Self {
        Self { cos, sin, interleaved }
    }

    /// The same rows with pairs (0,1), (2,3), ... if `interleaved`, else (0, d/2), ...; not copied.
    pub(crate) fn in_style(&self, interleaved: bool) -> Self {
        Self { cos: self.cos.shallow_clone(), sin: self.sin.shallow_clone(), interleaved }
    }

    /// Width of the rotated part of a head.
    pub(crate) fn rope_dim(&self) -> i64 {
        2 * self.cos.size()[1]
    }

    /// Rotates `x` `[T, n_heads, rope_dim]`; every element stays at its index.
    pub(crate) fn rotate(&self, x: &Tensor) -> Result<Tensor, TensorError> {
        let (cos, sin) = (self.cos.f_unsqueeze(1)?, self.sin.f_unsqueeze(1)?);
        let x32 = x.f_to_kind(Kind::Float)?;
        let size = x.size();
        // Pairs as the last dimension, or as the one before it.
        let (pairs, dim) = if self.interleaved {
            (x32.f_view([size[0], size[1], size[2] / 2, 2])?, -1)
        } else {
            (x32.f_reshape([size[0], size[1], 2, size[2] / 2])?, -2)
        };
        let (a, b) = (pairs.f_select(dim, 0)?, pairs.f_select(dim, 1)?);
        let first = a.f_mul(&cos)?.f_sub(&b.f_mul(&sin)?)?;
        let second = b.f_mul(&cos)?.f_add(&a.f_mul(&sin)?)?;
        let rotated = Tensor::f_stack(&[first, second], dim)?;
        Ok(rotated.f_reshape(&size)?.f_to_kind(x.f_kind()?)?)
    }

    /// Rotates a part of each head of `x` `[T, n_heads, head_width]` in place.
    pub(crate) fn rotate_in_place(
        &self,
        x: &mut [f32],
        n_heads: usize,
        part: RotatedPart,
    ) -> Result<(), TensorError> {
        let n_rows = self.cos.size()[0] as usize;
        if n_rows == 0 {
            return Ok(());
        }
        let head_stride = x.len() / (n_rows * n_heads);
        let rope_dim = 2 * self.cos.size()[1] as usize;
        let start = match part {
            RotatedPart::Start => 0,
            RotatedPart::End => head_stride - rope_dim,
        };
        let heads = RopeHeads { n_heads, head_stride, start };
        let tables = (slice(&self.cos)?, slice(&self.sin)?);
        let style = if self.interleaved { RopeStyle::Interleaved } else { RopeStyle::HalfSplit };
        kernels::rope_in_place(x, heads, tables, style);
        Ok(())
    }
}

fn inverse_frequencies(rope: &RopeConfig, rope_dim: usize) -> Vec<f64> {
    let half = rope_dim / 2;
    let plain = |i: usize| rope.theta.powf(-(2.0 * i as f64) / rope_dim as f64);
    let Some(yarn) = &rope.yarn else { return (0..half).map(plain).collect() };
    // The pair that turns `n_rotations` times over the original context.
    let pair_at = |n_rotations: f64| {
        let context = yarn.original_max_position_embeddings as f64;
        let turns = context / (n_rotations * std::f64::consts::TAU);
        rope_dim as f64 * turns.ln() / (2.0 * rope.theta.ln())
    };
    let low = pair_at(yarn.beta_fast).floor().max(0.0);
    let high = pair_at(yarn.beta_slow).ceil().min(rope_dim as f64 - 1.0);
    // Equal bounds are a step, not a division by zero.
    let width = if high == low { 0.001 } else { high - low };
    let blend = |i: usize| {
        let stretched = ((i as f64 - low) / width).clamp(0.0, 1.0);
        plain(i) / yarn.factor * stretched + plain(i) * (1.0 - stretched)
    };
    (0..half).map(blend).collect()
}

#[cfg(test)]
mod tests;

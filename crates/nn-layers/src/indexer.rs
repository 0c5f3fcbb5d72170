//! The projections of a lightning indexer, which chooses the keys of sparse attention.

use model_config::DsaConfig;
use tch::{Kind, Tensor};
use torch_ext::{TensorError, slice_mut};
use weights::LoadedWeight;

use crate::linear::Linear;
use crate::norm::LayerNorm;
use crate::ops::Ops;
use crate::rotary::{RotaryRows, RotatedPart};

/// Added to the variance of an index key; no config field says it.
const KEY_NORM_EPS: f64 = 1e-6;

/// The weights of an indexer, as checkpoints store them.
#[derive(Debug)]
pub struct IndexerWeights {
    /// `wq_b` `[index_n_heads * index_head_dim, q_lora_rank]`.
    pub q: LoadedWeight,
    /// `wk` `[index_head_dim, hidden]`.
    pub k: LoadedWeight,
    /// `k_norm`: weight and bias, `[index_head_dim]` each.
    pub k_norm: (Tensor, Tensor),
    /// `weights_proj` `[index_n_heads, hidden]`, which a factor goes into.
    pub head_weights: Tensor,
}

/// From the rows of a layer to index keys, index queries and the weights of their heads.
///
/// The first `qk_rope_head_dim` values of a key and of each query head are rotated, in the
/// indexer's own style, whatever that of the layer's attention is.
#[derive(Debug)]
pub struct Indexer {
    q: Linear,
    k: Linear,
    k_norm: LayerNorm,
    head_weights: Linear,
    n_heads: i64,
    head_dim: i64,
    topk: usize,
    rope_interleaved: bool,
    ops: Ops,
}

impl Indexer {
    /// From the weights of a checkpoint.
    ///
    /// # Errors
    ///
    /// [`TensorError`] if shapes do not fit.
    pub fn new(
        weights: &IndexerWeights,
        config: &DsaConfig,
        ops: Ops,
    ) -> Result<Self, TensorError> {
        // Head weights come times index_n_heads^-0.5, once and for all.
        let factor = (config.index_n_heads as f64).powf(-0.5);
        let head_weights = weights.head_weights.f_to_kind(Kind::Float)?.f_mul_scalar(factor)?;
        Ok(Self {
            q: Linear::new(&weights.q, ops)?,
            k: Linear::new(&weights.k, ops)?,
            k_norm: LayerNorm::new(&weights.k_norm.0, &weights.k_norm.1, KEY_NORM_EPS, ops)?,
            head_weights: Linear::new(&head_weights, ops)?,
            n_heads: config.index_n_heads as i64,
            head_dim: config.index_head_dim as i64,
            topk: config.index_topk,
            rope_interleaved: config.rope_interleaved,
            ops,
        })
    }

    /// The most keys that a row selects.
    #[must_use]
    pub fn topk(&self) -> usize {
        self.topk
    }

    /// Index keys `[T, index_head_dim]` of `x` `[T, hidden]`, the layer's normalised input.
    ///
    /// # Errors
    ///
    /// [`TensorError`] if the rows do not fit.
    pub fn keys(&self, x: &Tensor, rotary: &RotaryRows) -> Result<Tensor, TensorError> {
        let keys = self.k_norm.forward(&self.k.forward(x)?)?;
        self.rotate(keys, 1, rotary)
    }

    /// Index queries `[R, index_n_heads, index_head_dim]` of query latents `q_a`
    /// `[R, q_lora_rank]`, and f32 weights of their heads `[R, index_n_heads]` of `x`
    /// `[R, hidden]`.
    ///
    /// # Errors
    ///
    /// [`TensorError`] if the rows do not fit.
    pub fn queries(
        &self,
        q_a: &Tensor,
        x: &Tensor,
        rotary: &RotaryRows,
    ) -> Result<(Tensor, Tensor), TensorError> {
        let q = self.rotate(self.q.forward(q_a)?, self.n_heads, rotary)?;
        let weights = self.head_weights.forward(&x.f_to_kind(Kind::Float)?)?;
        Ok((q.f_view([-1, self.n_heads, self.head_dim])?, weights))
    }

    /// Rotates the beginning of each head of `x` `[R, n_heads * index_head_dim]`.
    fn rotate(
        &self,
        mut x: Tensor,
        n_heads: i64,
        rotary: &RotaryRows,
    ) -> Result<Tensor, TensorError> {
        let rotary = rotary.in_style(self.rope_interleaved);
        if self.ops == Ops::Fused {
            rotary.rotate_in_place(slice_mut(&mut x)?, n_heads as usize, RotatedPart::Start)?;
            return Ok(x);
        }
        let size = x.size();
        let heads = x.f_view([size[0], n_heads, self.head_dim])?;
        let rope = rotary.rope_dim();
        let rotated = rotary.rotate(&heads.f_narrow(2, 0, rope)?.f_contiguous()?)?;
        let rest = heads.f_narrow(2, rope, self.head_dim - rope)?;
        Ok(Tensor::f_cat(&[rotated, rest], 2)?.f_view(&size[..])?)
    }
}

#[cfg(test)]
mod tests;

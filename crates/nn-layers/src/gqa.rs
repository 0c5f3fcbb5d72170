//! The projections of grouped-query attention.

use model_config::GqaConfig;
use tch::{Kind, Tensor};
use torch_ext::{TensorError, slice_mut};

use crate::linear::Linear;
use crate::norm::RmsNorm;
use crate::ops::Ops;
use crate::rotary::{RotaryRows, RotatedPart};

/// The layers of grouped-query attention.
#[derive(Debug)]
pub struct GqaParts {
    /// From hidden states to queries, `[H * head_dim, hidden]`.
    pub q: Linear,
    /// To keys, `[H_kv * head_dim, hidden]`.
    pub k: Linear,
    /// To values, `[H_kv * head_dim, hidden]`.
    pub v: Linear,
    /// Back, `[hidden, H * head_dim]`.
    pub o: Linear,
    /// What is added to queries, keys and values, if the config has it.
    pub bias: Option<[Tensor; 3]>,
    /// Norms of a head of queries and of keys, `[head_dim]` each, if the config has them.
    pub qk_norm: Option<[RmsNorm; 2]>,
}

/// Rows between their projections and their attention.
#[derive(Debug)]
pub struct GqaRows {
    /// Rotated queries, `[T, H, head_dim]`.
    pub q: Tensor,
    /// Rotated keys, `[T, H_kv, head_dim]`.
    pub k: Tensor,
    /// Values, `[T, H_kv, head_dim]`.
    pub v: Tensor,
}

/// Projections from the hidden state to queries, keys and values, and from attended values back.
#[derive(Debug)]
pub struct GqaProjections {
    parts: GqaParts,
    config: GqaConfig,
    ops: Ops,
}

impl GqaProjections {
    /// From its layers.
    ///
    /// # Errors
    ///
    /// [`TensorError`] if a bias cannot be converted.
    pub fn new(mut parts: GqaParts, config: &GqaConfig, ops: Ops) -> Result<Self, TensorError> {
        if let (Ops::Fused, Some(bias)) = (ops, &mut parts.bias) {
            for bias in bias {
                *bias = bias.f_to_kind(Kind::Float)?;
            }
        }
        Ok(Self { parts, config: config.clone(), ops })
    }

    /// Queries, keys and values of `x` `[T, hidden]`.
    ///
    /// # Errors
    ///
    /// [`TensorError`] if `x` does not fit.
    pub fn qkv(&self, x: &Tensor, rotary: &RotaryRows) -> Result<GqaRows, TensorError> {
        let GqaParts { q, k, v, bias, qk_norm, .. } = &self.parts;
        let bias = |idx: usize| bias.as_ref().map(|bias| &bias[idx]);
        let norm = |idx: usize| qk_norm.as_ref().map(|norms| &norms[idx]);
        let GqaConfig { num_heads, num_kv_heads, .. } = self.config;
        let q = self.heads(q.forward(x)?, num_heads, bias(0))?;
        let k = self.heads(k.forward(x)?, num_kv_heads, bias(1))?;
        Ok(GqaRows {
            q: self.norm_and_rotate(q, norm(0), rotary)?,
            k: self.norm_and_rotate(k, norm(1), rotary)?,
            v: self.heads(v.forward(x)?, num_kv_heads, bias(2))?,
        })
    }

    /// Adds the bias to projected rows and splits them into heads, `[T, n_heads, head_dim]`.
    fn heads(
        &self,
        mut rows: Tensor,
        n_heads: usize,
        bias: Option<&Tensor>,
    ) -> Result<Tensor, TensorError> {
        if let Some(bias) = bias {
            let _ = rows.f_add_(bias)?;
        }
        let shape = [rows.size()[0], n_heads as i64, self.config.head_dim as i64];
        Ok(rows.f_view(shape)?)
    }

    fn norm_and_rotate(
        &self,
        heads: Tensor,
        norm: Option<&RmsNorm>,
        rotary: &RotaryRows,
    ) -> Result<Tensor, TensorError> {
        let shape = heads.size();
        let mut heads = match norm {
            Some(norm) => norm.forward(&heads.f_flatten(0, 1)?)?.f_view(&shape[..])?,
            None => heads,
        };
        if self.ops == Ops::Fused {
            rotary.rotate_in_place(
                slice_mut(&mut heads)?,
                shape[1] as usize,
                RotatedPart::Start,
            )?;
            return Ok(heads);
        }
        let rope_dim = rotary.rope_dim();
        let start = heads.f_narrow(2, 0, rope_dim)?.f_contiguous()?;
        let rest = heads.f_narrow(2, rope_dim, shape[2] - rope_dim)?;
        Ok(Tensor::f_cat(&[rotary.rotate(&start)?, rest], 2)?)
    }

    /// The layer's output `[R, hidden]` from attended values `[R, H, head_dim]`.
    ///
    /// # Errors
    ///
    /// [`TensorError`] if the rows do not fit.
    pub fn output(&self, attended: &Tensor) -> Result<Tensor, TensorError> {
        self.parts.o.forward(&attended.f_flatten(1, 2)?)
    }
}

#[cfg(test)]
mod tests;

//! The projections of multi-head latent attention, absorbed into the query and the output.

use kernels::PackedLinear;
use model_config::MlaConfig;
use tch::Tensor;
use torch_ext::{TensorError, empty, slice, slice_mut};
use weights::LoadedWeight;

use crate::linear::Linear;
use crate::norm::RmsNorm;
use crate::ops::{Ops, pack, rows};
use crate::rotary::{RotaryRows, RotatedPart};

/// The weights of a latent attention layer, as checkpoints store them.
#[derive(Debug)]
pub struct MlaWeights {
    /// `q_a_proj` `[q_lora_rank, hidden]`, or `q_proj` `[H * qk_head_dim, hidden]` where queries
    /// come from one matrix.
    pub q_a: LoadedWeight,
    /// `q_a_layernorm` `[q_lora_rank]` and `q_b_proj` `[H * qk_head_dim, q_lora_rank]`, if the
    /// query has a latent.
    pub q_b: Option<(Tensor, LoadedWeight)>,
    /// `kv_a_proj_with_mqa` `[kv_lora_rank + rope_dim, hidden]`.
    pub kv_a: LoadedWeight,
    /// `kv_a_layernorm` `[kv_lora_rank]`.
    pub kv_a_norm: Tensor,
    /// `kv_b_proj` `[H * (nope_dim + v_head_dim), kv_lora_rank]`. Absorbing it transposes a part of
    /// each head, and scales of a row's groups do not follow: it needs its values.
    pub kv_b: Tensor,
    /// `o_proj` `[hidden, H * v_head_dim]`.
    pub o: LoadedWeight,
}

/// What every row of a pass leaves: its cache row, and the start of its queries.
#[derive(Debug)]
pub struct MlaLatents {
    /// Normalised latent, `[T, kv_lora_rank]`.
    pub latent: Tensor,
    /// Rotated key, `[T, rope_dim]`.
    pub k_pe: Tensor,
    /// Normalised query latent `[T, q_lora_rank]`, or the queries `[T, H * qk_head_dim]` where
    /// they have none. Input of [`MlaProjections::queries`].
    pub q_a: Tensor,
}

/// Projections from the hidden state to latent queries and cache rows, and from attended latents
/// back.
#[derive(Debug)]
pub struct MlaProjections {
    config: MlaConfig,
    /// `q_a` over `kv_a`, one matrix.
    qkv_a: Linear,
    /// Norm and projection of the query latent.
    q_b: Option<(RmsNorm, Linear)>,
    kv_a_norm: RmsNorm,
    /// `nope_dim` to `kv_lora_rank`.
    absorb_key: HeadLinear,
    /// `kv_lora_rank` to `v_head_dim`.
    expand_value: HeadLinear,
    o: Linear,
    ops: Ops,
}

impl MlaProjections {
    /// From the weights of a checkpoint.
    ///
    /// # Errors
    ///
    /// [`TensorError`] if shapes do not fit.
    pub fn new(
        weights: &MlaWeights,
        config: &MlaConfig,
        eps: f64,
        ops: Ops,
    ) -> Result<Self, TensorError> {
        let (nope, v) = (config.qk_nope_head_dim as i64, config.v_head_dim as i64);
        let shape = [config.num_heads as i64, nope + v, config.kv_lora_rank as i64];
        let kv_b = weights.kv_b.f_view(shape)?;
        let absorb = kv_b.f_narrow(1, 0, nope)?.f_transpose(1, 2)?;
        let q_b = match &weights.q_b {
            Some((norm, proj)) => Some((RmsNorm::new(norm, eps, ops)?, Linear::new(proj, ops)?)),
            None => None,
        };
        Ok(Self {
            config: config.clone(),
            qkv_a: Linear::stack([(&weights.q_a).into(), (&weights.kv_a).into()], ops)?,
            q_b,
            kv_a_norm: RmsNorm::new(&weights.kv_a_norm, eps, ops)?,
            absorb_key: HeadLinear::new(&absorb, ops)?,
            expand_value: HeadLinear::new(&kv_b.f_narrow(1, nope, v)?, ops)?,
            o: Linear::new(&weights.o, ops)?,
            ops,
        })
    }

    /// The cache rows and query latents of `x` `[T, hidden]`.
    ///
    /// # Errors
    ///
    /// [`TensorError`] if `x` does not fit.
    pub fn latents(&self, x: &Tensor, rotary: &RotaryRows) -> Result<MlaLatents, TensorError> {
        let qkv = self.qkv_a.forward(x)?;
        match self.ops {
            Ops::Torch => self.latents_plain(&qkv, rotary),
            Ops::Fused => self.latents_fused(&qkv, rotary),
        }
    }

    fn latents_plain(&self, qkv: &Tensor, rotary: &RotaryRows) -> Result<MlaLatents, TensorError> {
        let (kv_rank, rope) = (self.config.kv_lora_rank as i64, self.rope_dim());
        let q_width = qkv.size()[1] - kv_rank - rope;
        let parts = qkv.f_split_with_sizes([q_width, kv_rank, rope], 1)?;
        Ok(MlaLatents {
            latent: self.kv_a_norm.forward(&parts[1])?,
            k_pe: rotary.rotate(&parts[2].f_contiguous()?.f_unsqueeze(1)?)?.f_squeeze_dim(1)?,
            q_a: match &self.q_b {
                Some((norm, _)) => norm.forward(&parts[0])?,
                None => parts[0].f_contiguous()?,
            },
        })
    }

    fn latents_fused(&self, qkv: &Tensor, rotary: &RotaryRows) -> Result<MlaLatents, TensorError> {
        let (kv_rank, rope) = (self.config.kv_lora_rank, self.config.qk_rope_head_dim);
        let (n_rows, width) = (qkv.size()[0], qkv.size()[1] as usize);
        let q_width = width - kv_rank - rope;
        let mut latent = empty::<f32>(&[n_rows, kv_rank as i64])?;
        let mut k_pe = empty::<f32>(&[n_rows, rope as i64])?;
        let mut q_a = empty::<f32>(&[n_rows, q_width as i64])?;
        let keys = slice_mut::<f32>(&mut k_pe)?;
        let outputs = slice_mut::<f32>(&mut latent)?
            .chunks_exact_mut(kv_rank)
            .zip(keys.chunks_exact_mut(rope))
            .zip(slice_mut::<f32>(&mut q_a)?.chunks_exact_mut(q_width));
        for (row, ((latent, k_pe), q_a)) in slice::<f32>(qkv)?.chunks_exact(width).zip(outputs) {
            let (q, kv) = row.split_at(q_width);
            match &self.q_b {
                Some((norm, _)) => norm.forward_slice(q, q_a),
                None => q_a.copy_from_slice(q),
            }
            self.kv_a_norm.forward_slice(&kv[..kv_rank], latent);
            k_pe.copy_from_slice(&kv[kv_rank..]);
        }
        rotary.rotate_in_place(keys, 1, RotatedPart::End)?;
        Ok(MlaLatents { latent, k_pe, q_a })
    }

    /// The queries of `q_a` `[R, ..]`, rows of [`MlaLatents::q_a`]: latent ones
    /// `[R, H, kv_lora_rank]` and rotated ones `[R, H, rope_dim]`.
    ///
    /// # Errors
    ///
    /// [`TensorError`] if the rows do not fit.
    pub fn queries(
        &self,
        q_a: &Tensor,
        rotary: &RotaryRows,
    ) -> Result<(Tensor, Tensor), TensorError> {
        let mut q = match &self.q_b {
            Some((_, proj)) => proj.forward(q_a)?,
            None => q_a.shallow_clone(),
        };
        let config = &self.config;
        let (n_rows, n_heads) = (q_a.size()[0], config.num_heads);
        let (nope, rope, width) =
            (config.qk_nope_head_dim, config.qk_rope_head_dim, config.qk_head_dim());
        if self.ops == Ops::Torch {
            let q = q.f_view([n_rows, n_heads as i64, width as i64])?;
            let q_pe = q.f_narrow(2, nope as i64, rope as i64)?.f_contiguous()?;
            let q_nope = q.f_narrow(2, 0, nope as i64)?;
            return Ok((self.absorb_key.forward_plain(&q_nope)?, rotary.rotate(&q_pe)?));
        }
        let mut q_latent = empty::<f32>(&[n_rows, n_heads as i64, config.kv_lora_rank as i64])?;
        let mut q_pe = empty::<f32>(&[n_rows, n_heads as i64, rope as i64])?;
        let q = slice_mut::<f32>(&mut q)?;
        let rotated = slice_mut::<f32>(&mut q_pe)?;
        for (head, dst) in q.chunks_exact(width).zip(rotated.chunks_exact_mut(rope)) {
            dst.copy_from_slice(&head[nope..]);
        }
        rotary.rotate_in_place(rotated, n_heads, RotatedPart::End)?;
        self.absorb_key.forward(q, width, slice_mut(&mut q_latent)?);
        Ok((q_latent, q_pe))
    }

    /// The layer's output `[R, hidden]` from attended latents `[R, H, kv_lora_rank]`.
    ///
    /// # Errors
    ///
    /// [`TensorError`] if the rows do not fit.
    pub fn output(&self, latents: &Tensor) -> Result<Tensor, TensorError> {
        let (n_heads, v) = (self.config.num_heads as i64, self.config.v_head_dim as i64);
        let value_shape = [latents.size()[0], n_heads * v];
        if self.ops == Ops::Torch {
            let values = self.expand_value.forward_plain(latents)?.f_reshape(value_shape)?;
            return self.o.forward(&values);
        }
        let mut values = empty::<f32>(&value_shape)?;
        let kv_rank = self.config.kv_lora_rank;
        let latents = latents.f_view([-1, n_heads * kv_rank as i64])?;
        let (latents, _) = rows(&latents, n_heads as usize * kv_rank)?;
        self.expand_value.forward(latents, kv_rank, slice_mut(&mut values)?);
        self.o.forward(&values)
    }

    fn rope_dim(&self) -> i64 {
        self.config.qk_rope_head_dim as i64
    }
}

/// One linear layer for each head.
#[derive(Debug)]
enum HeadLinear {
    /// `[H, n_in, n_out]`.
    Torch(Tensor),
    Fused(Vec<PackedLinear>),
}

impl HeadLinear {
    /// From weights `[H, n_out, n_in]`.
    fn new(weights: &Tensor, ops: Ops) -> Result<Self, TensorError> {
        match ops {
            Ops::Torch => Ok(Self::Torch(weights.f_transpose(1, 2)?.f_contiguous()?)),
            Ops::Fused => {
                let heads =
                    (0..weights.size()[0]).map(|head| pack(&weights.f_select(0, head)?.into()));
                Ok(Self::Fused(heads.collect::<Result<_, _>>()?))
            }
        }
    }

    /// `x` `[R, H, n_in]` to `[R, H, n_out]`; plain form only.
    fn forward_plain(&self, x: &Tensor) -> Result<Tensor, TensorError> {
        let Self::Torch(weights) = self else {
            unreachable!("tensors are projected by plain layers only")
        };
        Ok(x.f_transpose(0, 1)?.f_matmul(weights)?.f_transpose(0, 1)?.f_contiguous()?)
    }

    /// `x` `[R, H, stride]`, of which the first `n_in` of each head are read, to `y`
    /// `[R, H, n_out]`; fused form only.
    fn forward(&self, x: &[f32], stride: usize, y: &mut [f32]) {
        let Self::Fused(heads) = self else {
            unreachable!("slices are projected by fused layers only")
        };
        let (n_in, n_out) = (heads[0].n_in(), heads[0].n_out());
        let n_rows = y.len() / (heads.len() * n_out);
        // A kernel wants the rows of a head side by side.
        let mut inputs = Vec::with_capacity(n_rows * n_in);
        let mut outputs = vec![0.0; n_rows * n_out];
        for (head_idx, head) in heads.iter().enumerate() {
            inputs.clear();
            for row in x.chunks_exact(heads.len() * stride) {
                inputs.extend_from_slice(&row[head_idx * stride..][..n_in]);
            }
            head.forward(&inputs, &mut outputs);
            let rows = y.chunks_exact_mut(heads.len() * n_out);
            for (row, output) in rows.zip(outputs.chunks_exact(n_out)) {
                row[head_idx * n_out..][..n_out].copy_from_slice(output);
            }
        }
    }
}

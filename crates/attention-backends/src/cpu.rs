//! The production backend of the CPU: fused kernels over the tensors' memory.

use half::bf16;
use kernels::{LatentCache, MlaBatch, MlaShape, PagedRows, mla_attention};
use tch::{Kind, Tensor};
use torch_ext::{Element, TensorError, empty, slice, slice_mut};

use crate::backend::{AttentionBackend, MlaQuery, width};
use crate::device_layout::DeviceLayout;

/// Runs the `kernels` crate. Queries and latents are float32, caches float32 or bfloat16.
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuBackend;

impl AttentionBackend for CpuBackend {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn write_latent(
        &self,
        cache: &Tensor,
        latent: &Tensor,
        k_pe: &Tensor,
        layout: &DeviceLayout,
    ) -> Result<(), TensorError> {
        let rows = LatentRows {
            latent: slice(latent)?,
            k_pe: slice(k_pe)?,
            widths: (width(latent) as usize, width(k_pe) as usize),
        };
        if cache.f_kind()? == Kind::BFloat16 {
            rows.write(cache, layout, bf16::from_f32)
        } else {
            rows.write(cache, layout, |value: f32| value)
        }
    }

    fn mla(
        &self,
        query: MlaQuery<'_>,
        cache: &Tensor,
        scale: f64,
        layout: &DeviceLayout,
    ) -> Result<Tensor, TensorError> {
        let shape = query.q_latent.size();
        let mut out = empty::<f32>(&shape)?;
        let host = layout.host();
        if host.n_tokens() == 0 {
            return Ok(out);
        }
        let shape = MlaShape {
            n_heads: shape[1] as usize,
            kv_lora_rank: width(query.q_latent) as usize,
            rope_dim: width(query.q_pe) as usize,
            scale: scale as f32,
        };
        let cache = match cache.f_kind()? {
            Kind::BFloat16 => LatentCache::Bf16(slice(cache)?),
            _ => LatentCache::F32(slice(cache)?),
        };
        let batch = MlaBatch {
            q_lat: slice(query.q_latent)?,
            q_pe: slice(query.q_pe)?,
            rows: PagedRows {
                token_to_seq: host.token_to_seq(),
                positions: host.positions(),
                block_tables: host.block_tables(),
                max_blocks: host.max_blocks(),
                block_size: host.block_size() as usize,
            },
            keys: None,
        };
        mla_attention(&shape, cache, &batch, slice_mut(&mut out)?);
        Ok(out)
    }
}

/// Latent rows to be written.
struct LatentRows<'a> {
    /// `[T, kv_lora_rank]`.
    latent: &'a [f32],
    /// `[T, rope_dim]`.
    k_pe: &'a [f32],
    /// `kv_lora_rank` and `rope_dim`.
    widths: (usize, usize),
}

impl LatentRows<'_> {
    fn write<T: Element>(
        &self,
        cache: &Tensor,
        layout: &DeviceLayout,
        convert: impl Fn(f32) -> T,
    ) -> Result<(), TensorError> {
        let (latent_width, rope_width) = self.widths;
        let row_width = latent_width + rope_width;
        if width(cache) as usize != row_width {
            return Err(TensorError::WrongShape {
                what: "the latent cache",
                found: cache.size(),
                expected: vec![cache.size()[0], row_width as i64],
            });
        }
        // A clone shares the storage, so this writes to the cache.
        let mut cache = cache.shallow_clone();
        let cache = slice_mut::<T>(&mut cache)?;
        let latents = self.latent.chunks_exact(latent_width);
        let rows = latents.zip(self.k_pe.chunks_exact(rope_width));
        for (&slot, (latent, k_pe)) in layout.host().slot_mapping().iter().zip(rows) {
            let row = &mut cache[slot as usize * row_width..][..row_width];
            for (dst, &value) in row.iter_mut().zip(latent.iter().chain(k_pe)) {
                *dst = convert(value);
            }
        }
        Ok(())
    }
}

//! The production backend of the CPU: fused kernels over the tensors' memory.

use half::bf16;
use kernels::{
    CacheRows, FP8_SCALE_BYTES, GqaBatch, GqaShape, IndexBatch, IndexCache, IndexShape, MlaBatch,
    MlaShape, PagedRows, SelectedKeys, gqa_attention, lightning_index, mla_attention,
    store_fp8_key,
};
use tch::{Kind, Tensor};
use torch_ext::{Element, TensorError, empty, slice, slice_mut};

use crate::backend::{AttentionBackend, GqaQuery, IndexQuery, MlaQuery, kv_shape, width};
use crate::device_layout::DeviceLayout;
use crate::selection::Selection;

/// Runs the `kernels` crate. Queries, latents and index keys are float32, caches float32 or
/// bfloat16, index caches also 8-bit.
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
        let widths = (width(latent) as usize, width(k_pe) as usize);
        let (latent, k_pe) = (slice::<f32>(latent)?, slice::<f32>(k_pe)?);
        let rows = latent.chunks_exact(widths.0).zip(k_pe.chunks_exact(widths.1));
        let rows = rows.map(|(latent, k_pe)| latent.iter().chain(k_pe));
        write_floats(cache, ("the latent cache", widths.0 + widths.1), layout, rows)
    }

    fn mla(
        &self,
        query: MlaQuery<'_>,
        cache: &Tensor,
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
            scale: query.scale as f32,
        };
        let cache = cache_rows(cache)?;
        let keys = match query.selection {
            None => None,
            Some(selection) => {
                selection.check(layout)?;
                Some(SelectedKeys {
                    indices: slice(selection.indices())?,
                    counts: slice(selection.counts())?,
                    topk: selection.topk(),
                })
            }
        };
        let batch = MlaBatch {
            q_lat: slice(query.q_latent)?,
            q_pe: slice(query.q_pe)?,
            rows: paged_rows(layout),
            keys,
        };
        mla_attention(&shape, cache, &batch, slice_mut(&mut out)?);
        Ok(out)
    }

    fn write_kv(
        &self,
        cache: &Tensor,
        k: &Tensor,
        v: &Tensor,
        layout: &DeviceLayout,
    ) -> Result<(), TensorError> {
        let [n_heads, head_dim] = kv_shape(cache, k)?.map(|n| n as usize);
        let expected = vec![layout.host().n_tokens() as i64, n_heads as i64, head_dim as i64];
        for (what, rows) in [("keys", k), ("values", v)] {
            if rows.size() != expected {
                return Err(TensorError::WrongShape { what, found: rows.size(), expected });
            }
        }
        let row_width = n_heads * head_dim;
        let (k, v) = (slice::<f32>(k)?, slice::<f32>(v)?);
        let rows = k.chunks_exact(row_width).zip(v.chunks_exact(row_width));
        let rows = rows.map(|(k, v)| {
            let heads = k.chunks_exact(head_dim).zip(v.chunks_exact(head_dim));
            heads.flat_map(|(key, value)| key.iter().chain(value))
        });
        let target = ("the key/value cache", 2 * row_width);
        write_floats(&cache.f_flatten(1, 3)?, target, layout, rows)
    }

    fn gqa(
        &self,
        query: GqaQuery<'_>,
        cache: &Tensor,
        layout: &DeviceLayout,
    ) -> Result<Tensor, TensorError> {
        let [n_kv_heads, head_dim] = kv_shape(cache, query.q)?.map(|n| n as usize);
        let shape = query.q.size();
        let mut out = empty::<f32>(&shape)?;
        if layout.host().n_tokens() == 0 {
            return Ok(out);
        }
        let scale = query.scale as f32;
        let shape = GqaShape { n_heads: shape[1] as usize, n_kv_heads, head_dim, scale };
        let batch = GqaBatch { q: slice(query.q)?, rows: paged_rows(layout) };
        gqa_attention(&shape, cache_rows(cache)?, &batch, slice_mut(&mut out)?);
        Ok(out)
    }

    fn write_index_keys(
        &self,
        cache: &Tensor,
        keys: &Tensor,
        layout: &DeviceLayout,
    ) -> Result<(), TensorError> {
        let head_dim = width(keys) as usize;
        check_finite("index keys", keys)?;
        let rows = slice::<f32>(keys)?.chunks_exact(head_dim);
        let what = "the index cache";
        match cache.f_kind()? {
            Kind::Uint8 => {
                let target = (what, head_dim + FP8_SCALE_BYTES);
                write_rows(cache, target, layout, rows, |row: &mut [u8], key| {
                    store_fp8_key(key, row);
                })
            }
            Kind::BFloat16 => write_rows(cache, (what, head_dim), layout, rows, |row, key| {
                convert(row, key, bf16::from_f32);
            }),
            _ => write_rows(cache, (what, head_dim), layout, rows, |row: &mut [f32], key| {
                row.copy_from_slice(key);
            }),
        }
    }

    fn select(
        &self,
        query: IndexQuery<'_>,
        cache: &Tensor,
        layout: &DeviceLayout,
    ) -> Result<(Selection, u64), TensorError> {
        check_finite("index queries", query.q)?;
        check_finite("weights of index heads", query.weights)?;
        let shape = query.q.size();
        let (n_rows, topk) = (shape[0], query.topk as i64);
        let mut indices = empty::<i32>(&[n_rows, topk])?;
        let mut counts = empty::<i32>(&[n_rows])?;
        if n_rows == 0 {
            return Ok((Selection::new(indices, counts)?, 0));
        }
        let shape = IndexShape {
            n_heads: shape[1] as usize,
            head_dim: width(query.q) as usize,
            topk: query.topk,
            scale: query.scale() as f32,
        };
        let cache = match cache.f_kind()? {
            Kind::Uint8 => IndexCache::Fp8(slice(cache)?),
            Kind::BFloat16 => IndexCache::Bf16(slice(cache)?),
            _ => IndexCache::F32(slice(cache)?),
        };
        let batch = IndexBatch {
            q: slice(query.q)?,
            weights: slice(query.weights)?,
            rows: paged_rows(layout),
        };
        let (chosen, n_chosen) = (slice_mut(&mut indices)?, slice_mut(&mut counts)?);
        let n_scored = lightning_index(&shape, cache, &batch, chosen, n_chosen);
        Ok((Selection::new(indices, counts)?, n_scored))
    }
}

fn cache_rows(cache: &Tensor) -> Result<CacheRows<'_>, TensorError> {
    Ok(match cache.f_kind()? {
        Kind::BFloat16 => CacheRows::Bf16(slice(cache)?),
        _ => CacheRows::F32(slice(cache)?),
    })
}

fn check_finite(what: &'static str, values: &Tensor) -> Result<(), TensorError> {
    if slice::<f32>(values)?.iter().all(|value| value.is_finite()) {
        Ok(())
    } else {
        Err(TensorError::NotFinite { what })
    }
}

fn paged_rows(layout: &DeviceLayout) -> PagedRows<'_> {
    let host = layout.host();
    PagedRows {
        token_to_seq: host.token_to_seq(),
        positions: host.positions(),
        block_tables: host.block_tables(),
        max_blocks: host.max_blocks(),
        block_size: host.block_size() as usize,
    }
}

/// As [`write_rows`], to a cache of float32 or bfloat16.
fn write_floats<'a, R: IntoIterator<Item = &'a f32>>(
    cache: &Tensor,
    target: (&'static str, usize),
    layout: &DeviceLayout,
    rows: impl Iterator<Item = R>,
) -> Result<(), TensorError> {
    if cache.f_kind()? == Kind::BFloat16 {
        write_rows(cache, target, layout, rows, |row, values| {
            convert(row, values, bf16::from_f32);
        })
    } else {
        write_rows(cache, target, layout, rows, |row, values| convert(row, values, |x| x))
    }
}

/// Writes one row for each token of the layout to a cache, which is `target`: its name and the
/// width of its rows.
fn write_rows<T: Element, R>(
    cache: &Tensor,
    (what, row_width): (&'static str, usize),
    layout: &DeviceLayout,
    rows: impl Iterator<Item = R>,
    write: impl Fn(&mut [T], R),
) -> Result<(), TensorError> {
    if width(cache) as usize != row_width {
        return Err(TensorError::WrongShape {
            what,
            found: cache.size(),
            expected: vec![cache.size()[0], row_width as i64],
        });
    }
    // A clone shares the storage, so this writes to the cache.
    let mut cache = cache.shallow_clone();
    let cache = slice_mut::<T>(&mut cache)?;
    for (&slot, values) in layout.host().slot_mapping().iter().zip(rows) {
        write(&mut cache[slot as usize * row_width..][..row_width], values);
    }
    Ok(())
}

fn convert<'a, T>(
    row: &mut [T],
    values: impl IntoIterator<Item = &'a f32>,
    convert: impl Fn(f32) -> T,
) {
    for (dst, &value) in row.iter_mut().zip(values) {
        *dst = convert(value);
    }
}

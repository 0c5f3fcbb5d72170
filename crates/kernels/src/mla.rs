//! Paged latent attention with absorbed projections.

use crate::attention::{Batch, CacheRows, SelectedKeys, Shape, Values, attend};
use crate::paged::PagedRows;
use crate::simd::Isa;

/// Sizes of a latent attention layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MlaShape {
    /// Query heads.
    pub n_heads: usize,
    /// Width of a latent row without its rotary part; also the width of the output.
    pub kv_lora_rank: usize,
    /// Width of the rotary part.
    pub rope_dim: usize,
    /// Factor of the scores.
    pub scale: f32,
}

/// The queries of a forward pass and the keys that they attend to.
#[derive(Clone, Copy, Debug)]
pub struct MlaBatch<'a> {
    /// Latent queries, `[n_tokens, n_heads, kv_lora_rank]`.
    pub q_lat: &'a [f32],
    /// Rotary queries, `[n_tokens, n_heads, rope_dim]`.
    pub q_pe: &'a [f32],
    /// The tokens and where their keys are.
    pub rows: PagedRows<'a>,
    /// The keys to attend to; all visible ones where it is `None`.
    pub keys: Option<SelectedKeys<'a>>,
}

/// `out[t, h] = sum_p softmax_p(scale * (q_lat[t, h] . c_p + q_pe[t, h] . k_pe_p)) c_p`.
///
/// The cache is `[n_slots, kv_lora_rank + rope_dim]`, latent part first, and `out`
/// `[n_tokens, n_heads, kv_lora_rank]`. Softmax and sums are f32, over the keys of a token
/// in their order: all visible ones, or those selected, which give the same bits where they are
/// all. A token gets the same bits in a prefill chunk, a decode or a verify window.
///
/// # Panics
///
/// If lengths do not match, a selected position is not visible to its token, or a position has no
/// slot in the cache.
pub fn mla_attention(
    shape: &MlaShape,
    cache: CacheRows<'_>,
    batch: &MlaBatch<'_>,
    out: &mut [f32],
) {
    mla_attention_on(Isa::detect(), shape, cache, batch, out);
}

pub(crate) fn mla_attention_on(
    isa: Isa,
    shape: &MlaShape,
    cache: CacheRows<'_>,
    batch: &MlaBatch<'_>,
    out: &mut [f32],
) {
    let MlaShape { n_heads, kv_lora_rank, rope_dim, scale } = *shape;
    let MlaBatch { q_lat, q_pe, rows, keys } = *batch;
    // All heads share one key, which begins with its value.
    let shape = Shape {
        n_heads,
        n_kv_heads: 1,
        key: kv_lora_rank + rope_dim,
        value: kv_lora_rank,
        values: Values::InKeys,
        scale,
    };
    let batch = Batch { queries: [(q_lat, kv_lora_rank), (q_pe, rope_dim)], rows, keys };
    attend(isa, &shape, cache, &batch, out);
}

#[cfg(test)]
mod tests;

//! Paged grouped-query attention.

use crate::attention::{Batch, CacheRows, Shape, Values, attend};
use crate::paged::PagedRows;
use crate::simd::Isa;

/// Sizes of a grouped-query attention layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GqaShape {
    /// Query heads, a multiple of `n_kv_heads`.
    pub n_heads: usize,
    /// Heads of keys and values; query head `h` attends to head `h * n_kv_heads / n_heads`.
    pub n_kv_heads: usize,
    /// Width of queries, keys and values.
    pub head_dim: usize,
    /// Factor of the scores.
    pub scale: f32,
}

/// The queries of a forward pass.
#[derive(Clone, Copy, Debug)]
pub struct GqaBatch<'a> {
    /// Queries, `[n_tokens, n_heads, head_dim]`.
    pub q: &'a [f32],
    /// The tokens and where their keys are.
    pub rows: PagedRows<'a>,
}

/// `out[t, h] = sum_p softmax_p(scale * (q[t, h] . k_p)) v_p`, over the keys that token `t` sees.
///
/// The cache is `[n_slots, n_kv_heads, 2, head_dim]`, a key before its value, and `out`
/// `[n_tokens, n_heads, head_dim]`. Softmax and sums are f32, over the keys in their order. A
/// token gets the same bits in a prefill chunk, a decode or a verify window.
///
/// # Panics
///
/// If lengths do not match, or a position has no slot in the cache.
pub fn gqa_attention(
    shape: &GqaShape,
    cache: CacheRows<'_>,
    batch: &GqaBatch<'_>,
    out: &mut [f32],
) {
    gqa_attention_on(Isa::detect(), shape, cache, batch, out);
}

pub(crate) fn gqa_attention_on(
    isa: Isa,
    shape: &GqaShape,
    cache: CacheRows<'_>,
    batch: &GqaBatch<'_>,
    out: &mut [f32],
) {
    let GqaShape { n_heads, n_kv_heads, head_dim, scale } = *shape;
    let values = Values::BehindKeys;
    let shape = Shape { n_heads, n_kv_heads, key: head_dim, value: head_dim, values, scale };
    let batch = Batch { queries: [(batch.q, head_dim), (&[], 0)], rows: batch.rows, keys: None };
    attend(isa, &shape, cache, &batch, out);
}

#[cfg(test)]
mod tests;

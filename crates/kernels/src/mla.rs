//! Paged latent attention with absorbed projections.

use std::ops::Range;

use half::bf16;

use crate::paged::PagedRows;
use crate::parallel::{Disjoint, for_each_task, n_threads};
use crate::simd::{Isa, dispatch};

mod selected;
mod tile;

pub use selected::SelectedKeys;

/// The most query rows (a token and a head each) that share a pass over the cache.
const TILE_ROWS: usize = 16;
/// How much longer a multiply-add takes here than in a long product, softmax included.
const COST_FACTOR: usize = 2;

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

/// The latent rows of one layer, `[n_slots, kv_lora_rank + rope_dim]`, latent part first.
#[derive(Clone, Copy, Debug)]
pub enum LatentCache<'a> {
    /// Rows in f32.
    F32(&'a [f32]),
    /// Rows in bf16.
    Bf16(&'a [bf16]),
}

impl LatentCache<'_> {
    fn len(&self) -> usize {
        match self {
            Self::F32(rows) => rows.len(),
            Self::Bf16(rows) => rows.len(),
        }
    }
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

impl MlaBatch<'_> {
    /// Keys that a token attends to.
    fn n_keys(&self, token: usize) -> usize {
        match &self.keys {
            None => self.rows.n_visible(token),
            Some(keys) => keys.row(token).len(),
        }
    }

    fn check(&self, shape: &MlaShape, n_out: usize) {
        let n_rows = self.rows.n_tokens() * shape.n_heads;
        assert_eq!(self.q_lat.len(), n_rows * shape.kv_lora_rank, "q_lat is [T, H, kv_lora_rank]");
        assert_eq!(self.q_pe.len(), n_rows * shape.rope_dim, "q_pe is [T, H, rope_dim]");
        assert_eq!(n_out, n_rows * shape.kv_lora_rank, "out is [T, H, kv_lora_rank]");
        self.rows.check();
        if let Some(keys) = &self.keys {
            keys.check(&self.rows);
        }
    }
}

/// `out[t, h] = sum_p softmax_p(scale * (q_lat[t, h] . c_p + q_pe[t, h] . k_pe_p)) c_p`.
///
/// `out` is `[n_tokens, n_heads, kv_lora_rank]`. Softmax and sums are f32, over the keys of a token
/// in their order: all visible ones, or those selected, which give the same bits where they are
/// all. A token gets the same bits in a prefill chunk, a decode or a verify window.
///
/// # Panics
///
/// If lengths do not match, a selected position is not visible to its token, or a position has no
/// slot in the cache.
pub fn mla_attention(
    shape: &MlaShape,
    cache: LatentCache<'_>,
    batch: &MlaBatch<'_>,
    out: &mut [f32],
) {
    mla_attention_on(Isa::detect(), shape, cache, batch, out);
}

pub(crate) fn mla_attention_on(
    isa: Isa,
    shape: &MlaShape,
    cache: LatentCache<'_>,
    batch: &MlaBatch<'_>,
    out: &mut [f32],
) {
    batch.check(shape, out.len());
    let width = shape.kv_lora_rank + shape.rope_dim;
    assert!(shape.kv_lora_rank > 0 && shape.n_heads > 0, "the shape is not empty");
    assert!(cache.len().is_multiple_of(width), "the cache is [n_slots, width]");
    let n_tokens = batch.rows.n_tokens();
    let n_keys: usize = (0..n_tokens).map(|token| batch.n_keys(token)).sum();
    let n_macs = n_keys * shape.n_heads * (width + shape.kv_lora_rank);
    let n_threads = n_threads(COST_FACTOR * n_macs);
    let n_rows = n_tokens * shape.n_heads;
    let tiles = plan_tiles(shape.n_heads, (n_rows / n_threads).clamp(1, TILE_ROWS), batch);
    let out = Disjoint::new(out);
    for_each_task(tiles.len(), n_threads, |index| {
        let tile = tiles[index].clone();
        dispatch(isa, tile::Attend { shape, cache, batch, tile, out: &out });
    });
}

/// Query rows of one sequence: the given heads of some successive tokens.
#[derive(Clone, Debug)]
struct RowTile {
    tokens: Range<usize>,
    heads: Range<usize>,
}

/// Cuts the batch into tiles of at most `tile_rows` rows; a row's result does not depend on the
/// tile it is in.
fn plan_tiles(n_heads: usize, tile_rows: usize, batch: &MlaBatch<'_>) -> Vec<RowTile> {
    let heads_per_tile = n_heads.min(tile_rows);
    // Tokens with selections of their own have no keys to share.
    let tokens_per_tile = if batch.keys.is_some() { 1 } else { tile_rows / heads_per_tile };
    let n_tokens = batch.rows.n_tokens();
    let mut tiles = Vec::new();
    let mut first = 0;
    while first < n_tokens {
        let end = first + batch.rows.same_seq(first, tokens_per_tile);
        for head in (0..n_heads).step_by(heads_per_tile) {
            let heads = head..n_heads.min(head + heads_per_tile);
            tiles.push(RowTile { tokens: first..end, heads });
        }
        first = end;
    }
    tiles
}

#[cfg(test)]
mod tests;

//! Paged latent attention with absorbed projections.

use std::ops::Range;

use half::bf16;

use crate::parallel::{Disjoint, for_each_task, n_threads};
use crate::simd::{Isa, dispatch};

mod tile;

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

/// The query tokens of a forward pass and where their keys are.
///
/// Position `p` of sequence `s` is in slot
/// `block_tables[s, p / block_size] * block_size + p % block_size`.
#[derive(Clone, Copy, Debug)]
pub struct MlaBatch<'a> {
    /// Latent queries, `[n_tokens, n_heads, kv_lora_rank]`.
    pub q_lat: &'a [f32],
    /// Rotary queries, `[n_tokens, n_heads, rope_dim]`.
    pub q_pe: &'a [f32],
    /// The sequence of each token, `[n_tokens]`.
    pub token_to_seq: &'a [i32],
    /// The position of each token, `[n_tokens]`; it sees the keys `0..=position`.
    pub positions: &'a [i32],
    /// `[n_seqs, max_blocks]`; entries behind the visible keys are not read.
    pub block_tables: &'a [i32],
    /// Width of the block table.
    pub max_blocks: usize,
    /// Slots of a block.
    pub block_size: usize,
}

impl MlaBatch<'_> {
    fn n_visible(&self, token: usize) -> usize {
        self.positions[token] as usize + 1
    }

    /// The slot of a visible position of a token's sequence, and how many slots of its block
    /// follow, itself included.
    fn slot_run(&self, token: usize, position: usize) -> (usize, usize) {
        let row = self.token_to_seq[token] as usize * self.max_blocks;
        let block = self.block_tables[row + position / self.block_size];
        assert!(block >= 0, "a visible position has a block");
        let offset = position % self.block_size;
        (block as usize * self.block_size + offset, self.block_size - offset)
    }

    fn check(&self, shape: &MlaShape, n_out: usize) {
        let n_tokens = self.positions.len();
        let n_rows = n_tokens * shape.n_heads;
        assert_eq!(self.q_lat.len(), n_rows * shape.kv_lora_rank, "q_lat is [T, H, kv_lora_rank]");
        assert_eq!(self.q_pe.len(), n_rows * shape.rope_dim, "q_pe is [T, H, rope_dim]");
        assert_eq!(n_out, n_rows * shape.kv_lora_rank, "out is [T, H, kv_lora_rank]");
        assert_eq!(self.token_to_seq.len(), n_tokens, "token_to_seq is [T]");
        assert!(self.block_size > 0 && self.max_blocks > 0, "blocks and tables are not empty");
        assert!(
            self.block_tables.len().is_multiple_of(self.max_blocks),
            "block_tables is [n_seqs, max_blocks]"
        );
        let n_seqs = self.block_tables.len() / self.max_blocks;
        let capacity = self.max_blocks * self.block_size;
        for (&seq, &position) in self.token_to_seq.iter().zip(self.positions) {
            assert!(seq >= 0 && (seq as usize) < n_seqs, "a token's sequence has a block table");
            assert!(
                position >= 0 && (position as usize) < capacity,
                "a position has a table entry"
            );
        }
    }
}

/// `out[t, h] = sum_p softmax_p(scale * (q_lat[t, h] . c_p + q_pe[t, h] . k_pe_p)) c_p`.
///
/// `out` is `[n_tokens, n_heads, kv_lora_rank]`. Softmax and sums are f32, over the visible keys in
/// ascending blocks. A token gets the same bits in a prefill chunk, a decode or a verify window.
///
/// # Panics
///
/// If lengths do not match, or a visible position has no slot in the cache.
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
    let n_visible: usize = (0..batch.positions.len()).map(|token| batch.n_visible(token)).sum();
    let n_macs = n_visible * shape.n_heads * (width + shape.kv_lora_rank);
    let n_threads = n_threads(COST_FACTOR * n_macs);
    let n_rows = batch.positions.len() * shape.n_heads;
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
    let tokens_per_tile = tile_rows / heads_per_tile;
    let n_tokens = batch.positions.len();
    let mut tiles = Vec::new();
    let mut first = 0;
    while first < n_tokens {
        let seq = batch.token_to_seq[first];
        let same_seq = batch.token_to_seq[first..].iter().take_while(|&&other| other == seq);
        let end = first + same_seq.take(tokens_per_tile).count();
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

//! Paged attention: what latent and grouped-query attention have in common.

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

/// The rows of one layer's cache, one for each slot.
#[derive(Clone, Copy, Debug)]
pub enum CacheRows<'a> {
    /// Rows in f32.
    F32(&'a [f32]),
    /// Rows in bf16.
    Bf16(&'a [bf16]),
}

impl CacheRows<'_> {
    fn len(&self) -> usize {
        match self {
            Self::F32(rows) => rows.len(),
            Self::Bf16(rows) => rows.len(),
        }
    }
}

/// Sizes of an attention whose cache is `[n_slots, n_kv_heads, head_width]`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    /// Query heads. Equally many successive ones share a head of the cache.
    pub(crate) n_heads: usize,
    pub(crate) n_kv_heads: usize,
    /// Width of a key, which is the start of a head's part of a row.
    pub(crate) key: usize,
    /// Width of a value.
    pub(crate) value: usize,
    /// Where values are.
    pub(crate) values: Values,
    /// Factor of the scores.
    pub(crate) scale: f32,
}

/// Where the value of a key is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Values {
    /// At the start of the key itself.
    InKeys,
    /// Behind the key.
    BehindKeys,
}

impl Shape {
    fn head_width(&self) -> usize {
        match self.values {
            Values::InKeys => self.key,
            Values::BehindKeys => self.key + self.value,
        }
    }

    fn row_width(&self) -> usize {
        self.n_kv_heads * self.head_width()
    }

    /// Query heads that share a head of the cache.
    fn group_size(&self) -> usize {
        self.n_heads / self.n_kv_heads
    }
}

/// The queries of a forward pass and the keys that they attend to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Batch<'a> {
    /// The two parts of a query, `[n_tokens, n_heads, width]` each, with their widths.
    pub(crate) queries: [(&'a [f32], usize); 2],
    /// The tokens and where their keys are.
    pub(crate) rows: PagedRows<'a>,
    /// The keys to attend to; all visible ones where it is `None`.
    pub(crate) keys: Option<SelectedKeys<'a>>,
}

impl Batch<'_> {
    /// Keys that a token attends to.
    fn n_keys(&self, token: usize) -> usize {
        match &self.keys {
            None => self.rows.n_visible(token),
            Some(keys) => keys.row(token).len(),
        }
    }

    fn check(&self, shape: &Shape, n_out: usize) {
        let n_rows = self.rows.n_tokens() * shape.n_heads;
        for (query, width) in self.queries {
            assert_eq!(query.len(), n_rows * width, "a part of the queries is [T, H, width]");
        }
        let width: usize = self.queries.iter().map(|(_, width)| width).sum();
        assert_eq!(width, shape.key, "a query is as wide as a key");
        assert_eq!(n_out, n_rows * shape.value, "out is [T, H, value]");
        self.rows.check();
        if let Some(keys) = &self.keys {
            keys.check(&self.rows);
        }
    }
}

/// `out[t, h] = sum_p softmax_p(scale * (q[t, h] . key_p)) value_p`, `[n_tokens, n_heads, value]`.
///
/// Softmax and sums are f32, over the keys of a token in their order. A token gets the same bits
/// in a prefill chunk, a decode or a verify window.
pub(crate) fn attend(
    isa: Isa,
    shape: &Shape,
    cache: CacheRows<'_>,
    batch: &Batch<'_>,
    out: &mut [f32],
) {
    assert!(shape.value > 0 && shape.n_kv_heads > 0, "the shape is not empty");
    assert!(shape.n_heads.is_multiple_of(shape.n_kv_heads), "groups of heads are equally large");
    batch.check(shape, out.len());
    assert!(cache.len().is_multiple_of(shape.row_width()), "the cache is [n_slots, width]");
    let n_tokens = batch.rows.n_tokens();
    let n_keys: usize = (0..n_tokens).map(|token| batch.n_keys(token)).sum();
    let n_macs = n_keys * shape.n_heads * (shape.key + shape.value);
    let n_threads = n_threads(COST_FACTOR * n_macs);
    let n_rows = n_tokens * shape.n_heads;
    let tiles = plan_tiles(shape, (n_rows / n_threads).clamp(1, TILE_ROWS), batch);
    let out = Disjoint::new(out);
    for_each_task(tiles.len(), n_threads, |index| {
        let tile = tiles[index].clone();
        dispatch(isa, tile::Attend { shape, cache, batch, tile, out: &out });
    });
}

/// Query rows of one sequence that share a head of the cache: the given heads of some successive
/// tokens.
#[derive(Clone, Debug)]
struct RowTile {
    tokens: Range<usize>,
    heads: Range<usize>,
}

/// Cuts the batch into tiles of at most `tile_rows` rows; a row's result does not depend on the
/// tile it is in.
fn plan_tiles(shape: &Shape, tile_rows: usize, batch: &Batch<'_>) -> Vec<RowTile> {
    let heads_per_tile = shape.group_size().min(tile_rows);
    // Tokens with selections of their own have no keys to share.
    let tokens_per_tile = if batch.keys.is_some() { 1 } else { tile_rows / heads_per_tile };
    let n_tokens = batch.rows.n_tokens();
    let mut tiles = Vec::new();
    let mut first = 0;
    while first < n_tokens {
        let end = first + batch.rows.same_seq(first, tokens_per_tile);
        for group in (0..shape.n_heads).step_by(shape.group_size()) {
            let group = group..group + shape.group_size();
            for head in group.clone().step_by(heads_per_tile) {
                let heads = head..group.end.min(head + heads_per_tile);
                tiles.push(RowTile { tokens: first..end, heads });
            }
        }
        first = end;
    }
    tiles
}

//! The lightning indexer: which keys are worth attending to.

use std::ops::Range;

use half::bf16;

use crate::fp8::FP8_SCALE_BYTES;
use crate::paged::PagedRows;
use crate::parallel::{Disjoint, for_each_task, n_threads};
use crate::simd::{Isa, dispatch};

mod score;
mod select;

/// Scores that are in memory at once, unless one row has more: 16 MiB.
const MAX_SCORES: usize = 1 << 22;
/// The most query rows (a token and a head each) that share a transposed group of keys.
const TILE_ROWS: usize = 64;
/// Keys of a scoring task, a multiple of the keys that are transposed together.
const TASK_KEYS: usize = 1024;
/// What choosing among a score costs, in multiply-adds of a long product.
const SELECT_COST: usize = 64;

/// Sizes of a lightning indexer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct IndexShape {
    /// Index heads.
    pub n_heads: usize,
    /// Width of an index head and of an index key, which all heads share.
    pub head_dim: usize,
    /// The most keys that are selected for a row.
    pub topk: usize,
    /// Factor of the dot products, `head_dim^-0.5`.
    pub scale: f32,
}

/// The index keys of one layer.
#[derive(Clone, Copy, Debug)]
pub enum IndexCache<'a> {
    /// Keys in f32, `[n_slots, head_dim]`.
    F32(&'a [f32]),
    /// Keys in bf16, `[n_slots, head_dim]`.
    Bf16(&'a [bf16]),
    /// Keys as [`crate::store_fp8_key`] writes them, `[n_slots, head_dim + 4]`.
    Fp8(&'a [u8]),
}

impl IndexCache<'_> {
    fn is_made_of_keys(&self, head_dim: usize) -> bool {
        match self {
            Self::F32(keys) => keys.len().is_multiple_of(head_dim),
            Self::Bf16(keys) => keys.len().is_multiple_of(head_dim),
            Self::Fp8(keys) => keys.len().is_multiple_of(head_dim + FP8_SCALE_BYTES),
        }
    }
}

/// The queries of a forward pass.
#[derive(Clone, Copy, Debug)]
pub struct IndexBatch<'a> {
    /// Rotated queries, `[n_tokens, n_heads, head_dim]`.
    pub q: &'a [f32],
    /// Weights of the heads, `[n_tokens, n_heads]`, already times `n_heads^-0.5`.
    pub weights: &'a [f32],
    /// The tokens and where their keys are.
    pub rows: PagedRows<'a>,
}

/// Selects the keys that each token should attend to, and returns how many keys were scored.
///
/// `score(t, s) = sum_h weights[t, h] * max(0, scale * (q[t, h] . k_s))` for the visible keys `s`,
/// in f32: dimensions in ascending order, then heads, then the scale of an fp8 key. `indices`
/// `[n_tokens, topk]` receives the positions of the `topk` highest scores of a token in ascending
/// order, and -1 behind them; `counts` `[n_tokens]` how many there are. Of equal scores the lower
/// position wins; a NaN loses against every number. A token that sees at most `topk` keys gets all
/// of them without scoring.
///
/// # Panics
///
/// If lengths do not match, or a scored position has no slot in the cache.
pub fn lightning_index(
    shape: &IndexShape,
    cache: IndexCache<'_>,
    batch: &IndexBatch<'_>,
    indices: &mut [i32],
    counts: &mut [i32],
) -> u64 {
    lightning_index_on(Isa::detect(), (shape, cache, batch), indices, counts)
}

pub(crate) fn lightning_index_on(
    isa: Isa,
    (shape, cache, batch): (&IndexShape, IndexCache<'_>, &IndexBatch<'_>),
    indices: &mut [i32],
    counts: &mut [i32],
) -> u64 {
    check(shape, cache, batch, (indices.len(), counts.len()));
    let mut long_rows = Vec::new();
    for (token, row) in indices.chunks_exact_mut(shape.topk).enumerate() {
        let n_visible = batch.rows.n_visible(token);
        counts[token] = n_visible.min(shape.topk) as i32;
        if n_visible > shape.topk {
            long_rows.push(token);
        } else {
            select::all(n_visible, row);
        }
    }
    let call = Call { isa, shape, cache, batch };
    let mut rest = &long_rows[..];
    while !rest.is_empty() {
        let n_tokens = call.n_tokens_at_once(rest);
        call.select(&rest[..n_tokens], indices);
        rest = &rest[n_tokens..];
    }
    long_rows.iter().map(|&token| batch.rows.n_visible(token) as u64).sum()
}

fn check(
    shape: &IndexShape,
    cache: IndexCache<'_>,
    batch: &IndexBatch<'_>,
    (n_indices, n_counts): (usize, usize),
) {
    let IndexShape { n_heads, head_dim, topk, .. } = *shape;
    let n_tokens = batch.rows.n_tokens();
    assert!(n_heads > 0 && head_dim > 0 && topk > 0, "the shape is not empty");
    assert!(cache.is_made_of_keys(head_dim), "the cache is [n_slots, width]");
    assert_eq!(batch.q.len(), n_tokens * n_heads * head_dim, "q is [T, H, head_dim]");
    assert_eq!(batch.weights.len(), n_tokens * n_heads, "weights is [T, H]");
    assert_eq!(n_indices, n_tokens * topk, "indices is [T, topk]");
    assert_eq!(n_counts, n_tokens, "counts is [T]");
    batch.rows.check();
}

struct Call<'a> {
    isa: Isa,
    shape: &'a IndexShape,
    cache: IndexCache<'a>,
    batch: &'a IndexBatch<'a>,
}

impl Call<'_> {
    /// How many of the first tokens have scores that fit in memory together; at least one.
    fn n_tokens_at_once(&self, tokens: &[usize]) -> usize {
        let mut n_scores = 0;
        let fitting = tokens.iter().take_while(|&&token| {
            n_scores += self.batch.rows.n_visible(token);
            n_scores <= MAX_SCORES
        });
        fitting.count().max(1)
    }

    /// Scores the keys of some tokens and selects the best of them.
    fn select(&self, tokens: &[usize], indices: &mut [i32]) {
        let IndexShape { n_heads, head_dim, topk, .. } = *self.shape;
        let mut n_scores = 0;
        let mut rows = Vec::with_capacity(tokens.len());
        for &token in tokens {
            let start = n_scores;
            n_scores += self.batch.rows.n_visible(token);
            rows.push(ScoreRow { token, scores: start..n_scores });
        }
        let tasks = self.plan_tasks(&rows);
        let n_threads = n_threads(n_scores * (n_heads * head_dim + SELECT_COST));
        let mut scores = vec![0.0; n_scores];
        let out = Disjoint::new(&mut scores);
        for_each_task(tasks.len(), n_threads, |index| {
            let ScoreTask { rows, keys } = tasks[index].clone();
            dispatch(self.isa, score::Score { call: self, rows, keys, out: &out });
        });
        let indices = Disjoint::new(indices);
        for_each_task(rows.len(), n_threads, |index| {
            let row = &rows[index];
            // SAFETY: a row of the indices belongs to one token, hence to one task.
            let indices = unsafe { indices.slice(row.token * topk, topk) };
            let scores = &scores[row.scores.clone()];
            dispatch(self.isa, select::Best { scores, indices });
        });
    }

    /// Cuts the scores into tasks; a score does not depend on the task it is in.
    fn plan_tasks<'r>(&self, rows: &'r [ScoreRow]) -> Vec<ScoreTask<'r>> {
        let tokens_per_tile = (TILE_ROWS / self.shape.n_heads).max(1);
        let mut tasks = Vec::new();
        let mut rest = rows;
        while let Some(first) = rest.first() {
            // Rows of successive tokens have their queries side by side.
            let n_same_seq = self.batch.rows.same_seq(first.token, tokens_per_tile);
            let successive = (first.token..first.token + n_same_seq).zip(rest);
            let n_rows = successive.take_while(|(token, row)| row.token == *token).count();
            let (rows, others) = rest.split_at(n_rows);
            rest = others;
            // Tokens are not sorted by position when a caller interleaves them.
            let n_keys = rows.iter().map(|row| row.scores.len()).max().unwrap_or(0);
            for start in (0..n_keys).step_by(TASK_KEYS) {
                tasks.push(ScoreTask { rows, keys: start..n_keys.min(start + TASK_KEYS) });
            }
        }
        tasks
    }
}

/// A token and the place of its scores, one per visible key.
#[derive(Debug)]
struct ScoreRow {
    token: usize,
    scores: Range<usize>,
}

/// Some successive tokens of one sequence, and a range of its keys.
#[derive(Clone, Debug)]
struct ScoreTask<'a> {
    rows: &'a [ScoreRow],
    keys: Range<usize>,
}

#[cfg(test)]
mod tests;

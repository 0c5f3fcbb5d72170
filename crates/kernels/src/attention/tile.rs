//! Attention of one tile of query rows.

use half::bf16;

use super::{Batch, CacheRows, RowTile, Shape, Values};
use crate::exp::exp;
use crate::parallel::Disjoint;
use crate::simd::{F32x16, Kernel, LANES, Lanes, widen_bf16};

/// Keys of a block: the unit of the running softmax.
const KEYS: usize = 64;
/// Groups of sixteen keys in a block.
const GROUPS: usize = KEYS / LANES;
/// Rows that share a loaded value vector.
const SHARED_ROWS: usize = 4;

pub(super) struct Attend<'a> {
    pub(super) shape: &'a Shape,
    pub(super) cache: CacheRows<'a>,
    pub(super) batch: &'a Batch<'a>,
    pub(super) tile: RowTile,
    /// The whole output; this tile owns its rows of it.
    pub(super) out: &'a Disjoint<'a, f32>,
}

/// One vector of each of sixteen keys.
type KeyLanes = [Lanes; LANES];

/// The running softmax of one query row.
struct RowState {
    token: usize,
    head: usize,
    n_keys: usize,
    /// Keys of the current block.
    n_block_keys: usize,
    max: f32,
    /// Sums of the weights, one per lane.
    total: Lanes,
    /// Weights of the current block.
    weights: [Lanes; GROUPS],
}

impl Kernel for Attend<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: F32x16>(self) {
        let n_query = self.shape.key.div_ceil(LANES);
        let n_values = self.shape.value.div_ceil(LANES);
        // A key and its value begin with a vector each, or share theirs.
        let (first_value, n_vectors) = match self.shape.values {
            Values::InKeys => (0, n_query),
            Values::BehindKeys => (n_query, n_query + n_values),
        };
        let mut rows = self.rows();
        let queries = self.load_queries(n_query);
        // A block of keys in f32: `[GROUPS, n_vectors]`, padded with zeros.
        let mut keys = vec![[Lanes::ZERO; LANES]; GROUPS * n_vectors];
        let mut sums = vec![Lanes::ZERO; rows.len() * n_values];
        // Tokens are not sorted by position when a caller interleaves them.
        let n_keys = rows.iter().map(|row| row.n_keys).max().unwrap_or(0);
        for first_key in (0..n_keys).step_by(KEYS) {
            self.gather::<V>(first_key, (n_keys - first_key).min(KEYS), &mut keys);
            for row in &mut rows {
                row.n_block_keys = row.n_keys.saturating_sub(first_key).min(KEYS);
            }
            // A group of keys stays in the first cache while all rows use it.
            for (group, keys) in keys.chunks_exact(n_vectors).enumerate() {
                for (row, query) in rows.iter_mut().zip(queries.chunks_exact(n_query)) {
                    row.score::<V>(group, query, keys, self.shape.scale);
                }
            }
            for (row, sums) in rows.iter_mut().zip(sums.chunks_exact_mut(n_values)) {
                row.weigh::<V>(sums);
            }
            for (group, keys) in keys.chunks_exact(n_vectors).enumerate() {
                let shared = rows.chunks(SHARED_ROWS);
                for (rows, sums) in shared.zip(sums.chunks_mut(SHARED_ROWS * n_values)) {
                    accumulate_shared::<V>(rows, group, &keys[first_value..][..n_values], sums);
                }
            }
        }
        for (row, sums) in rows.iter().zip(sums.chunks_exact_mut(n_values)) {
            self.finish::<V>(row, sums);
        }
    }
}

impl Attend<'_> {
    fn rows(&self) -> Vec<RowState> {
        let tokens = self.tile.tokens.clone();
        let rows = tokens.flat_map(|token| self.tile.heads.clone().map(move |head| (token, head)));
        rows.map(|(token, head)| RowState {
            token,
            head,
            n_keys: self.batch.n_keys(token),
            n_block_keys: 0,
            max: f32::NEG_INFINITY,
            total: Lanes::ZERO,
            weights: [Lanes::ZERO; GROUPS],
        })
        .collect()
    }

    /// The parts of the queries side by side, `[n_rows, n_vectors]`, padded with zeros.
    fn load_queries(&self, n_vectors: usize) -> Vec<Lanes> {
        let n_rows = self.tile.tokens.len() * self.tile.heads.len();
        let mut queries = vec![Lanes::ZERO; n_rows * n_vectors];
        let mut rows = queries.chunks_exact_mut(n_vectors);
        for token in self.tile.tokens.clone() {
            for head in self.tile.heads.clone() {
                let query = Lanes::flatten_mut(rows.next().expect("one query per row"));
                let index = token * self.shape.n_heads + head;
                let [(first, n_first), (second, n_second)] = self.batch.queries;
                query[..n_first].copy_from_slice(&first[index * n_first..][..n_first]);
                query[n_first..][..n_second]
                    .copy_from_slice(&second[index * n_second..][..n_second]);
            }
        }
        queries
    }

    /// Copies the next `n_keys` keys, and their values where these are behind them, from the cache.
    #[inline(always)]
    fn gather<V: F32x16>(&self, first_key: usize, n_keys: usize, keys: &mut [KeyLanes]) {
        let (row_width, head_width) = (self.shape.row_width(), self.shape.head_width());
        let first = self.tile.heads.start / self.shape.group_size() * head_width;
        let (n_vectors, n_query) = (keys.len() / GROUPS, self.shape.key.div_ceil(LANES));
        let mut key = 0;
        while key < n_keys {
            let (slot, n_run) = self.slot_run(first_key + key);
            let end = n_keys.min(key + n_run);
            for (slot, key) in (slot..).zip(key..end) {
                let group = &mut keys[key / LANES * n_vectors..][..n_vectors];
                let lane = key % LANES;
                let start = slot * row_width + first;
                let row = start..start + head_width;
                let (keys, values) = group.split_at_mut(n_query);
                match self.cache {
                    CacheRows::F32(rows) => {
                        let (key, value) = rows[row].split_at(self.shape.key);
                        copy_f32::<V>(key, keys, lane);
                        copy_f32::<V>(value, values, lane);
                    }
                    CacheRows::Bf16(rows) => {
                        let (key, value) = rows[row].split_at(self.shape.key);
                        copy_bf16(key, keys, lane);
                        copy_bf16(value, values, lane);
                    }
                }
            }
            key = end;
        }
    }

    /// The slot of a key of this tile, and how many slots with its next keys follow, itself
    /// included.
    #[inline(always)]
    fn slot_run(&self, key: usize) -> (usize, usize) {
        let Batch { rows, keys, .. } = self.batch;
        let token = self.tile.tokens.start;
        match keys {
            None => rows.slot_run(token, key),
            Some(keys) => (rows.slot_run(token, keys.row(token)[key] as usize).0, 1),
        }
    }

    #[inline(always)]
    fn finish<V: F32x16>(&self, row: &RowState, sums: &mut [Lanes]) {
        let n = self.shape.value;
        let index = row.token * self.shape.n_heads + row.head;
        // SAFETY: a row of the output belongs to one (token, head), hence to one tile, and a tile
        // stores it once.
        let out = unsafe { self.out.slice(index * n, n) };
        if row.n_keys == 0 {
            out.fill(0.0);
            return;
        }
        let total = V::splat(V::load(&row.total.0).sum());
        for (sum, out) in sums.iter_mut().zip(out.chunks_mut(LANES)) {
            V::load(&sum.0).div(total).store(&mut sum.0);
            out.copy_from_slice(&sum.0[..out.len()]);
        }
    }
}

/// Copies a cache row into its place in a group; the padding stays zero.
#[inline(always)]
fn copy_f32<V: F32x16>(row: &[f32], group: &mut [KeyLanes], key: usize) {
    let (chunks, tail) = row.as_chunks::<LANES>();
    for (chunk, keys) in chunks.iter().zip(group.iter_mut()) {
        V::load(chunk).store(&mut keys[key].0);
    }
    if let Some(last) = group.get_mut(chunks.len()) {
        last[key].0[..tail.len()].copy_from_slice(tail);
    }
}

/// Widens a cache row into its place in a group; the padding stays zero.
#[inline(always)]
fn copy_bf16(row: &[bf16], group: &mut [KeyLanes], key: usize) {
    let (chunks, tail) = row.as_chunks::<LANES>();
    for (chunk, keys) in chunks.iter().zip(group.iter_mut()) {
        keys[key].0 = chunk.map(widen_bf16);
    }
    if let Some(last) = group.get_mut(chunks.len()) {
        for (dst, &src) in last[key].0.iter_mut().zip(tail) {
            *dst = widen_bf16(src);
        }
    }
}

impl RowState {
    /// Keys in a group of the current block.
    #[inline(always)]
    fn n_keys_of(&self, group: usize) -> usize {
        self.n_block_keys.saturating_sub(group * LANES).min(LANES)
    }

    /// Puts the scores of a group in the place of its weights.
    #[inline(always)]
    fn score<V: F32x16>(&mut self, group: usize, query: &[Lanes], keys: &[KeyLanes], scale: f32) {
        let n_keys = self.n_keys_of(group);
        if n_keys > 0 {
            let weights = &mut self.weights[group].0;
            scores::<V>(query, keys).mul(V::splat(scale)).store(weights);
            weights[n_keys..].fill(f32::NEG_INFINITY);
        }
    }

    /// Turns the scores of the current block into weights and rescales what was summed before.
    #[inline(always)]
    fn weigh<V: F32x16>(&mut self, sums: &mut [Lanes]) {
        let weights = &mut self.weights[..self.n_block_keys.div_ceil(LANES)];
        if weights.is_empty() {
            return;
        }
        let mut max = V::splat(self.max);
        for weights in weights.iter() {
            max = max.max(V::load(&weights.0));
        }
        let max = max.max_lane();
        let rescale = exp(V::splat(self.max - max));
        self.max = max;
        for sum in sums {
            V::load(&sum.0).mul(rescale).store(&mut sum.0);
        }
        let mut total = V::load(&self.total.0).mul(rescale);
        for weights in weights {
            let weight = exp(V::load(&weights.0).sub(V::splat(max)));
            weight.store(&mut weights.0);
            total = total.add(weight);
        }
        total.store(&mut self.total.0);
    }
}

/// The dot products of a query with sixteen keys, one per lane.
#[inline(always)]
fn scores<V: F32x16>(query: &[Lanes], keys: &[KeyLanes]) -> V {
    let mut sums = [V::splat(0.0); LANES];
    for (query, keys) in query.iter().zip(keys) {
        let query = V::load(&query.0);
        for (key, sum) in keys.iter().zip(&mut sums) {
            *sum = query.mul_add(V::load(&key.0), *sum);
        }
    }
    V::sum_each(sums)
}

/// Adds the weighted values of a group to up to four rows.
#[inline(always)]
fn accumulate_shared<V: F32x16>(
    rows: &[RowState],
    group: usize,
    values: &[KeyLanes],
    sums: &mut [Lanes],
) {
    match rows.first_chunk::<SHARED_ROWS>() {
        Some(rows) if rows.iter().all(|row| row.n_block_keys == rows[0].n_block_keys) => {
            accumulate::<V, SHARED_ROWS>(rows, group, values, sums);
        }
        _ => {
            for (row, sums) in rows.iter().zip(sums.chunks_exact_mut(values.len())) {
                accumulate::<V, 1>(std::array::from_ref(row), group, values, sums);
            }
        }
    }
}

/// Adds weight times value, key by key, to `R` rows with equally many keys.
#[inline(always)]
fn accumulate<V: F32x16, const R: usize>(
    rows: &[RowState; R],
    group: usize,
    values: &[KeyLanes],
    sums: &mut [Lanes],
) {
    let n_keys = rows[0].n_keys_of(group);
    let weights = rows.each_ref().map(|row| &row.weights[group].0[..n_keys]);
    let (pairs, last) = values.as_chunks::<2>();
    for (pair, values) in pairs.iter().enumerate() {
        accumulate_columns::<V, R, 2>(weights, values, (sums, 2 * pair));
    }
    if let [values] = last {
        let first = 2 * pairs.len();
        accumulate_columns::<V, R, 1>(weights, std::array::from_ref(values), (sums, first));
    }
}

#[inline(always)]
fn accumulate_columns<V: F32x16, const R: usize, const C: usize>(
    weights: [&[f32]; R],
    values: &[KeyLanes; C],
    (sums, first): (&mut [Lanes], usize),
) {
    let n_values = sums.len() / R;
    let mut totals = [[V::splat(0.0); C]; R];
    for (r, totals) in totals.iter_mut().enumerate() {
        for (c, total) in totals.iter_mut().enumerate() {
            *total = V::load(&sums[r * n_values + first + c].0);
        }
    }
    for key in 0..weights[0].len().min(LANES) {
        for (weights, totals) in weights.iter().zip(&mut totals) {
            let weight = V::splat(weights[key]);
            for (values, total) in values.iter().zip(totals) {
                *total = weight.mul_add(V::load(&values[key].0), *total);
            }
        }
    }
    for (r, totals) in totals.into_iter().enumerate() {
        for (c, total) in totals.into_iter().enumerate() {
            total.store(&mut sums[r * n_values + first + c].0);
        }
    }
}

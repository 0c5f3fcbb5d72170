//! Attention of one tile of query rows.

use super::{LatentCache, MlaBatch, MlaShape, RowTile};
use crate::exp::exp;
use crate::parallel::Disjoint;
use crate::simd::{F32x16, Kernel, LANES};

/// Keys of a block: the unit of the running softmax.
const KEYS: usize = 64;
/// Rows that share a loaded value vector.
const SHARED_ROWS: usize = 4;

pub(super) struct Attend<'a> {
    pub(super) shape: &'a MlaShape,
    pub(super) cache: LatentCache<'a>,
    pub(super) batch: &'a MlaBatch<'a>,
    pub(super) tile: RowTile,
    /// The whole output; this tile owns its rows of it.
    pub(super) out: &'a Disjoint<'a>,
}

type Lanes = [f32; LANES];

/// The running softmax of one query row.
struct RowState {
    token: usize,
    head: usize,
    n_visible: usize,
    /// Visible keys of the current block.
    n_keys: usize,
    max: f32,
    /// Sums of the weights, one per lane.
    sums: Lanes,
    /// Weights of the current block.
    weights: [Lanes; KEYS / LANES],
}

impl Kernel for Attend<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: F32x16>(self) {
        let n_vectors = (self.shape.kv_lora_rank + self.shape.rope_dim).div_ceil(LANES);
        let n_values = self.shape.kv_lora_rank.div_ceil(LANES);
        let mut rows = self.rows();
        let queries = self.load_queries(n_vectors);
        let mut keys = vec![[0.0; LANES]; KEYS * n_vectors];
        let mut sums = vec![[0.0; LANES]; rows.len() * n_values];
        // Tokens are not sorted by position when a caller interleaves them.
        let n_visible = rows.iter().map(|row| row.n_visible).max().unwrap_or(0);
        for first_key in (0..n_visible).step_by(KEYS) {
            let n_keys = (n_visible - first_key).min(KEYS);
            self.gather(first_key, n_keys, &mut keys, n_vectors);
            let row_queries = queries.chunks_exact(n_vectors);
            for ((row, query), sums) in
                rows.iter_mut().zip(row_queries).zip(sums.chunks_exact_mut(n_values))
            {
                row.n_keys = row.n_visible.saturating_sub(first_key).min(KEYS);
                if row.n_keys > 0 {
                    row.weigh::<V>(query, &keys, self.shape.scale, sums);
                }
            }
            let groups = rows.chunks(SHARED_ROWS).zip(sums.chunks_mut(SHARED_ROWS * n_values));
            for (rows, sums) in groups {
                accumulate_group::<V>(rows, &keys, n_vectors, sums);
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
            n_visible: self.batch.n_visible(token),
            n_keys: 0,
            max: f32::NEG_INFINITY,
            sums: [0.0; LANES],
            weights: [[0.0; LANES]; KEYS / LANES],
        })
        .collect()
    }

    /// Latent and rotary queries side by side, padded with zeros to `n_vectors`.
    fn load_queries(&self, n_vectors: usize) -> Vec<Lanes> {
        let (kv_lora_rank, rope_dim) = (self.shape.kv_lora_rank, self.shape.rope_dim);
        let n_rows = self.tile.tokens.len() * self.tile.heads.len();
        let mut queries = vec![[0.0; LANES]; n_rows * n_vectors];
        let mut rows = queries.chunks_exact_mut(n_vectors);
        for token in self.tile.tokens.clone() {
            for head in self.tile.heads.clone() {
                let query = rows.next().expect("one query per row").as_flattened_mut();
                let index = token * self.shape.n_heads + head;
                let (latent, rotary) = query.split_at_mut(kv_lora_rank);
                latent.copy_from_slice(&self.batch.q_lat[index * kv_lora_rank..][..kv_lora_rank]);
                rotary[..rope_dim]
                    .copy_from_slice(&self.batch.q_pe[index * rope_dim..][..rope_dim]);
            }
        }
        queries
    }

    /// Copies `n_keys` cache rows; the padding behind a row stays zero.
    #[inline(always)]
    fn gather(&self, first_key: usize, n_keys: usize, keys: &mut [Lanes], n_vectors: usize) {
        let width = self.shape.kv_lora_rank + self.shape.rope_dim;
        let token = self.tile.tokens.start;
        for (key, dst) in keys.chunks_exact_mut(n_vectors).take(n_keys).enumerate() {
            let start = self.batch.slot(token, first_key + key) * width;
            let dst = &mut dst.as_flattened_mut()[..width];
            match self.cache {
                LatentCache::F32(rows) => dst.copy_from_slice(&rows[start..start + width]),
                LatentCache::Bf16(rows) => {
                    for (dst, src) in dst.iter_mut().zip(&rows[start..start + width]) {
                        *dst = f32::from_bits(u32::from(src.to_bits()) << 16);
                    }
                }
            }
        }
    }

    #[inline(always)]
    fn finish<V: F32x16>(&self, row: &RowState, sums: &mut [Lanes]) {
        let n = self.shape.kv_lora_rank;
        let total = V::splat(V::load(&row.sums).sum());
        for sum in sums.iter_mut() {
            V::load(sum).div(total).store(sum);
        }
        let index = row.token * self.shape.n_heads + row.head;
        // SAFETY: a row of the output belongs to one (token, head), hence to one tile, and a tile
        // stores it once.
        let out = unsafe { self.out.slice(index * n, n) };
        out.copy_from_slice(&sums.as_flattened()[..n]);
    }
}

impl RowState {
    /// Turns the scores of the current block into weights and rescales what was summed before.
    #[inline(always)]
    fn weigh<V: F32x16>(
        &mut self,
        query: &[Lanes],
        keys: &[Lanes],
        scale: f32,
        sums: &mut [Lanes],
    ) {
        let n_chunks = self.n_keys.div_ceil(LANES);
        let keys = keys.chunks_exact(LANES * query.len());
        for (weights, keys) in self.weights.iter_mut().zip(keys).take(n_chunks) {
            scores::<V>(query, keys).mul(V::splat(scale)).store(weights);
        }
        let weights = &mut self.weights.as_flattened_mut()[..n_chunks * LANES];
        weights[self.n_keys..].fill(f32::NEG_INFINITY);
        let mut max = V::splat(self.max);
        for weights in self.weights.iter().take(n_chunks) {
            max = max.max(V::load(weights));
        }
        let mut lanes = [0.0; LANES];
        max.store(&mut lanes);
        let max = lanes.into_iter().fold(f32::NEG_INFINITY, f32::max);

        let rescale = exp(V::splat(self.max - max));
        self.max = max;
        for sum in sums {
            V::load(sum).mul(rescale).store(sum);
        }
        let mut total = V::load(&self.sums).mul(rescale);
        for weights in self.weights.iter_mut().take(n_chunks) {
            let weight = exp(V::load(weights).sub(V::splat(max)));
            weight.store(weights);
            total = total.add(weight);
        }
        total.store(&mut self.sums);
    }
}

/// The dot products of a query with sixteen keys, one per lane.
#[inline(always)]
fn scores<V: F32x16>(query: &[Lanes], keys: &[Lanes]) -> V {
    let n_vectors = query.len();
    assert_eq!(keys.len(), LANES * n_vectors, "sixteen keys");
    let mut sums = [V::splat(0.0); LANES];
    for (i, query) in query.iter().enumerate() {
        let query = V::load(query);
        for (key, sum) in sums.iter_mut().enumerate() {
            // SAFETY: key < 16 and i < n_vectors, and `keys` holds 16 * n_vectors vectors.
            let key = unsafe { keys.get_unchecked(key * n_vectors + i) };
            *sum = query.mul_add(V::load(key), *sum);
        }
    }
    V::sum_each(sums)
}

/// Adds the weighted values of the current block to up to four rows.
#[inline(always)]
fn accumulate_group<V: F32x16>(
    rows: &[RowState],
    keys: &[Lanes],
    n_vectors: usize,
    sums: &mut [Lanes],
) {
    let n_values = sums.len() / rows.len();
    match rows.first_chunk::<SHARED_ROWS>() {
        Some(group) if group.iter().all(|row| row.n_keys == group[0].n_keys) => {
            accumulate::<V, SHARED_ROWS>(group, keys, n_vectors, sums);
        }
        _ => {
            for (row, sums) in rows.iter().zip(sums.chunks_exact_mut(n_values)) {
                accumulate::<V, 1>(std::array::from_ref(row), keys, n_vectors, sums);
            }
        }
    }
}

/// Adds weight times value, key by key, to `R` rows with the same number of keys.
#[inline(always)]
fn accumulate<V: F32x16, const R: usize>(
    rows: &[RowState; R],
    keys: &[Lanes],
    n_vectors: usize,
    sums: &mut [Lanes],
) {
    let n_values = sums.len() / R;
    let mut first = 0;
    while first + 2 <= n_values {
        accumulate_columns::<V, R, 2>(rows, keys, n_vectors, (sums, first));
        first += 2;
    }
    if first < n_values {
        accumulate_columns::<V, R, 1>(rows, keys, n_vectors, (sums, first));
    }
}

#[inline(always)]
fn accumulate_columns<V: F32x16, const R: usize, const C: usize>(
    rows: &[RowState; R],
    keys: &[Lanes],
    n_vectors: usize,
    (sums, first): (&mut [Lanes], usize),
) {
    let n_values = sums.len() / R;
    let mut totals = [[V::splat(0.0); C]; R];
    for r in 0..R {
        for c in 0..C {
            totals[r][c] = V::load(&sums[r * n_values + first + c]);
        }
    }
    for (key, values) in keys.chunks_exact(n_vectors).take(rows[0].n_keys).enumerate() {
        let values = &values[first..first + C];
        for r in 0..R {
            let weight = V::splat(rows[r].weights.as_flattened()[key]);
            for c in 0..C {
                totals[r][c] = weight.mul_add(V::load(&values[c]), totals[r][c]);
            }
        }
    }
    for r in 0..R {
        for c in 0..C {
            totals[r][c].store(&mut sums[r * n_values + first + c]);
        }
    }
}

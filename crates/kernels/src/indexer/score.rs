//! Scores of one tile of query rows against a range of keys.

use std::ops::Range;

use half::bf16;
use quantization::E4M3;

use super::{Call, IndexCache, ScoreRow};
use crate::fp8;
use crate::parallel::Disjoint;
use crate::simd::{F32x16, Kernel, LANES, Lanes, store_prefix, widen_bf16};

/// Keys of a panel: two vectors.
const PANEL: usize = 2 * LANES;

pub(super) struct Score<'a> {
    pub(super) call: &'a Call<'a>,
    /// Successive tokens.
    pub(super) rows: &'a [ScoreRow],
    pub(super) keys: Range<usize>,
    /// All scores; this task owns its keys of its rows.
    pub(super) out: &'a Disjoint<'a, f32>,
}

/// Sixteen dimensions of the keys of a panel.
type PanelBlock = [[Lanes; 2]; LANES];

/// Buffers of a panel.
struct Panel {
    /// The keys row by row, `[PANEL, n_vectors]`, padded with zeros.
    rows: Vec<Lanes>,
    /// The keys across lanes, `[n_vectors]`.
    columns: Vec<PanelBlock>,
    /// Scales of the keys.
    scales: [Lanes; 2],
    /// Dot products, `[n_tokens * n_heads]`.
    dots: Vec<[Lanes; 2]>,
}

impl Kernel for Score<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: F32x16>(self) {
        let shape = self.call.shape;
        let n_vectors = shape.head_dim.div_ceil(LANES);
        let mut panel = Panel {
            rows: vec![Lanes::ZERO; PANEL * n_vectors],
            columns: vec![[[Lanes::ZERO; 2]; LANES]; n_vectors],
            scales: [Lanes([1.0; LANES]); 2],
            dots: vec![[Lanes::ZERO; 2]; self.rows.len() * shape.n_heads],
        };
        for first_key in self.keys.clone().step_by(PANEL) {
            let n_keys = (self.keys.end - first_key).min(PANEL);
            self.gather(first_key, n_keys, &mut panel);
            transpose::<V>(&panel.rows, &mut panel.columns);
            self.multiply::<V>(&mut panel);
            for (row, dots) in self.rows.iter().zip(panel.dots.chunks_exact(shape.n_heads)) {
                let n_keys = row.scores.len().saturating_sub(first_key).min(n_keys);
                let start = row.scores.start + first_key;
                self.weigh::<V>(row.token, dots, &panel.scales, start..start + n_keys);
            }
        }
    }
}

impl Score<'_> {
    /// Copies the next `n_keys` cached keys; lanes behind them keep what they had and are not
    /// stored.
    #[inline(always)]
    fn gather(&self, first_key: usize, n_keys: usize, panel: &mut Panel) {
        let dim = self.call.shape.head_dim;
        let n_vectors = panel.columns.len();
        let token = self.rows[0].token;
        let mut key = 0;
        while key < n_keys {
            let (slot, n_run) = self.call.batch.rows.slot_run(token, first_key + key);
            let end = n_keys.min(key + n_run);
            for (slot, key) in (slot..).zip(key..end) {
                let row = Lanes::flatten_mut(&mut panel.rows[key * n_vectors..][..n_vectors]);
                let row = &mut row[..dim];
                match self.call.cache {
                    IndexCache::F32(keys) => row.copy_from_slice(&keys[slot * dim..][..dim]),
                    IndexCache::Bf16(keys) => widen(&keys[slot * dim..][..dim], row),
                    IndexCache::Fp8(keys) => {
                        let stride = dim + fp8::FP8_SCALE_BYTES;
                        let (codes, scale) = fp8::split_key(&keys[slot * stride..][..stride]);
                        for (value, &code) in row.iter_mut().zip(codes) {
                            *value = E4M3[usize::from(code)];
                        }
                        panel.scales[key / LANES].0[key % LANES] = scale;
                    }
                }
            }
            key = end;
        }
    }

    /// The dot products of all query rows with the keys of a panel.
    #[inline(always)]
    fn multiply<V: F32x16>(&self, panel: &mut Panel) {
        let dim = self.call.shape.head_dim;
        let first_row = self.rows[0].token * self.call.shape.n_heads;
        let mut q = &self.call.batch.q[first_row * dim..][..panel.dots.len() * dim];
        let mut dots = &mut panel.dots[..];
        let columns = &panel.columns.as_flattened()[..dim];
        while !dots.is_empty() {
            let n_rows = dots.len().min(if V::WIDE { 8 } else { 3 });
            let (head, tail) = dots.split_at_mut(n_rows);
            match n_rows {
                1 => micro::<V, 1>(q, columns, head),
                2 => micro::<V, 2>(q, columns, head),
                3 => micro::<V, 3>(q, columns, head),
                4 => micro::<V, 4>(q, columns, head),
                5 => micro::<V, 5>(q, columns, head),
                6 => micro::<V, 6>(q, columns, head),
                7 => micro::<V, 7>(q, columns, head),
                _ => micro::<V, 8>(q, columns, head),
            }
            (q, dots) = (&q[n_rows * dim..], tail);
        }
    }

    /// Sums the heads of a token and stores the scores of the keys that it sees.
    #[inline(always)]
    fn weigh<V: F32x16>(
        &self,
        token: usize,
        dots: &[[Lanes; 2]],
        key_scales: &[Lanes; 2],
        stored: Range<usize>,
    ) {
        let shape = self.call.shape;
        let weights = &self.call.batch.weights[token * shape.n_heads..][..shape.n_heads];
        let (zero, scale) = (V::splat(0.0), V::splat(shape.scale));
        let mut sums = [zero; 2];
        for (&weight, dots) in weights.iter().zip(dots) {
            for (sum, dot) in sums.iter_mut().zip(dots) {
                // In this order a NaN passes through.
                let positive = zero.max(V::load(&dot.0).mul(scale));
                *sum = V::splat(weight).mul_add(positive, *sum);
            }
        }
        // SAFETY: a score belongs to one token and one key, hence to one task, and a task stores
        // it once.
        let out = unsafe { self.out.slice(stored.start, stored.len()) };
        for ((sum, scale), out) in sums.into_iter().zip(key_scales).zip(out.chunks_mut(LANES)) {
            store_prefix(sum.mul(V::load(&scale.0)), out);
        }
    }
}

#[inline(always)]
fn widen(src: &[bf16], dst: &mut [f32]) {
    for (dst, &src) in dst.iter_mut().zip(src) {
        *dst = widen_bf16(src);
    }
}

/// Lays the keys of a panel across lanes.
#[inline(always)]
fn transpose<V: F32x16>(rows: &[Lanes], columns: &mut [PanelBlock]) {
    let n_vectors = columns.len();
    for (half, rows) in rows.chunks_exact(LANES * n_vectors).enumerate() {
        for (vector, block) in columns.iter_mut().enumerate() {
            let rows = std::array::from_fn(|key| V::load(&rows[key * n_vectors + vector].0));
            for (column, dst) in V::transpose(rows).into_iter().zip(block) {
                column.store(&mut dst[half].0);
            }
        }
    }
}

/// `R` query rows times the keys of a panel, one dimension after the other.
#[inline(always)]
fn micro<V: F32x16, const R: usize>(q: &[f32], columns: &[[Lanes; 2]], dots: &mut [[Lanes; 2]]) {
    let dim = columns.len();
    let q = &q[..R * dim];
    let mut sums = [[V::splat(0.0); 2]; R];
    for (d, column) in columns.iter().enumerate() {
        let keys = [V::load(&column[0].0), V::load(&column[1].0)];
        for (r, sums) in sums.iter_mut().enumerate() {
            // SAFETY: `q` holds R * dim values, r < R and d < dim.
            let value = V::splat(*unsafe { q.get_unchecked(r * dim + d) });
            sums[0] = value.mul_add(keys[0], sums[0]);
            sums[1] = value.mul_add(keys[1], sums[1]);
        }
    }
    for (sums, dots) in sums.into_iter().zip(dots) {
        sums[0].store(&mut dots[0].0);
        sums[1].store(&mut dots[1].0);
    }
}

//! Root mean square normalisation.

use crate::simd::{F32x16, Isa, Kernel, LANES, dispatch, load_padded, store_prefix};

/// `out[r] = x[r] / sqrt(mean(x[r]^2) + eps) * weight`.
///
/// `x` and `out` are `[n_rows, n]`, `weight` is `[n]`.
///
/// # Panics
///
/// If the lengths do not match.
pub fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    rms_norm_on(Isa::detect(), x, weight, eps, out);
}

/// `residual += x`, then `out = rms_norm(residual)`; all `[n_rows, n]`, `weight` is `[n]`.
///
/// # Panics
///
/// If the lengths do not match.
pub fn add_rms_norm(x: &[f32], residual: &mut [f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    assert_eq!(x.len(), residual.len(), "x and residual have one shape");
    for (sum, value) in residual.iter_mut().zip(x) {
        *sum += value;
    }
    rms_norm(residual, weight, eps, out);
}

pub(crate) fn rms_norm_on(isa: Isa, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    assert_eq!(x.len(), out.len(), "x and out have one shape");
    assert!(!weight.is_empty() && x.len().is_multiple_of(weight.len()), "x is [n_rows, n]");
    dispatch(isa, RmsNorm { x, weight, eps, out });
}

struct RmsNorm<'a> {
    x: &'a [f32],
    weight: &'a [f32],
    eps: f32,
    out: &'a mut [f32],
}

impl Kernel for RmsNorm<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: F32x16>(self) {
        let n = self.weight.len();
        let (weights, weight_tail) = self.weight.as_chunks::<LANES>();
        for (x, out) in self.x.chunks_exact(n).zip(self.out.chunks_exact_mut(n)) {
            let (chunks, tail) = x.as_chunks::<LANES>();
            let tail = load_padded::<V>(tail);
            let mut squares = tail.mul(tail);
            for chunk in chunks {
                let v = V::load(chunk);
                squares = v.mul_add(v, squares);
            }
            let scale = V::splat(1.0 / (squares.sum() / n as f32 + self.eps).sqrt());
            let (outs, out_tail) = out.as_chunks_mut::<LANES>();
            for ((chunk, weight), out) in chunks.iter().zip(weights).zip(outs) {
                V::load(chunk).mul(scale).mul(V::load(weight)).store(out);
            }
            store_prefix(tail.mul(scale).mul(load_padded(weight_tail)), out_tail);
        }
    }
}

#[cfg(test)]
mod tests;

//! Normalisation: root mean square, and mean and variance.

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

/// `out[r] = (x[r] - mean(x[r])) / sqrt(variance(x[r]) + eps) * weight + bias`.
///
/// `x` and `out` are `[n_rows, n]`, `weight` and `bias` are `[n]`. The variance is the mean of the
/// squared distances from the mean.
///
/// # Panics
///
/// If the lengths do not match.
pub fn layer_norm(x: &[f32], weight: &[f32], bias: &[f32], eps: f32, out: &mut [f32]) {
    layer_norm_on(Isa::detect(), x, (weight, bias), eps, out);
}

pub(crate) fn layer_norm_on(
    isa: Isa,
    x: &[f32],
    (weight, bias): (&[f32], &[f32]),
    eps: f32,
    out: &mut [f32],
) {
    assert_eq!(x.len(), out.len(), "x and out have one shape");
    assert_eq!(weight.len(), bias.len(), "weight and bias have one shape");
    assert!(!weight.is_empty() && x.len().is_multiple_of(weight.len()), "x is [n_rows, n]");
    dispatch(isa, LayerNorm { x, weight, bias, eps, out });
}

struct LayerNorm<'a> {
    x: &'a [f32],
    weight: &'a [f32],
    bias: &'a [f32],
    eps: f32,
    out: &'a mut [f32],
}

impl Kernel for LayerNorm<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: F32x16>(self) {
        let n = self.weight.len();
        for (x, out) in self.x.chunks_exact(n).zip(self.out.chunks_exact_mut(n)) {
            let mut sums = V::splat(0.0);
            for chunk in x.chunks(LANES) {
                sums = sums.add(load_padded(chunk));
            }
            let mean = V::splat(sums.sum() / n as f32);
            let mut squares = V::splat(0.0);
            for (chunk, out) in x.chunks(LANES).zip(out.chunks_mut(LANES)) {
                store_prefix(load_padded::<V>(chunk).sub(mean), out);
                // Read back, so that the padding is zero again and adds nothing.
                let centred = load_padded::<V>(out);
                squares = centred.mul_add(centred, squares);
            }
            let scale = V::splat(1.0 / (squares.sum() / n as f32 + self.eps).sqrt());
            let affine = self.weight.chunks(LANES).zip(self.bias.chunks(LANES));
            for (out, (weight, bias)) in out.chunks_mut(LANES).zip(affine) {
                let normed = load_padded::<V>(out).mul(scale);
                store_prefix(normed.mul_add(load_padded(weight), load_padded(bias)), out);
            }
        }
    }
}

#[cfg(test)]
mod tests;

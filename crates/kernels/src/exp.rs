//! The exponential and the activations made from it.

use crate::simd::{F32x16, Isa, Kernel, LANES, dispatch, load_padded, store_prefix};

/// `e^x` to about one unit in the last place; zero below -87, capped above 88; NaN stays NaN.
#[inline(always)]
pub(crate) fn exp<V: F32x16>(x: V) -> V {
    /// 1.5 * 2^23: adding it rounds to an integer, which is left in the low mantissa bits.
    const ROUND: f32 = 12_582_912.0;
    let lowest = V::splat(-87.0);
    // `max` returns its right side for NaN; the cap is a maximum of negated values.
    let zero = V::splat(0.0);
    let capped = zero.sub(V::splat(-88.0).max(zero.sub(lowest.max(x))));
    let shifted = capped.mul_add(V::splat(std::f32::consts::LOG2_E), V::splat(ROUND));
    let n = shifted.sub(V::splat(ROUND));
    // ln 2 in two parts: the first has few bits, so that n times it is exact.
    let r = n.mul_add(V::splat(-0.693_359_4), capped);
    let r = n.mul_add(V::splat(2.121_944_4e-4), r);
    // The Taylor series to degree 7; |r| <= ln 2 / 2.
    let mut p = V::splat(1.0 / 5040.0);
    for coefficient in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        p = p.mul_add(r, V::splat(coefficient));
    }
    x.zero_where_below(lowest, p.mul(shifted.exp2_of_low_bits()))
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
pub(crate) fn sigmoid<V: F32x16>(x: V) -> V {
    let one = V::splat(1.0);
    one.div(one.add(exp(V::splat(0.0).sub(x))))
}

/// `x * sigmoid(x)`.
#[inline(always)]
fn silu<V: F32x16>(x: V) -> V {
    x.div(V::splat(1.0).add(exp(V::splat(0.0).sub(x))))
}

/// `out[r, i] = silu(gate_up[r, i]) * gate_up[r, width + i]`.
///
/// `gate_up` is `[n_rows, 2 * width]` and `out` `[n_rows, width]`.
///
/// # Panics
///
/// If the lengths do not match.
pub fn silu_and_mul(gate_up: &[f32], width: usize, out: &mut [f32]) {
    silu_and_mul_on(Isa::detect(), gate_up, width, out);
}

pub(crate) fn silu_and_mul_on(isa: Isa, gate_up: &[f32], width: usize, out: &mut [f32]) {
    assert!(width > 0 && out.len().is_multiple_of(width), "out is [n_rows, width]");
    assert_eq!(gate_up.len(), 2 * out.len(), "gate_up is [n_rows, 2 * width]");
    dispatch(isa, SiluAndMul { gate_up, width, out });
}

struct SiluAndMul<'a> {
    gate_up: &'a [f32],
    width: usize,
    out: &'a mut [f32],
}

impl Kernel for SiluAndMul<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: F32x16>(self) {
        let rows = self.gate_up.chunks_exact(2 * self.width);
        for (row, out) in rows.zip(self.out.chunks_exact_mut(self.width)) {
            let (gate, up) = row.split_at(self.width);
            let (gates, gate_tail) = gate.as_chunks::<LANES>();
            let (ups, up_tail) = up.as_chunks::<LANES>();
            let (outs, out_tail) = out.as_chunks_mut::<LANES>();
            for ((gate, up), out) in gates.iter().zip(ups).zip(outs) {
                silu(V::load(gate)).mul(V::load(up)).store(out);
            }
            if !out_tail.is_empty() {
                let value = silu(load_padded::<V>(gate_tail)).mul(load_padded(up_tail));
                store_prefix(value, out_tail);
            }
        }
    }
}

#[cfg(test)]
mod tests;

//! Rounding of f32 activations to bf16 precision.

use crate::simd::{F32x16, Isa, Kernel, dispatch};

/// Rounds every value to the nearest bf16, ties to even; NaN stays NaN.
pub fn round_bf16_in_place(values: &mut [f32]) {
    dispatch(Isa::detect(), RoundBf16(values));
}

struct RoundBf16<'a>(&'a mut [f32]);

impl Kernel for RoundBf16<'_> {
    type Output = ();

    // The compiler vectorises this loop for the instruction set of the caller.
    #[inline(always)]
    fn run<V: F32x16>(self) {
        for value in self.0 {
            let bits = value.to_bits();
            let odd = (bits >> 16) & 1;
            let rounded = f32::from_bits(bits.wrapping_add(0x7fff + odd) & 0xffff_0000);
            *value = if value.is_nan() { *value } else { rounded };
        }
    }
}

#[cfg(test)]
mod tests;

//! The portable vector: an array, which the compiler vectorises as far as the target allows.

use super::{F32x16, LANES};

#[derive(Clone, Copy)]
pub(crate) struct Portable([f32; LANES]);

impl Portable {
    #[inline(always)]
    fn zip(self, rhs: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        Self(std::array::from_fn(|i| f(self.0[i], rhs.0[i])))
    }
}

impl F32x16 for Portable {
    const WIDE: bool = false;

    #[inline(always)]
    fn splat(value: f32) -> Self {
        Self([value; LANES])
    }

    #[inline(always)]
    fn load(src: &[f32; LANES]) -> Self {
        Self(*src)
    }

    #[inline(always)]
    fn load_bf16_pair(src: &[u32; LANES]) -> [Self; 2] {
        let low = src.map(|word| f32::from_bits(word << 16));
        [Self(low), Self(src.map(|word| f32::from_bits(word & 0xffff_0000)))]
    }

    #[inline(always)]
    fn store(self, dst: &mut [f32; LANES]) {
        *dst = self.0;
    }

    #[inline(always)]
    fn add(self, rhs: Self) -> Self {
        self.zip(rhs, |a, b| a + b)
    }

    #[inline(always)]
    fn sub(self, rhs: Self) -> Self {
        self.zip(rhs, |a, b| a - b)
    }

    #[inline(always)]
    fn mul(self, rhs: Self) -> Self {
        self.zip(rhs, |a, b| a * b)
    }

    #[inline(always)]
    fn div(self, rhs: Self) -> Self {
        self.zip(rhs, |a, b| a / b)
    }

    #[inline(always)]
    fn mul_add(self, a: Self, b: Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i].mul_add(a.0[i], b.0[i])))
    }

    #[inline(always)]
    fn max(self, rhs: Self) -> Self {
        self.zip(rhs, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    fn zero_where_below(self, bound: Self, value: Self) -> Self {
        Self(std::array::from_fn(|i| if self.0[i] < bound.0[i] { 0.0 } else { value.0[i] }))
    }

    #[inline(always)]
    fn exp2_of_low_bits(self) -> Self {
        Self(self.0.map(|x| f32::from_bits((x.to_bits() << 23).wrapping_add(0x3f80_0000))))
    }
}

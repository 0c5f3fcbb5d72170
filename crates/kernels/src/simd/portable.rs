//! The portable vector: an array, which the compiler vectorises as far as the target allows.

use quantization::E2M1;

use super::{CODE_FACTOR, F32x16, LANES};

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
    fn load_e4m3_pair(src: &[u8; 2 * LANES]) -> [Self; 2] {
        // Moves the exponent from the bias of f32 to that of the codes, exactly for the subnormal
        // ones as well.
        const REBIAS: f32 = f32::from_bits((127 + 120) << 23) / CODE_FACTOR;
        let value = |code: u8| {
            let (sign, magnitude) = (u32::from(code & 0x80), u32::from(code & 0x7f));
            f32::from_bits(sign << 24 | magnitude << 20) * REBIAS
        };
        let half = |odd: usize| Self(std::array::from_fn(|i| value(src[2 * i + odd])));
        [half(0), half(1)]
    }

    #[inline(always)]
    fn load_e2m1_pair(src: &[u8; LANES]) -> [Self; 2] {
        let value = |code: u8| E2M1[usize::from(code)] / CODE_FACTOR;
        [Self(src.map(|byte| value(byte & 0xf))), Self(src.map(|byte| value(byte >> 4)))]
    }

    #[inline(always)]
    fn load_e8m0(src: &[u8; LANES]) -> Self {
        Self(src.map(|code| f32::from_bits(u32::from(code) << 23)))
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

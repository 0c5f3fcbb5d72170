//! Two 256-bit registers.

use std::arch::x86_64::*;

use super::{F32x16, LANES};

#[derive(Clone, Copy)]
pub(crate) struct Avx2(__m256, __m256);

/// The high bytes of the values of E2M1 codes over [`super::CODE_FACTOR`] as IEEE halves; their low
/// bytes are zero.
static E2M1_HALVES: [u8; LANES] = [
    0x00, 0x18, 0x1c, 0x1e, 0x20, 0x22, 0x24, 0x26, 0x80, 0x98, 0x9c, 0x9e, 0xa0, 0xa2, 0xa4, 0xa6,
];

/// Wraps intrinsics that are unsafe only for the features that they need.
macro_rules! avx2 {
    ($e:expr) => {
        // SAFETY: this type is used only below `dispatch`, where the processor was found to have
        // AVX2, FMA and F16C; every pointer given to an intrinsic comes from a reference to as many
        // elements as it reads or writes, and is advanced by at most half of them.
        unsafe { $e }
    };
}

impl F32x16 for Avx2 {
    const WIDE: bool = false;

    #[inline(always)]
    fn splat(value: f32) -> Self {
        let v = avx2!(_mm256_set1_ps(value));
        Self(v, v)
    }

    #[inline(always)]
    fn load(src: &[f32; LANES]) -> Self {
        let ptr = src.as_ptr();
        avx2!(Self(_mm256_loadu_ps(ptr), _mm256_loadu_ps(ptr.add(8))))
    }

    #[inline(always)]
    fn load_bf16_pair(src: &[u32; LANES]) -> [Self; 2] {
        avx2!({
            let mask = _mm256_set1_epi32(0xffff_0000_u32 as i32);
            let words = [
                _mm256_loadu_si256(src.as_ptr().cast()),
                _mm256_loadu_si256(src.as_ptr().add(8).cast()),
            ];
            let low = |i: usize| _mm256_castsi256_ps(_mm256_slli_epi32::<16>(words[i]));
            let high = |i: usize| _mm256_castsi256_ps(_mm256_and_si256(words[i], mask));
            [Self(low(0), low(1)), Self(high(0), high(1))]
        })
    }

    #[inline(always)]
    fn load_e4m3_pair(src: &[u8; 2 * LANES]) -> [Self; 2] {
        avx2!({
            let codes = _mm256_loadu_si256(src.as_ptr().cast());
            // Of a code in the high byte of a half: the sign stays, the rest moves down by one.
            let mask = _mm256_set1_epi16(0xbf80_u16 as i16);
            let half = |codes| _mm256_and_si256(_mm256_srai_epi16::<1>(codes), mask);
            [widen_halves(half(_mm256_slli_epi16::<8>(codes))), widen_halves(half(codes))]
        })
    }

    #[inline(always)]
    fn load_e2m1_pair(src: &[u8; LANES]) -> [Self; 2] {
        avx2!({
            let codes = _mm_loadu_si128(src.as_ptr().cast());
            let mask = _mm_set1_epi8(0xf);
            let value = |codes| {
                let table = _mm_loadu_si128(E2M1_HALVES.as_ptr().cast());
                let high_bytes = _mm_shuffle_epi8(table, _mm_and_si128(codes, mask));
                let zero = _mm_setzero_si128();
                let low = _mm_unpacklo_epi8(zero, high_bytes);
                widen_halves(_mm256_set_m128i(_mm_unpackhi_epi8(zero, high_bytes), low))
            };
            [value(codes), value(_mm_srli_epi16::<4>(codes))]
        })
    }

    #[inline(always)]
    fn load_e8m0(src: &[u8; LANES]) -> Self {
        avx2!({
            let half = |start: usize| {
                let codes = _mm_loadl_epi64(src.as_ptr().add(start).cast());
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_cvtepu8_epi32(codes)))
            };
            Self(half(0), half(8))
        })
    }

    #[inline(always)]
    fn store(self, dst: &mut [f32; LANES]) {
        let ptr = dst.as_mut_ptr();
        avx2!({
            _mm256_storeu_ps(ptr, self.0);
            _mm256_storeu_ps(ptr.add(8), self.1);
        });
    }

    #[inline(always)]
    fn add(self, rhs: Self) -> Self {
        avx2!(Self(_mm256_add_ps(self.0, rhs.0), _mm256_add_ps(self.1, rhs.1)))
    }

    #[inline(always)]
    fn sub(self, rhs: Self) -> Self {
        avx2!(Self(_mm256_sub_ps(self.0, rhs.0), _mm256_sub_ps(self.1, rhs.1)))
    }

    #[inline(always)]
    fn mul(self, rhs: Self) -> Self {
        avx2!(Self(_mm256_mul_ps(self.0, rhs.0), _mm256_mul_ps(self.1, rhs.1)))
    }

    #[inline(always)]
    fn div(self, rhs: Self) -> Self {
        avx2!(Self(_mm256_div_ps(self.0, rhs.0), _mm256_div_ps(self.1, rhs.1)))
    }

    #[inline(always)]
    fn mul_add(self, a: Self, b: Self) -> Self {
        avx2!(Self(_mm256_fmadd_ps(self.0, a.0, b.0), _mm256_fmadd_ps(self.1, a.1, b.1)))
    }

    #[inline(always)]
    fn max(self, rhs: Self) -> Self {
        avx2!(Self(_mm256_max_ps(self.0, rhs.0), _mm256_max_ps(self.1, rhs.1)))
    }

    #[inline(always)]
    fn zero_where_below(self, bound: Self, value: Self) -> Self {
        avx2!(Self(
            _mm256_and_ps(_mm256_cmp_ps::<_CMP_NLT_UQ>(self.0, bound.0), value.0),
            _mm256_and_ps(_mm256_cmp_ps::<_CMP_NLT_UQ>(self.1, bound.1), value.1),
        ))
    }

    #[inline(always)]
    fn exp2_of_low_bits(self) -> Self {
        avx2!({
            let one = _mm256_set1_epi32(0x3f80_0000);
            let low = _mm256_slli_epi32::<23>(_mm256_castps_si256(self.0));
            let high = _mm256_slli_epi32::<23>(_mm256_castps_si256(self.1));
            Self(
                _mm256_castsi256_ps(_mm256_add_epi32(low, one)),
                _mm256_castsi256_ps(_mm256_add_epi32(high, one)),
            )
        })
    }

    #[inline(always)]
    fn transpose(rows: [Self; LANES]) -> [Self; LANES] {
        // The four quarters of the square, of which two change places.
        let mut columns = rows;
        for right in 0..2 {
            let half = |row: Self| if right == 0 { row.0 } else { row.1 };
            let top = transpose_square(std::array::from_fn(|i| half(rows[i])));
            let bottom = transpose_square(std::array::from_fn(|i| half(rows[8 + i])));
            for i in 0..8 {
                columns[8 * right + i] = Self(top[i], bottom[i]);
            }
        }
        columns
    }
}

/// Sixteen IEEE halves as f32.
#[inline(always)]
fn widen_halves(halves: __m256i) -> Avx2 {
    avx2!(Avx2(
        _mm256_cvtph_ps(_mm256_castsi256_si128(halves)),
        _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(halves)),
    ))
}

/// Element `j` of vector `i` becomes element `i` of vector `j`.
#[inline(always)]
fn transpose_square([a, b, c, d, e, f, g, h]: [__m256; 8]) -> [__m256; 8] {
    let top = transpose_within_lanes([a, b, c, d]);
    let bottom = transpose_within_lanes([e, f, g, h]);
    let mut columns = [a; 8];
    for i in 0..4 {
        columns[i] = avx2!(_mm256_permute2f128_ps::<0x20>(top[i], bottom[i]));
        columns[4 + i] = avx2!(_mm256_permute2f128_ps::<0x31>(top[i], bottom[i]));
    }
    columns
}

/// Per 128-bit lane, element `j` of vector `i` becomes element `i` of vector `j`.
#[inline(always)]
fn transpose_within_lanes([a, b, c, d]: [__m256; 4]) -> [__m256; 4] {
    avx2!({
        let (low_ab, high_ab) = (_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
        let (low_cd, high_cd) = (_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
        [
            _mm256_shuffle_ps::<0x44>(low_ab, low_cd),
            _mm256_shuffle_ps::<0xee>(low_ab, low_cd),
            _mm256_shuffle_ps::<0x44>(high_ab, high_cd),
            _mm256_shuffle_ps::<0xee>(high_ab, high_cd),
        ]
    })
}

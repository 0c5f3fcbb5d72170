//! One 512-bit register.

use std::arch::x86_64::*;

use quantization::E2M1;

use super::{CODE_FACTOR, F32x16, LANES};

#[derive(Clone, Copy)]
pub(crate) struct Avx512(__m512);

/// The values of E2M1 codes over [`CODE_FACTOR`].
static E2M1_SCALED: [f32; LANES] = {
    let mut values = E2M1;
    let mut code = 0;
    while code < LANES {
        values[code] /= CODE_FACTOR;
        code += 1;
    }
    values
};

/// Wraps intrinsics that are unsafe only for the features that they need.
macro_rules! avx512 {
    ($e:expr) => {
        // SAFETY: this type is used only below `dispatch`, where the processor was found to have
        // AVX-512F; every pointer given to an intrinsic comes from a reference to as many elements
        // as it reads or writes.
        unsafe { $e }
    };
}

impl F32x16 for Avx512 {
    const WIDE: bool = true;

    #[inline(always)]
    fn splat(value: f32) -> Self {
        Self(avx512!(_mm512_set1_ps(value)))
    }

    #[inline(always)]
    fn load(src: &[f32; LANES]) -> Self {
        Self(avx512!(_mm512_loadu_ps(src.as_ptr())))
    }

    #[inline(always)]
    fn load_bf16_pair(src: &[u32; LANES]) -> [Self; 2] {
        avx512!({
            let words = _mm512_loadu_si512(src.as_ptr().cast());
            let high = _mm512_and_si512(words, _mm512_set1_epi32(0xffff_0000_u32 as i32));
            let low = _mm512_slli_epi32::<16>(words);
            [Self(_mm512_castsi512_ps(low)), Self(_mm512_castsi512_ps(high))]
        })
    }

    #[inline(always)]
    fn load_e4m3_pair(src: &[u8; 2 * LANES]) -> [Self; 2] {
        avx512!({
            let codes = _mm256_loadu_si256(src.as_ptr().cast());
            // Of a code in the high byte of a half: the sign stays, the rest moves down by one.
            let mask = _mm256_set1_epi16(0xbf80_u16 as i16);
            let half = |codes| _mm256_and_si256(_mm256_srai_epi16::<1>(codes), mask);
            let (even, odd) = (half(_mm256_slli_epi16::<8>(codes)), half(codes));
            [Self(_mm512_cvtph_ps(even)), Self(_mm512_cvtph_ps(odd))]
        })
    }

    #[inline(always)]
    fn load_e2m1_pair(src: &[u8; LANES]) -> [Self; 2] {
        let table = Self::load(&E2M1_SCALED);
        avx512!({
            let codes = _mm512_cvtepu8_epi32(_mm_loadu_si128(src.as_ptr().cast()));
            // A permutation looks at the four lowest bits of an index.
            let low = _mm512_permutexvar_ps(codes, table.0);
            let high = _mm512_permutexvar_ps(_mm512_srli_epi32::<4>(codes), table.0);
            [Self(low), Self(high)]
        })
    }

    #[inline(always)]
    fn load_e8m0(src: &[u8; LANES]) -> Self {
        Self(avx512!({
            let codes = _mm512_cvtepu8_epi32(_mm_loadu_si128(src.as_ptr().cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<23>(codes))
        }))
    }

    #[inline(always)]
    fn store(self, dst: &mut [f32; LANES]) {
        avx512!(_mm512_storeu_ps(dst.as_mut_ptr(), self.0));
    }

    #[inline(always)]
    fn add(self, rhs: Self) -> Self {
        Self(avx512!(_mm512_add_ps(self.0, rhs.0)))
    }

    #[inline(always)]
    fn sub(self, rhs: Self) -> Self {
        Self(avx512!(_mm512_sub_ps(self.0, rhs.0)))
    }

    #[inline(always)]
    fn mul(self, rhs: Self) -> Self {
        Self(avx512!(_mm512_mul_ps(self.0, rhs.0)))
    }

    #[inline(always)]
    fn div(self, rhs: Self) -> Self {
        Self(avx512!(_mm512_div_ps(self.0, rhs.0)))
    }

    #[inline(always)]
    fn mul_add(self, a: Self, b: Self) -> Self {
        Self(avx512!(_mm512_fmadd_ps(self.0, a.0, b.0)))
    }

    #[inline(always)]
    fn max(self, rhs: Self) -> Self {
        Self(avx512!(_mm512_max_ps(self.0, rhs.0)))
    }

    #[inline(always)]
    fn zero_where_below(self, bound: Self, value: Self) -> Self {
        Self(avx512!({
            let keep = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(self.0, bound.0);
            _mm512_maskz_mov_ps(keep, value.0)
        }))
    }

    #[inline(always)]
    fn exp2_of_low_bits(self) -> Self {
        Self(avx512!({
            let exponent = _mm512_slli_epi32::<23>(_mm512_castps_si512(self.0));
            _mm512_castsi512_ps(_mm512_add_epi32(exponent, _mm512_set1_epi32(0x3f80_0000)))
        }))
    }

    #[inline(always)]
    fn sum_each(vectors: [Self; LANES]) -> Self {
        // The halving order of `sum`, done for several vectors at once: the halves of two vectors
        // are laid side by side and added, until the 128-bit lane `l` holds vectors 4l to 4l + 3.
        let mut quarters = [vectors[0].0; 4];
        for (j, quarter) in quarters.iter_mut().enumerate() {
            let low = halves(vectors[j].0, vectors[j + 4].0);
            let high = halves(vectors[j + 8].0, vectors[j + 12].0);
            *quarter = avx512!(_mm512_add_ps(
                _mm512_shuffle_f32x4::<0x88>(low, high),
                _mm512_shuffle_f32x4::<0xdd>(low, high),
            ));
        }
        Self(avx512!({
            let low = pairs(quarters[0], quarters[1]);
            let high = pairs(quarters[2], quarters[3]);
            _mm512_add_ps(
                _mm512_shuffle_ps::<0x88>(low, high),
                _mm512_shuffle_ps::<0xdd>(low, high),
            )
        }))
    }

    #[inline(always)]
    fn transpose(rows: [Self; LANES]) -> [Self; LANES] {
        // Four rows at a time are transposed within their 128-bit lanes: lane `l` of `fours[c]`
        // then holds element 4l + c of the four rows.
        let mut fours = rows;
        for rows in fours.as_chunks_mut::<4>().0 {
            *rows = transpose_within_lanes(*rows);
        }
        let mut columns = rows;
        for c in 0..4 {
            let lanes = transpose_lanes([fours[c], fours[c + 4], fours[c + 8], fours[c + 12]]);
            for (l, lane) in lanes.into_iter().enumerate() {
                columns[4 * l + c] = lane;
            }
        }
        columns
    }
}

/// Per 128-bit lane, element `j` of vector `i` becomes element `i` of vector `j`.
#[inline(always)]
fn transpose_within_lanes([a, b, c, d]: [Avx512; 4]) -> [Avx512; 4] {
    avx512!({
        let (low_ab, high_ab) = (_mm512_unpacklo_ps(a.0, b.0), _mm512_unpackhi_ps(a.0, b.0));
        let (low_cd, high_cd) = (_mm512_unpacklo_ps(c.0, d.0), _mm512_unpackhi_ps(c.0, d.0));
        [
            Avx512(_mm512_shuffle_ps::<0x44>(low_ab, low_cd)),
            Avx512(_mm512_shuffle_ps::<0xee>(low_ab, low_cd)),
            Avx512(_mm512_shuffle_ps::<0x44>(high_ab, high_cd)),
            Avx512(_mm512_shuffle_ps::<0xee>(high_ab, high_cd)),
        ]
    })
}

/// The 128-bit lane `j` of vector `i` becomes lane `i` of vector `j`.
#[inline(always)]
fn transpose_lanes([a, b, c, d]: [Avx512; 4]) -> [Avx512; 4] {
    avx512!({
        let low_ab = _mm512_shuffle_f32x4::<0x44>(a.0, b.0);
        let low_cd = _mm512_shuffle_f32x4::<0x44>(c.0, d.0);
        let high_ab = _mm512_shuffle_f32x4::<0xee>(a.0, b.0);
        let high_cd = _mm512_shuffle_f32x4::<0xee>(c.0, d.0);
        [
            Avx512(_mm512_shuffle_f32x4::<0x88>(low_ab, low_cd)),
            Avx512(_mm512_shuffle_f32x4::<0xdd>(low_ab, low_cd)),
            Avx512(_mm512_shuffle_f32x4::<0x88>(high_ab, high_cd)),
            Avx512(_mm512_shuffle_f32x4::<0xdd>(high_ab, high_cd)),
        ]
    })
}

/// `[a[i] + a[i + 8], b[i] + b[i + 8]]`, eight lanes each.
#[inline(always)]
fn halves(a: __m512, b: __m512) -> __m512 {
    avx512!(_mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xee>(a, b)))
}

/// Per 128-bit lane `[a[i] + a[i + 2], b[i] + b[i + 2]]`, two elements each.
#[inline(always)]
fn pairs(a: __m512, b: __m512) -> __m512 {
    avx512!(_mm512_add_ps(_mm512_shuffle_ps::<0x44>(a, b), _mm512_shuffle_ps::<0xee>(a, b)))
}

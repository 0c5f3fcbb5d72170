//! Sixteen-lane vectors and the choice of instruction set at run time.
//!
//! A kernel is written once against [`F32x16`] and compiled for every instruction set. All lanes
//! and all reductions have one fixed order and every multiply-add is fused, so that the
//! instruction sets agree with each other bit for bit.

use half::bf16;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;

pub(crate) use portable::Portable;

/// Lanes of a vector, on every instruction set.
pub(crate) const LANES: usize = 16;

/// What the values of decoded codes are divided by: an E4M3 code moved to the place of an IEEE half
/// has this much less, for want of a larger exponent bias.
pub(crate) const CODE_FACTOR: f32 = 256.0;

/// Sixteen f32 lanes.
///
/// A type other than [`Portable`] may be used only below [`dispatch`], which proves that the
/// processor has its instructions. Every function from there down is `#[inline(always)]`:
/// that is what carries the target features into the generic code.
pub(crate) trait F32x16: Copy {
    /// Whether 32 architectural registers hold one vector each; sizes the register tiles.
    const WIDE: bool;

    fn splat(value: f32) -> Self;
    fn load(src: &[f32; LANES]) -> Self;
    /// Widens two vectors of bf16: the low halves of the words, and the high halves.
    fn load_bf16_pair(src: &[u32; LANES]) -> [Self; 2];
    /// The values of two vectors of E4M3 codes over [`CODE_FACTOR`]: the even bytes, and the odd
    /// bytes. No code may be NaN.
    fn load_e4m3_pair(src: &[u8; 2 * LANES]) -> [Self; 2];
    /// The values of two vectors of E2M1 codes over [`CODE_FACTOR`]: the low halves of the bytes,
    /// and the high halves.
    fn load_e2m1_pair(src: &[u8; LANES]) -> [Self; 2];
    /// The powers of two that E8M0 codes above 0 and below 255 stand for.
    fn load_e8m0(src: &[u8; LANES]) -> Self;
    fn store(self, dst: &mut [f32; LANES]);
    fn add(self, rhs: Self) -> Self;
    fn sub(self, rhs: Self) -> Self;
    fn mul(self, rhs: Self) -> Self;
    fn div(self, rhs: Self) -> Self;
    /// `self * a + b`, rounded once.
    fn mul_add(self, a: Self, b: Self) -> Self;
    /// `if self > rhs { self } else { rhs }`: a NaN on either side gives `rhs`.
    fn max(self, rhs: Self) -> Self;
    /// Zero where `self < bound`, else `value`.
    fn zero_where_below(self, bound: Self, value: Self) -> Self;
    /// `2^n` where the low mantissa bits of the lane hold the integer `n`, -127 <= n <= 127.
    fn exp2_of_low_bits(self) -> Self;

    /// The sum of the lanes in halving order: `i` with `i + 8`, then `i + 4`, `i + 2`, `i + 1`.
    #[inline(always)]
    fn sum(self) -> f32 {
        let mut lanes = [0.0; LANES];
        self.store(&mut lanes);
        let mut half = LANES / 2;
        while half > 0 {
            for i in 0..half {
                lanes[i] += lanes[i + half];
            }
            half /= 2;
        }
        lanes[0]
    }

    /// The greatest lane; NaN lanes may be passed over.
    #[inline(always)]
    fn max_lane(self) -> f32 {
        let mut lanes = [0.0; LANES];
        self.store(&mut lanes);
        let mut half = LANES / 2;
        while half > 0 {
            for i in 0..half {
                lanes[i] = if lanes[i] > lanes[i + half] { lanes[i] } else { lanes[i + half] };
            }
            half /= 2;
        }
        lanes[0]
    }

    /// The sums of sixteen vectors; lane `i` is `vectors[i].sum()`.
    #[inline(always)]
    fn sum_each(vectors: [Self; LANES]) -> Self {
        let mut sums = [0.0; LANES];
        for (sum, vector) in sums.iter_mut().zip(vectors) {
            *sum = vector.sum();
        }
        Self::load(&sums)
    }

    /// Element `j` of vector `i` becomes element `i` of vector `j`.
    #[inline(always)]
    fn transpose(rows: [Self; LANES]) -> [Self; LANES] {
        let mut lanes = [[0.0; LANES]; LANES];
        for (lanes, row) in lanes.iter_mut().zip(rows) {
            row.store(lanes);
        }
        std::array::from_fn(|column| Self::load(&lanes.map(|row| row[column])))
    }
}

/// A vector in memory, aligned so that no load crosses a cache line.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub(crate) struct Lanes(pub(crate) [f32; LANES]);

impl Lanes {
    pub(crate) const ZERO: Self = Self([0.0; LANES]);

    /// The lanes of successive vectors.
    pub(crate) fn flatten_mut(vectors: &mut [Self]) -> &mut [f32] {
        // SAFETY: a `Lanes` is sixteen f32 without padding: its size is its alignment. The borrow
        // carries over.
        unsafe {
            std::slice::from_raw_parts_mut(vectors.as_mut_ptr().cast(), vectors.len() * LANES)
        }
    }
}

const _: () = assert!(size_of::<Lanes>() == LANES * size_of::<f32>());

/// Work that is written once for every instruction set.
pub(crate) trait Kernel {
    type Output;

    /// Must be `#[inline(always)]`, with everything it calls; see [`F32x16`].
    fn run<V: F32x16>(self) -> Self::Output;
}

/// An instruction set that this processor was found to have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Isa(Level);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Level {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Isa {
    /// The fastest instruction set of this processor.
    pub(crate) fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            if has_avx512() {
                return Self(Level::Avx512);
            }
            if has_avx2() {
                return Self(Level::Avx2);
            }
        }
        Self(Level::Portable)
    }

    /// Every instruction set of this processor, the portable one first.
    #[cfg(test)]
    pub(crate) fn available() -> Vec<Self> {
        let mut all = vec![Self(Level::Portable)];
        #[cfg(target_arch = "x86_64")]
        {
            all.extend(has_avx2().then_some(Self(Level::Avx2)));
            all.extend(has_avx512().then_some(Self(Level::Avx512)));
        }
        all
    }
}

#[cfg(target_arch = "x86_64")]
fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c")
}

#[cfg(target_arch = "x86_64")]
fn has_avx512() -> bool {
    has_avx2() && is_x86_feature_detected!("avx512f")
}

/// Runs a kernel on an instruction set.
pub(crate) fn dispatch<K: Kernel>(isa: Isa, kernel: K) -> K::Output {
    match isa.0 {
        Level::Portable => kernel.run::<Portable>(),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: an `Isa` of this level exists only where `has_avx2` held.
        Level::Avx2 => unsafe { run_avx2(kernel) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: an `Isa` of this level exists only where `has_avx512` held.
        Level::Avx512 => unsafe { run_avx512(kernel) },
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
fn run_avx2<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<avx2::Avx2>()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c,avx512f")]
fn run_avx512<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<avx512::Avx512>()
}

/// The exact value, as a shift that the compiler vectorises.
#[inline(always)]
pub(crate) fn widen_bf16(x: bf16) -> f32 {
    f32::from_bits(u32::from(x.to_bits()) << 16)
}

/// Loads up to sixteen values, the missing ones as zero.
#[inline(always)]
pub(crate) fn load_padded<V: F32x16>(src: &[f32]) -> V {
    let mut lanes = [0.0; LANES];
    lanes[..src.len()].copy_from_slice(src);
    V::load(&lanes)
}

/// Stores the first `dst.len()` lanes, at most sixteen.
#[inline(always)]
pub(crate) fn store_prefix<V: F32x16>(value: V, dst: &mut [f32]) {
    let mut lanes = [0.0; LANES];
    value.store(&mut lanes);
    dst.copy_from_slice(&lanes[..dst.len()]);
}

//! What the kernel tests share.

use crate::simd::Isa;

/// A small deterministic generator.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn bits(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Uniform in `0..n`.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.bits() >> 33) as usize % n
    }

    /// Roughly uniform in -1..1.
    pub(crate) fn value(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    pub(crate) fn values(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.value()).collect()
    }
}

/// Runs a kernel into poisoned output on every instruction set and returns the portable result,
/// after checking that the others have the same bits.
#[track_caller]
pub(crate) fn on_every_isa(n_out: usize, kernel: impl Fn(Isa, &mut [f32])) -> Vec<f32> {
    let mut portable: Option<Vec<f32>> = None;
    for isa in Isa::available() {
        let mut out = vec![f32::NAN; n_out];
        kernel(isa, &mut out);
        match &portable {
            None => portable = Some(out),
            Some(portable) => assert_same_bits(portable, &out, &format!("{isa:?}")),
        }
    }
    portable.expect("the portable instruction set is always there")
}

#[track_caller]
pub(crate) fn assert_same_bits(a: &[f32], b: &[f32], what: &str) {
    assert_eq!(a.len(), b.len(), "{what}: lengths");
    for (i, (a, b)) in a.iter().zip(b).enumerate() {
        assert_eq!(a.to_bits(), b.to_bits(), "{what}: element {i}: {a} and {b}");
    }
}

#[track_caller]
pub(crate) fn assert_close(actual: &[f32], expected: &[f64], tolerance: f64) {
    assert_eq!(actual.len(), expected.len(), "lengths");
    for (i, (&a, &e)) in actual.iter().zip(expected).enumerate() {
        let error = (f64::from(a) - e).abs();
        assert!(error <= tolerance * e.abs().max(1.0), "element {i}: {a} instead of {e}");
    }
}

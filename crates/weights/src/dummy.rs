//! Random weights by the names of tensors. Knows no libtorch.

use std::sync::LazyLock;

use model_config::{TensorRole, TensorSpec};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng as _, SeedableRng as _};
use rayon::prelude::*;
use statrs::distribution::{ContinuousCDF as _, Normal};

/// The seed of dummy weights where nothing asks for another one.
pub const DUMMY_SEED: u64 = 0x7a9d_e301;

/// Standard deviation of the values of a matrix, as published configs initialise theirs.
const STANDARD_DEVIATION: f32 = 0.02;

/// The middles of `2^16` equally likely parts of the normal distribution of a matrix: a value takes
/// 16 random bits and no arithmetic, of which the large models have enough.
static QUANTILES: LazyLock<Vec<f32>> = LazyLock::new(|| {
    let n = f64::from(1 << 16);
    let quantile = |idx: u16| Normal::standard().inverse_cdf((f64::from(idx) + 0.5) / n);
    (0..=u16::MAX).map(|idx| quantile(idx) as f32 * STANDARD_DEVIATION).collect()
});

/// Values that one stream of random numbers makes; part of what a value depends on.
const CHUNK: usize = 1 << 16;

/// Writes dummy values of a tensor: ones for a norm, zeros for a bias, and for a matrix normal
/// values with the mean 0 and the standard deviation 0.02, which `convert` rounds: `2^16` different
/// ones, up to 4.3 deviations.
///
/// A value is a function of `seed`, the tensor's name and the value's place, so that it depends
/// neither on other tensors, nor on the dtype, nor on the number of threads of the rayon pool that
/// this runs in.
///
/// # Panics
///
/// If `out` is not as long as the tensor.
pub fn fill<T: Send>(
    spec: &TensorSpec,
    seed: u64,
    out: &mut [T],
    convert: impl Fn(f32) -> T + Sync,
) {
    assert_eq!(out.len(), spec.n_values(), "{} has another length", spec.name);
    match spec.role() {
        TensorRole::Norm => out.fill_with(|| convert(1.0)),
        TensorRole::Bias => out.fill_with(|| convert(0.0)),
        TensorRole::Matrix => {
            let seed = seed ^ fnv1a(&spec.name);
            let quantiles = &QUANTILES[..];
            out.par_chunks_mut(CHUNK).enumerate().for_each(|(chunk_idx, chunk)| {
                let mut rng = ChaCha8Rng::seed_from_u64(seed);
                rng.set_stream(chunk_idx as u64);
                for values in chunk.chunks_mut(4) {
                    let mut bits = rng.next_u64();
                    for value in values {
                        *value = convert(quantiles[usize::from(bits as u16)]);
                        bits >>= 16;
                    }
                }
            });
        }
    }
}

/// The hash FNV-1a of 64 bits.
fn fnv1a(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

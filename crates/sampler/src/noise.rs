//! Noise as a pure function: Philox4x32-10, keyed by the request's seed.
//!
//! Nothing is remembered between draws, so a token does not depend on batch mates, on how steps
//! were cut, or on how many drafts came before \[INV-11].

/// What a uniform number decides. Draws for different purposes at the same position are
/// independent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Purpose {
    /// The target's own token, also where a draft that was chosen stands beside it.
    Sample,
    /// Whether the target takes a draft that was drawn.
    Accept,
    /// The token in place of a drawn draft that is rejected.
    Recover,
    /// A draft.
    Draft,
}

/// A uniform number in `[0, 1)`, a multiple of 2^-53, for the token at `position` of a request.
#[must_use]
pub fn uniform(seed: u64, position: u64, purpose: Purpose) -> f64 {
    let [low, high] = halves(position);
    let [a, b, ..] = philox4x32([low, high, purpose as u32, 0], halves(seed));
    let bits = (u64::from(a) << 21) | (u64::from(b) >> 11);
    bits as f64 * (-53f64).exp2()
}

fn halves(value: u64) -> [u32; 2] {
    [value as u32, (value >> 32) as u32]
}

/// Philox4x32 with ten rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
#[must_use]
pub fn philox4x32(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let even = u64::from(counter[0]) * 0xD251_1F53;
        let odd = u64::from(counter[2]) * 0xCD9E_8D57;
        counter = [
            (odd >> 32) as u32 ^ counter[1] ^ key[0],
            odd as u32,
            (even >> 32) as u32 ^ counter[3] ^ key[1],
            even as u32,
        ];
        // The golden ratio and the square root of 3, less 1, as 32-bit fractions.
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    counter
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known answers that the authors publish with their library.
    #[test]
    fn philox_gives_the_published_answers() {
        let answer = philox4x32([0; 4], [0; 2]);
        assert_eq!(answer, [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        let answer = philox4x32([u32::MAX; 4], [u32::MAX; 2]);
        assert_eq!(answer, [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        let counter = [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344];
        let answer = philox4x32(counter, [0xa409_3822, 0x299f_31d0]);
        assert_eq!(answer, [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]);
    }

    /// 64 equal bins of 640,000 draws, neighbours in seed, position and purpose; the bound is the
    /// 99.99th percentile of chi-square with 63 degrees of freedom.
    #[test]
    fn neighbouring_draws_are_uniform() {
        let purposes = [Purpose::Sample, Purpose::Accept, Purpose::Recover, Purpose::Draft];
        let mut bins = [0u32; 64];
        for seed in 0..400 {
            for position in 0..400 {
                for purpose in purposes {
                    let u = uniform(seed, position, purpose);
                    assert!((0.0..1.0).contains(&u));
                    bins[(u * 64.0) as usize] += 1;
                }
            }
        }
        let chi_square: f64 = bins.iter().map(|&n| (f64::from(n) - 1e4).powi(2) / 1e4).sum();
        assert!(chi_square < 112.9, "{chi_square}");
    }

    /// The correlation of two purposes is within five standard errors of 0.
    #[test]
    fn purposes_are_independent() {
        let n = 100_000;
        let sum: f64 = (0..n)
            .map(|position| {
                let accept = uniform(7, position, Purpose::Accept) - 0.5;
                accept * (uniform(7, position, Purpose::Recover) - 0.5)
            })
            .sum();
        assert!((12.0 * sum / (n as f64).sqrt()).abs() < 5.0);
    }

    #[test]
    fn every_input_counts() {
        let base = uniform(1, 2, Purpose::Sample);
        assert_eq!(base, uniform(1, 2, Purpose::Sample));
        assert_ne!(base, uniform(1 | 1 << 40, 2, Purpose::Sample));
        assert_ne!(base, uniform(1, 2 | 1 << 40, Purpose::Sample));
        assert_ne!(base, uniform(1, 2, Purpose::Draft));
    }
}

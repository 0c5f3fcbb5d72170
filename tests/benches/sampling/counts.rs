//! How often tokens come, and whether two samples can be of one distribution.

use std::collections::{HashMap, HashSet};

use engine_types::TokenId;

/// Which generated tokens are compared, the first being 1.
pub(crate) const POSITIONS: [usize; 3] = [2, 4, 8];

/// Counts less than this in both samples together are one bin of their prompt.
const N_BIN: f64 = 16.0;

/// How often each token comes at each of [`POSITIONS`], by prompt.
#[derive(Default)]
pub(crate) struct Counts {
    by_token: [HashMap<(usize, TokenId), u32>; POSITIONS.len()],
    n_prompts: usize,
}

impl Counts {
    /// Counts what was generated behind a prompt.
    pub(crate) fn add(&mut self, prompt: usize, generated: &[TokenId]) {
        self.n_prompts = self.n_prompts.max(prompt + 1);
        for (counts, at) in self.by_token.iter_mut().zip(POSITIONS) {
            *counts.entry((prompt, generated[at - 1])).or_default() += 1;
        }
    }

    /// Chi-square of this and another sample of the same size at the `at`-th position, summed over
    /// the prompts, with its degrees of freedom, and the normal deviate that is exceeded with the
    /// same probability (Wilson and Hilferty, 1931). Requests are independent of each other, and
    /// each counts once.
    pub(crate) fn compare(&self, other: &Self, at: usize) -> String {
        let (one, other) = (&self.by_token[at], &other.by_token[at]);
        let count = |of: &HashMap<_, u32>, key| f64::from(of.get(key).copied().unwrap_or(0));
        let (mut sum, mut n_degrees) = (0.0, 0.0);
        let mut rest = vec![(0.0, 0.0); self.n_prompts];
        let mut n_bins = vec![0; self.n_prompts];
        let keys: HashSet<_> = one.keys().chain(other.keys()).collect();
        for key in keys {
            let (a, b) = (count(one, key), count(other, key));
            if a + b < N_BIN {
                let rest = &mut rest[key.0];
                *rest = (rest.0 + a, rest.1 + b);
            } else {
                sum += (a - b).powi(2) / (a + b);
                n_bins[key.0] += 1;
            }
        }
        for ((a, b), n_bins) in rest.into_iter().zip(n_bins) {
            let has_rest = a + b > 0.0;
            sum += if has_rest { (a - b).powi(2) / (a + b) } else { 0.0 };
            n_degrees += f64::from(n_bins + u32::from(has_rest)) - 1.0;
        }
        let scale = 2.0 / (9.0 * n_degrees);
        let deviate = ((sum / n_degrees).cbrt() - (1.0 - scale)) / scale.sqrt();
        format!("{sum:.0}, {n_degrees}, {deviate:+.1}")
    }
}

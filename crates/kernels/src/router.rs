//! Expert selection without an auxiliary loss ("noaux_tc").

use crate::exp::sigmoid;
use crate::linear::PackedLinear;
use crate::simd::{F32x16, Isa, Kernel, LANES, dispatch, load_padded, store_prefix};

/// How experts are chosen and weighted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RouterConfig {
    /// Groups of equal size that the experts form.
    pub n_group: usize,
    /// Groups kept for a token.
    pub topk_group: usize,
    /// Experts chosen for a token.
    pub top_k: usize,
    /// Whether the weights of a token are divided by their sum.
    pub norm_topk_prob: bool,
    /// Factor of the weights, with or without normalisation.
    pub routed_scaling_factor: f32,
}

/// The router of a layer; scores and bias are f32, whatever the model's type.
///
/// The score of an expert is the sigmoid of its logit. The correction bias takes part in the
/// choice (of groups by the sum of their two best, then of experts within the kept groups) and not
/// in the weights. Ties go to the lowest expert id.
#[derive(Clone, Debug)]
pub struct Router {
    gate: PackedLinear,
    bias: Vec<f32>,
    config: RouterConfig,
}

impl Router {
    /// A router from its gate `[n_experts, hidden]` and correction bias `[n_experts]`.
    ///
    /// # Panics
    ///
    /// If lengths do not match, groups are not of equal size, or the kept groups have fewer than
    /// `top_k` experts.
    #[must_use]
    pub fn new(gate: &[f32], bias: &[f32], config: RouterConfig) -> Self {
        let n_experts = bias.len();
        assert!(n_experts > 0 && gate.len().is_multiple_of(n_experts), "gate is [E, hidden]");
        assert!(
            config.n_group > 0 && n_experts.is_multiple_of(config.n_group),
            "groups have one size"
        );
        assert!(config.topk_group <= config.n_group, "kept groups exist");
        let n_eligible = n_experts / config.n_group * config.topk_group;
        assert!(config.top_k > 0 && config.top_k <= n_eligible, "chosen experts exist");
        let gate = PackedLinear::from_f32(gate, gate.len() / n_experts);
        Self { gate, bias: bias.to_vec(), config }
    }

    /// Chooses experts for `x` `[n_tokens, hidden]`; `ids` and `weights` are `[n_tokens, top_k]`,
    /// best expert first.
    ///
    /// # Panics
    ///
    /// If the lengths do not match.
    pub fn route(&self, x: &[f32], ids: &mut [i32], weights: &mut [f32]) {
        let isa = Isa::detect();
        let n_tokens = x.len() / self.gate.n_in();
        assert_eq!(ids.len(), n_tokens * self.config.top_k, "ids is [n_tokens, top_k]");
        assert_eq!(weights.len(), ids.len(), "weights is [n_tokens, top_k]");
        let n_experts = self.bias.len();
        let mut scores = vec![0.0; n_tokens * n_experts];
        self.gate.forward_on(isa, x, &mut scores);
        dispatch(isa, Sigmoid(&mut scores));
        let mut choice = Choice::new(n_experts, self.config.n_group);
        let tokens = scores.chunks_exact(n_experts);
        let ids = ids.chunks_exact_mut(self.config.top_k);
        let weights = weights.chunks_exact_mut(self.config.top_k);
        for ((scores, ids), weights) in tokens.zip(ids).zip(weights) {
            choice.choose(scores, &self.bias, &self.config, ids);
            self.weigh(scores, ids, weights);
        }
    }

    fn weigh(&self, scores: &[f32], ids: &[i32], weights: &mut [f32]) {
        for (weight, &id) in weights.iter_mut().zip(ids) {
            *weight = scores[id as usize];
        }
        // The addend keeps the quotient finite when all chosen scores are zero.
        let total = weights.iter().sum::<f32>() + 1e-20;
        for weight in weights {
            if self.config.norm_topk_prob {
                *weight /= total;
            }
            *weight *= self.config.routed_scaling_factor;
        }
    }
}

struct Sigmoid<'a>(&'a mut [f32]);

impl Kernel for Sigmoid<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: F32x16>(self) {
        for values in self.0.chunks_mut(LANES) {
            store_prefix(sigmoid::<V>(load_padded(values)), values);
        }
    }
}

/// The choice of one token's experts; the buffers are reused.
struct Choice {
    /// Biased scores by expert; those that cannot be chosen any more are NaN.
    biased: Vec<f32>,
    /// Scores by group; those of kept groups become NaN.
    groups: Vec<f32>,
}

impl Choice {
    fn new(n_experts: usize, n_group: usize) -> Self {
        Self { biased: vec![0.0; n_experts], groups: vec![0.0; n_group] }
    }

    fn choose(&mut self, scores: &[f32], bias: &[f32], config: &RouterConfig, ids: &mut [i32]) {
        for (biased, (score, bias)) in self.biased.iter_mut().zip(scores.iter().zip(bias)) {
            // A broken score loses against every other one and can still be chosen.
            let sum = score + bias;
            *biased = if sum.is_nan() { f32::NEG_INFINITY } else { sum };
        }
        self.drop_groups(config);
        for id in ids {
            let best = take_best(&mut self.biased);
            *id = best as i32;
        }
    }

    /// Makes the experts outside the kept groups ineligible.
    fn drop_groups(&mut self, config: &RouterConfig) {
        if config.topk_group == config.n_group {
            return;
        }
        let group_size = self.biased.len() / config.n_group;
        for (group, biased) in self.groups.iter_mut().zip(self.biased.chunks_exact(group_size)) {
            *group = sum_of_two_best(biased);
        }
        for _ in 0..config.topk_group {
            take_best(&mut self.groups);
        }
        for (group, biased) in self.groups.iter().zip(self.biased.chunks_exact_mut(group_size)) {
            if !group.is_nan() {
                biased.fill(f32::NAN);
            }
        }
    }
}

/// The index of the greatest value, the lowest among equals; the value becomes NaN, that is taken.
fn take_best(values: &mut [f32]) -> usize {
    let mut best: Option<usize> = None;
    for (i, value) in values.iter().enumerate() {
        if !value.is_nan() && best.is_none_or(|best| *value > values[best]) {
            best = Some(i);
        }
    }
    let best = best.expect("a router has enough eligible experts");
    values[best] = f32::NAN;
    best
}

/// The sum of the two greatest values, or the only value.
fn sum_of_two_best(values: &[f32]) -> f32 {
    let (mut first, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
    for &value in values {
        if value > first {
            (first, second) = (value, first);
        } else if value > second {
            second = value;
        }
    }
    if values.len() == 1 { first } else { first + second }
}

#[cfg(test)]
mod tests;

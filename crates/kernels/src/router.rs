//! Expert selection: scores of all experts, the choice of the best, and their weights.

use crate::exp::{exp, sigmoid};
use crate::linear::PackedLinear;
use crate::simd::{F32x16, Isa, Kernel, LANES, dispatch, load_padded, store_prefix};

/// How the logits of a token become scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouterScoring {
    /// Each logit for itself.
    Sigmoid,
    /// Over all experts.
    Softmax,
}

/// Which experts a token may choose from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertChoice {
    /// Those of the groups with the greatest sums of their two best.
    NoauxTc,
    /// All of them, whatever the groups.
    Greedy,
    /// Those of the groups with the greatest best.
    GroupLimitedGreedy,
}

/// How experts are chosen and weighted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RouterConfig {
    /// How logits become scores.
    pub scoring: RouterScoring,
    /// How groups limit the choice.
    pub choice: ExpertChoice,
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

impl RouterConfig {
    fn limits_groups(&self) -> bool {
        self.choice != ExpertChoice::Greedy && self.topk_group < self.n_group
    }
}

/// The router of a layer; scores and bias are f32, whatever the model's type.
///
/// The correction bias, if there is one, takes part in the choice (of groups, then of experts
/// within the kept groups) and not in the weights. Ties go to the lowest expert id.
#[derive(Clone, Debug)]
pub struct Router {
    gate: PackedLinear,
    /// Zeros where there is none.
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
    pub fn new(gate: &[f32], hidden: usize, bias: Option<&[f32]>, config: RouterConfig) -> Self {
        let gate = PackedLinear::from_f32(gate, hidden);
        let n_experts = gate.n_out();
        let bias = bias.map_or_else(|| vec![0.0; n_experts], <[f32]>::to_vec);
        assert!(n_experts > 0 && bias.len() == n_experts, "bias is [n_experts]");
        assert!(
            config.n_group > 0 && n_experts.is_multiple_of(config.n_group),
            "groups have one size"
        );
        assert!(config.topk_group <= config.n_group, "kept groups exist");
        let n_kept = if config.limits_groups() { config.topk_group } else { config.n_group };
        let n_eligible = n_experts / config.n_group * n_kept;
        assert!(config.top_k > 0 && config.top_k <= n_eligible, "chosen experts exist");
        Self { gate, bias, config }
    }

    /// Chooses experts for `x` `[n_tokens, hidden]`; `ids` and `weights` are `[n_tokens, top_k]`,
    /// best expert first.
    ///
    /// # Panics
    ///
    /// If the lengths do not match.
    pub fn route(&self, x: &[f32], ids: &mut [i32], weights: &mut [f32]) {
        self.route_on(Isa::detect(), x, ids, weights);
    }

    pub(crate) fn route_on(&self, isa: Isa, x: &[f32], ids: &mut [i32], weights: &mut [f32]) {
        let n_tokens = x.len() / self.gate.n_in();
        assert_eq!(ids.len(), n_tokens * self.config.top_k, "ids is [n_tokens, top_k]");
        assert_eq!(weights.len(), ids.len(), "weights is [n_tokens, top_k]");
        let n_experts = self.bias.len();
        let mut scores = vec![0.0; n_tokens * n_experts];
        self.gate.forward_on(isa, x, &mut scores);
        match self.config.scoring {
            RouterScoring::Sigmoid => dispatch(isa, Sigmoid(&mut scores)),
            RouterScoring::Softmax => dispatch(isa, Softmax(&mut scores, n_experts)),
        }
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

/// Of each `n_experts` logits.
struct Softmax<'a>(&'a mut [f32], usize);

impl Kernel for Softmax<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: F32x16>(self) {
        for row in self.0.chunks_exact_mut(self.1) {
            // A NaN is passed over here and makes the whole row NaN below.
            let max = V::splat(row.iter().fold(f32::NEG_INFINITY, |max, &x| max.max(x)));
            let mut totals = V::splat(0.0);
            for values in row.chunks_mut(LANES) {
                store_prefix(exp(load_padded::<V>(values).sub(max)), values);
                // Read back, so that the padding is zero and adds nothing.
                totals = totals.add(load_padded(values));
            }
            let total = V::splat(totals.sum());
            for values in row.chunks_mut(LANES) {
                store_prefix(load_padded::<V>(values).div(total), values);
            }
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
        if !config.limits_groups() {
            return;
        }
        let group_size = self.biased.len() / config.n_group;
        for (group, biased) in self.groups.iter_mut().zip(self.biased.chunks_exact(group_size)) {
            *group = match config.choice {
                ExpertChoice::NoauxTc => sum_of_two_best(biased),
                _ => biased.iter().copied().fold(f32::NEG_INFINITY, f32::max),
            };
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

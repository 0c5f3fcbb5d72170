//! The noaux_tc expert router.

use kernels::PackedLinear;
use model_config::MoeConfig;
use tch::{Kind, Tensor};
use torch_ext::{TensorError, slice, slice_mut};

use crate::ops::{Ops, matrix, pack, rows};

/// Chooses experts by sigmoid score plus correction bias inside the best groups, and weighs them
/// by score alone. Everything is float32; of equal choices the lowest id wins.
#[derive(Debug)]
pub struct Router {
    form: Form,
    config: MoeConfig,
}

#[derive(Debug)]
enum Form {
    Torch { gate: Tensor, bias: Tensor },
    Fused { gate: PackedLinear, bias: Vec<f32> },
}

/// The experts of each row, best first.
#[derive(Debug)]
pub struct Routing {
    /// Expert ids, i64 `[T, num_experts_per_tok]`.
    pub expert_ids: Tensor,
    /// Their weights, f32 `[T, num_experts_per_tok]`.
    pub weights: Tensor,
}

impl Router {
    /// From the float32 weight `[n_routed_experts, hidden]` and correction bias
    /// `[n_routed_experts]`.
    ///
    /// # Errors
    ///
    /// [`TensorError::WrongKind`] if one of them was rounded to less than float32, other variants
    /// if the shapes do not fit.
    pub fn new(
        gate: &Tensor,
        bias: &Tensor,
        config: &MoeConfig,
        ops: Ops,
    ) -> Result<Self, TensorError> {
        for tensor in [gate, bias] {
            let found = tensor.f_kind()?;
            if found != Kind::Float {
                return Err(TensorError::WrongKind { found, expected: Kind::Float });
            }
        }
        let n_experts = config.n_routed_experts;
        if matrix(gate)?.0 != n_experts || bias.size() != [n_experts as i64] {
            return Err(TensorError::WrongShape {
                what: "the bias of a router",
                found: bias.size(),
                expected: vec![n_experts as i64],
            });
        }
        let form = match ops {
            Ops::Torch => Form::Torch { gate: gate.shallow_clone(), bias: bias.shallow_clone() },
            Ops::Fused => {
                Form::Fused { gate: pack(gate)?, bias: slice(&bias.f_contiguous()?)?.to_vec() }
            }
        };
        Ok(Self { form, config: config.clone() })
    }

    /// Routes the rows of `x` `[T, hidden]`.
    ///
    /// # Errors
    ///
    /// [`TensorError`] if `x` does not fit.
    pub fn forward(&self, x: &Tensor) -> Result<Routing, TensorError> {
        match &self.form {
            Form::Torch { gate, bias } => plain(x, gate, bias, &self.config),
            Form::Fused { gate, .. } => {
                let (rows, n_rows) = rows(x, gate.n_in())?;
                let size = [n_rows as i64, self.config.num_experts_per_tok as i64];
                let mut expert_ids = torch_ext::empty::<i64>(&size)?;
                let mut weights = torch_ext::empty::<f32>(&size)?;
                let ids = slice_mut::<i64>(&mut expert_ids)?.iter_mut();
                let slots = ids.zip(slice_mut::<f32>(&mut weights)?);
                for ((id, weight), choice) in slots.zip(self.route(rows)) {
                    (*id, *weight) = (choice.expert as i64, choice.weight);
                }
                Ok(Routing { expert_ids, weights })
            }
        }
    }

    /// The choices of the rows of `x` `[T, hidden]`, `[T, num_experts_per_tok]`; fused form only.
    pub(crate) fn route(&self, x: &[f32]) -> Vec<Choice> {
        let Form::Fused { gate, bias } = &self.form else {
            unreachable!("slices are routed by fused layers only")
        };
        let n_rows = x.len() / gate.n_in();
        let mut scores = vec![0.0; n_rows * gate.n_out()];
        gate.forward(x, &mut scores);
        let mut choices = Vec::with_capacity(n_rows * self.config.num_experts_per_tok);
        for scores in scores.chunks_exact_mut(gate.n_out()) {
            scores.iter_mut().for_each(|score| *score = 1.0 / (1.0 + (-*score).exp()));
            choose(scores, bias, &self.config, &mut choices);
        }
        choices
    }
}

/// One expert of one row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Choice {
    pub(crate) expert: usize,
    pub(crate) weight: f32,
}

fn plain(
    x: &Tensor,
    gate: &Tensor,
    bias: &Tensor,
    config: &MoeConfig,
) -> Result<Routing, TensorError> {
    let (n_rows, n_group) = (x.size()[0], config.n_group as i64);
    let group_size = config.n_routed_experts as i64 / n_group;
    let scores = x.f_to_kind(Kind::Float)?.f_linear(gate, None::<&Tensor>)?.f_sigmoid()?;
    let mut biased = scores.f_add(bias)?;
    if n_group > 1 {
        let groups = biased.f_view([n_rows, n_group, group_size])?;
        let best_two = groups.f_topk(group_size.min(2), -1, true, true)?.0;
        let group_scores = best_two.f_sum_dim_intlist(-1, false, Kind::Float)?;
        let kept = best(&group_scores, config.topk_group)?;
        let dropped = Tensor::f_ones_like(&group_scores)?.f_scatter_value(1, &kept, 0.0)?;
        let dropped = dropped.f_to_kind(Kind::Bool)?.f_unsqueeze(-1)?;
        biased = groups.f_masked_fill(&dropped, f64::NEG_INFINITY)?.f_view_as(&biased)?;
    }
    let expert_ids = best(&biased, config.num_experts_per_tok)?;
    let mut weights = scores.f_gather(1, &expert_ids, false)?;
    if config.norm_topk_prob {
        let sum = weights.f_sum_dim_intlist(-1, true, Kind::Float)?.f_add_scalar(1e-20)?;
        weights = weights.f_div(&sum)?;
    }
    Ok(Routing { expert_ids, weights: weights.f_mul_scalar(config.routed_scaling_factor)? })
}

/// The columns of the `k` highest values of each row, best first, of equals the lowest.
fn best(values: &Tensor, k: usize) -> Result<Tensor, TensorError> {
    let order = values.f_sort_stable(true, -1, true)?.1;
    Ok(order.f_narrow(1, 0, k as i64)?)
}

/// Appends the choices of one row to `choices`.
fn choose(scores: &[f32], bias: &[f32], config: &MoeConfig, choices: &mut Vec<Choice>) {
    let mut biased: Vec<f32> = scores.iter().zip(bias).map(|(score, bias)| score + bias).collect();
    let group_size = biased.len() / config.n_group;
    if config.n_group > 1 {
        let group_scores = biased.chunks_exact(group_size).map(best_two).collect::<Vec<_>>();
        let mut remaining = group_scores;
        for _ in 0..config.n_group - config.topk_group {
            // Of equal groups the highest is dropped first, so that the lowest wins.
            let worst = last_lowest(&remaining);
            remaining[worst] = f32::INFINITY;
            biased[worst * group_size..][..group_size].fill(f32::NEG_INFINITY);
        }
    }
    let start = choices.len();
    for _ in 0..config.num_experts_per_tok {
        let expert = first_highest(&biased);
        biased[expert] = f32::NEG_INFINITY;
        choices.push(Choice { expert, weight: scores[expert] });
    }
    let chosen = &mut choices[start..];
    let sum: f32 = chosen.iter().map(|choice| choice.weight).sum();
    let divisor = if config.norm_topk_prob { sum + 1e-20 } else { 1.0 };
    let scale = config.routed_scaling_factor as f32;
    chosen.iter_mut().for_each(|choice| choice.weight = choice.weight / divisor * scale);
}

fn best_two(values: &[f32]) -> f32 {
    let mut top = [f32::NEG_INFINITY; 2];
    for &value in values {
        if value > top[0] {
            top = [value, top[0]];
        } else if value > top[1] {
            top[1] = value;
        }
    }
    if values.len() == 1 { top[0] } else { top[0] + top[1] }
}

fn first_highest(values: &[f32]) -> usize {
    (1..values.len()).fold(0, |best, i| if values[i] > values[best] { i } else { best })
}

fn last_lowest(values: &[f32]) -> usize {
    (1..values.len()).fold(0, |worst, i| if values[i] <= values[worst] { i } else { worst })
}

#[cfg(test)]
mod tests;

//! The expert router.

use kernels::RouterConfig;
use model_config::{ExpertChoice, MoeConfig, RouterScoring};
use tch::{Kind, Tensor};
use torch_ext::{TensorError, empty, slice, slice_mut};

use crate::ops::{Ops, matrix, rows};

/// Chooses experts by score plus correction bias, if there is one, inside the best groups, and
/// weighs them by score alone. Everything is float32; of equal choices the lowest id wins.
#[derive(Debug)]
pub struct Router {
    form: Form,
    config: MoeConfig,
    hidden: usize,
}

#[derive(Debug)]
enum Form {
    Torch { gate: Tensor, bias: Option<Tensor> },
    Fused(kernels::Router),
}

/// The experts of each row, best first.
#[derive(Debug)]
pub struct Routing {
    /// Expert ids, i32 `[T, num_experts_per_tok]`.
    pub expert_ids: Tensor,
    /// Their weights, f32 `[T, num_experts_per_tok]`.
    pub weights: Tensor,
}

impl Router {
    /// From the float32 weight `[n_routed_experts, hidden]` and the correction bias
    /// `[n_routed_experts]`, which a config without one has not.
    ///
    /// # Errors
    ///
    /// [`TensorError::WrongKind`] if one of them was rounded to less than float32, other variants
    /// if the shapes do not fit.
    pub fn new(
        gate: &Tensor,
        bias: Option<&Tensor>,
        config: &MoeConfig,
        ops: Ops,
    ) -> Result<Self, TensorError> {
        for tensor in [Some(gate), bias].into_iter().flatten() {
            let found = tensor.f_kind()?;
            if found != Kind::Float {
                return Err(TensorError::WrongKind { found, expected: Kind::Float });
            }
        }
        let n_experts = config.n_routed_experts;
        let (n_outputs, hidden) = matrix(&gate.into())?;
        let found = bias.map_or_else(|| vec![n_outputs as i64], Tensor::size);
        if n_outputs != n_experts || found != [n_experts as i64] {
            return Err(TensorError::WrongShape {
                what: "a router",
                found,
                expected: vec![n_experts as i64],
            });
        }
        let form = match ops {
            Ops::Torch => {
                let bias = bias.map(Tensor::shallow_clone);
                Form::Torch { gate: gate.shallow_clone(), bias }
            }
            Ops::Fused => {
                let bias = bias.map(slice).transpose()?;
                let config = fused_config(config);
                Form::Fused(kernels::Router::new(slice(gate)?, hidden, bias, config))
            }
        };
        Ok(Self { form, config: config.clone(), hidden })
    }

    /// Routes the rows of `x` `[T, hidden]`.
    ///
    /// # Errors
    ///
    /// [`TensorError`] if `x` does not fit.
    pub fn forward(&self, x: &Tensor) -> Result<Routing, TensorError> {
        match &self.form {
            Form::Torch { gate, bias } => plain(x, gate, bias.as_ref(), &self.config),
            Form::Fused(router) => {
                let (rows, n_rows) = rows(x, self.hidden)?;
                let size = [n_rows as i64, self.config.num_experts_per_tok as i64];
                let (mut expert_ids, mut weights) = (empty::<i32>(&size)?, empty::<f32>(&size)?);
                router.route(rows, slice_mut(&mut expert_ids)?, slice_mut(&mut weights)?);
                Ok(Routing { expert_ids, weights })
            }
        }
    }
}

fn fused_config(config: &MoeConfig) -> RouterConfig {
    RouterConfig {
        scoring: match config.scoring {
            RouterScoring::Sigmoid => kernels::RouterScoring::Sigmoid,
            RouterScoring::Softmax => kernels::RouterScoring::Softmax,
        },
        choice: match config.choice {
            ExpertChoice::NoauxTc => kernels::ExpertChoice::NoauxTc,
            ExpertChoice::Greedy => kernels::ExpertChoice::Greedy,
            ExpertChoice::GroupLimitedGreedy => kernels::ExpertChoice::GroupLimitedGreedy,
        },
        n_group: config.n_group,
        topk_group: config.topk_group,
        top_k: config.num_experts_per_tok,
        norm_topk_prob: config.norm_topk_prob,
        routed_scaling_factor: config.routed_scaling_factor as f32,
    }
}

fn plain(
    x: &Tensor,
    gate: &Tensor,
    bias: Option<&Tensor>,
    config: &MoeConfig,
) -> Result<Routing, TensorError> {
    let logits = x.f_to_kind(Kind::Float)?.f_linear(gate, None::<&Tensor>)?;
    let scores = match config.scoring {
        RouterScoring::Sigmoid => logits.f_sigmoid()?,
        RouterScoring::Softmax => logits.f_softmax(-1, Kind::Float)?,
    };
    let mut biased = match bias {
        Some(bias) => scores.f_add(bias)?,
        None => scores.shallow_clone(),
    };
    if config.choice != ExpertChoice::Greedy && config.n_group > 1 {
        biased = within_best_groups(&biased, config)?;
    }
    let expert_ids = best(&biased, config.num_experts_per_tok)?;
    let mut weights = scores.f_gather(1, &expert_ids, false)?;
    if config.norm_topk_prob {
        let sum = weights.f_sum_dim_intlist(-1, true, Kind::Float)?.f_add_scalar(1e-20)?;
        weights = weights.f_div(&sum)?;
    }
    Ok(Routing {
        expert_ids: expert_ids.f_to_kind(Kind::Int)?,
        weights: weights.f_mul_scalar(config.routed_scaling_factor)?,
    })
}

/// The same values, but -inf outside the best groups.
fn within_best_groups(biased: &Tensor, config: &MoeConfig) -> Result<Tensor, TensorError> {
    let group_size = (config.n_routed_experts / config.n_group) as i64;
    let groups = biased.f_view([-1, config.n_group as i64, group_size])?;
    let n_best = if config.choice == ExpertChoice::NoauxTc { group_size.min(2) } else { 1 };
    let best_of_each = groups.f_topk(n_best, -1, true, true)?.0;
    let group_scores = best_of_each.f_sum_dim_intlist(-1, false, Kind::Float)?;
    let kept = best(&group_scores, config.topk_group)?;
    let dropped = Tensor::f_ones_like(&group_scores)?.f_scatter_value(1, &kept, 0.0)?;
    let dropped = dropped.f_to_kind(Kind::Bool)?.f_unsqueeze(-1)?;
    Ok(groups.f_masked_fill(&dropped, f64::NEG_INFINITY)?.f_view_as(biased)?)
}

/// The columns of the `k` highest values of each row, best first, of equals the lowest.
fn best(values: &Tensor, k: usize) -> Result<Tensor, TensorError> {
    let order = values.f_sort_stable(true, -1, true)?.1;
    Ok(order.f_narrow(1, 0, k as i64)?)
}

#[cfg(test)]
mod tests;

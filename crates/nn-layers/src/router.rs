//! The noaux_tc expert router.

use kernels::RouterConfig;
use model_config::MoeConfig;
use tch::{Kind, Tensor};
use torch_ext::{TensorError, empty, slice, slice_mut};

use crate::ops::{Ops, matrix, rows};

/// Chooses experts by sigmoid score plus correction bias inside the best groups, and weighs them
/// by score alone. Everything is float32; of equal choices the lowest id wins.
#[derive(Debug)]
pub struct Router {
    form: Form,
    config: MoeConfig,
    hidden: usize,
}

#[derive(Debug)]
enum Form {
    Torch { gate: Tensor, bias: Tensor },
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
        let (n_outputs, hidden) = matrix(gate)?;
        if n_outputs != n_experts || bias.size() != [n_experts as i64] {
            return Err(TensorError::WrongShape {
                what: "the bias of a router",
                found: bias.size(),
                expected: vec![n_experts as i64],
            });
        }
        let form = match ops {
            Ops::Torch => Form::Torch { gate: gate.shallow_clone(), bias: bias.shallow_clone() },
            Ops::Fused => {
                let config = fused_config(config);
                Form::Fused(kernels::Router::new(slice(gate)?, slice(bias)?, config))
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
            Form::Torch { gate, bias } => plain(x, gate, bias, &self.config),
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
    Ok(Routing {
        expert_ids: expert_ids.f_to_kind(Kind::Int)?,
        weights: weights.f_mul_scalar(config.routed_scaling_factor)?,
    })
}

/// The columns of the `k` highest values of each row, best first, of equals the lowest.
fn best(values: &Tensor, k: usize) -> Result<Tensor, TensorError> {
    let order = values.f_sort_stable(true, -1, true)?.1;
    Ok(order.f_narrow(1, 0, k as i64)?)
}

#[cfg(test)]
mod tests;

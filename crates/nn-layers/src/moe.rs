//! Mixture of experts.

use model_config::MoeConfig;
use tch::Tensor;
use torch_ext::{TensorError, empty, slice_mut};

use crate::mlp::GatedMlp;
use crate::ops::{Ops, rows};
use crate::router::Router;

/// The weights of a mixture of experts; gate, up and down of an expert as for [`GatedMlp`].
#[derive(Debug)]
pub struct MoeWeights {
    /// Router weight, float32 `[n_routed_experts, hidden]`.
    pub gate: Tensor,
    /// Router correction bias, float32 `[n_routed_experts]`.
    pub bias: Tensor,
    /// The routed experts.
    pub experts: Vec<[Tensor; 3]>,
    /// The shared experts as one MLP, if there are any.
    pub shared: Option<[Tensor; 3]>,
}

/// Routed experts, weighted by the router, plus the shared experts.
#[derive(Debug)]
pub struct MoeMlp {
    router: Router,
    experts: Vec<GatedMlp>,
    shared: Option<GatedMlp>,
    ops: Ops,
    hidden: usize,
    experts_per_token: usize,
}

impl MoeMlp {
    /// From its weights.
    ///
    /// # Errors
    ///
    /// [`TensorError`] if shapes do not fit or the router is not float32.
    pub fn new(weights: &MoeWeights, config: &MoeConfig, ops: Ops) -> Result<Self, TensorError> {
        let mlp = |weights: &[Tensor; 3]| GatedMlp::new(weights.each_ref(), ops);
        Ok(Self {
            router: Router::new(&weights.gate, &weights.bias, config, ops)?,
            experts: weights.experts.iter().map(mlp).collect::<Result<_, _>>()?,
            shared: weights.shared.as_ref().map(mlp).transpose()?,
            ops,
            hidden: weights.gate.size()[1] as usize,
            experts_per_token: config.num_experts_per_tok,
        })
    }

    /// `x` `[T, hidden]` to `[T, hidden]`.
    ///
    /// # Errors
    ///
    /// [`TensorError`] if `x` does not fit.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor, TensorError> {
        match self.ops {
            Ops::Torch => self.forward_plain(x),
            Ops::Fused => {
                let (rows, _) = rows(x, self.hidden)?;
                let mut out = empty::<f32>(&x.size())?;
                self.forward_fused(rows, slice_mut(&mut out)?);
                Ok(out)
            }
        }
    }

    fn forward_plain(&self, x: &Tensor) -> Result<Tensor, TensorError> {
        let routing = self.router.forward(x)?;
        let mut out = match &self.shared {
            Some(shared) => shared.forward(x)?,
            None => x.f_zeros_like()?,
        };
        let weights = routing.weights.f_to_kind(x.f_kind()?)?;
        for (expert_idx, expert) in self.experts.iter().enumerate() {
            let hits = routing.expert_ids.f_eq(expert_idx as i64)?.f_nonzero()?;
            if hits.size()[0] == 0 {
                continue;
            }
            let (token, slot) = (hits.f_select(1, 0)?, hits.f_select(1, 1)?);
            let weight = weights.f_index(&[Some(&token), Some(&slot)])?.f_unsqueeze(1)?;
            let rows = expert.forward(&x.f_index_select(0, &token)?)?.f_mul(&weight)?;
            let _ = out.f_index_add_(0, &token, &rows)?;
        }
        Ok(out)
    }

    /// Experts run in ascending order, so that a row sums its experts in an order of its own.
    fn forward_fused(&self, x: &[f32], out: &mut [f32]) {
        match &self.shared {
            Some(shared) => shared.packed().forward(x, out),
            None => out.fill(0.0),
        }
        let hidden = self.hidden;
        let choices = self.router.route(x);
        let mut inputs = Vec::new();
        let mut outputs = Vec::new();
        for (expert_idx, expert) in self.experts.iter().enumerate() {
            let hits = || choices.iter().enumerate().filter(|(_, c)| c.expert == expert_idx);
            let row_of = |choice_idx: usize| choice_idx / self.experts_per_token * hidden;
            inputs.clear();
            hits().for_each(|(i, _)| inputs.extend_from_slice(&x[row_of(i)..][..hidden]));
            if inputs.is_empty() {
                continue;
            }
            outputs.resize(inputs.len(), 0.0);
            expert.packed().forward(&inputs, &mut outputs);
            for ((i, choice), output) in hits().zip(outputs.chunks_exact(hidden)) {
                let row = &mut out[row_of(i)..][..hidden];
                row.iter_mut().zip(output).for_each(|(sum, value)| *sum += choice.weight * value);
            }
        }
    }
}

#[cfg(test)]
mod tests;

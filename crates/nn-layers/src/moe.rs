//! Mixture of experts.

use kernels::{MoeExperts, SwiGluMlp};
use model_config::MoeConfig;
use tch::Tensor;
use torch_ext::{TensorError, empty, slice, slice_mut};

use crate::mlp::{GatedMlp, pack_mlp};
use crate::ops::Ops;
use crate::router::{Router, Routing};

/// The weights of a mixture of experts; gate, up and down of an expert as for [`GatedMlp`].
#[derive(Debug)]
pub struct MoeWeights {
    /// Router weight, float32 `[n_routed_experts, hidden]`.
    pub gate: Tensor,
    /// Router correction bias, float32 `[n_routed_experts]`, if the config has one.
    pub bias: Option<Tensor>,
    /// The routed experts.
    pub experts: Vec<[Tensor; 3]>,
    /// The shared experts as one MLP, if there are any.
    pub shared: Option<[Tensor; 3]>,
}

/// Routed experts, weighted by the router, plus the shared experts.
#[derive(Debug)]
pub struct MoeMlp {
    router: Router,
    experts: Experts,
    shared: Option<GatedMlp>,
}

#[derive(Debug)]
enum Experts {
    Torch(Vec<GatedMlp>),
    Fused(MoeExperts),
}

impl MoeMlp {
    /// From its weights.
    ///
    /// # Errors
    ///
    /// [`TensorError`] if shapes do not fit or the router is not float32.
    pub fn new(weights: &MoeWeights, config: &MoeConfig, ops: Ops) -> Result<Self, TensorError> {
        let mlp = |weights: &[Tensor; 3]| GatedMlp::new(weights.each_ref(), ops);
        let pack = |weights: &[Tensor; 3]| pack_mlp(weights.each_ref());
        let experts = weights.experts.iter();
        Ok(Self {
            router: Router::new(&weights.gate, weights.bias.as_ref(), config, ops)?,
            experts: match ops {
                Ops::Torch => Experts::Torch(experts.map(mlp).collect::<Result<_, _>>()?),
                Ops::Fused => {
                    let packed = experts.map(pack).collect::<Result<Vec<SwiGluMlp>, _>>()?;
                    Experts::Fused(MoeExperts::new(packed))
                }
            },
            shared: weights.shared.as_ref().map(mlp).transpose()?,
        })
    }

    /// `x` `[T, hidden]` to `[T, hidden]`.
    ///
    /// # Errors
    ///
    /// [`TensorError`] if `x` does not fit.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor, TensorError> {
        let Routing { expert_ids, weights } = self.router.forward(x)?;
        let mut out = match &self.experts {
            Experts::Torch(experts) => forward_plain(experts, x, (&expert_ids, &weights))?,
            Experts::Fused(experts) => {
                let mut out = empty::<f32>(&x.size())?;
                let (ids, weights) = (slice(&expert_ids)?, slice(&weights)?);
                experts.forward(slice(x)?, ids, weights, slice_mut(&mut out)?);
                out
            }
        };
        if let Some(shared) = &self.shared {
            let _ = out.f_add_(&shared.forward(x)?)?;
        }
        Ok(out)
    }
}

fn forward_plain(
    experts: &[GatedMlp],
    x: &Tensor,
    (expert_ids, weights): (&Tensor, &Tensor),
) -> Result<Tensor, TensorError> {
    let mut out = x.f_zeros_like()?;
    let weights = weights.f_to_kind(x.f_kind()?)?;
    for (expert_idx, expert) in experts.iter().enumerate() {
        let hits = expert_ids.f_eq(expert_idx as i64)?.f_nonzero()?;
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

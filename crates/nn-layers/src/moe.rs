//! Mixture of experts.

use kernels::MoeExperts;
use model_config::MoeConfig;
use tch::Tensor;
use torch_ext::{TensorError, empty, slice, slice_mut};

use crate::mlp::GatedMlp;
use crate::ops::Ops;
use crate::router::{Router, Routing};

/// The parts of a mixture of experts. Experts come built, so that whoever reads a checkpoint needs
/// to hold the stored weights of one of them at a time.
#[derive(Debug)]
pub struct MoeParts {
    /// Router weight, float32 `[n_routed_experts, hidden]`.
    pub gate: Tensor,
    /// Router correction bias, float32 `[n_routed_experts]`, if the config has one.
    pub bias: Option<Tensor>,
    /// The routed experts.
    pub experts: Vec<GatedMlp>,
    /// The shared experts as one MLP, if there are any.
    pub shared: Option<GatedMlp>,
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
    /// From its parts; `ops` is what the experts were built with.
    ///
    /// # Errors
    ///
    /// [`TensorError`] if shapes do not fit or the router is not float32.
    ///
    /// # Panics
    ///
    /// If the experts were built with other `ops`.
    pub fn new(parts: MoeParts, config: &MoeConfig, ops: Ops) -> Result<Self, TensorError> {
        let MoeParts { gate, bias, experts, shared } = parts;
        Ok(Self {
            router: Router::new(&gate, bias.as_ref(), config, ops)?,
            experts: match ops {
                Ops::Torch => Experts::Torch(experts),
                Ops::Fused => {
                    let fused = experts.into_iter().map(GatedMlp::into_fused).collect();
                    Experts::Fused(MoeExperts::new(fused))
                }
            },
            shared,
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

//! From checkpoint names to layers.

use model_config::{AttentionConfig, ModelConfig};
use nn_layers::{GatedMlp, Linear, MoeMlp, MoeParts, Ops, RmsNorm};
use tch::Tensor;
use weights::{LoadedWeight, TensorMap, WeightsError};

use crate::decoder_layer::{Attention, DecoderLayer, FeedForward};
use crate::deepseek_v3::LatentAttention;
use crate::error::LoadError;
use crate::glm4_moe::GroupedAttention;

/// Takes tensors out of a map and builds layers of them.
pub(crate) struct LayerBuilder<'a> {
    pub(crate) config: &'a ModelConfig,
    pub(crate) tensors: TensorMap,
    pub(crate) ops: Ops,
}

impl LayerBuilder<'_> {
    pub(crate) fn norm(&mut self, name: &str) -> Result<RmsNorm, LoadError> {
        let weight = self.weight(name)?;
        Ok(RmsNorm::new(&weight, self.config.rms_norm_eps, self.ops)?)
    }

    pub(crate) fn linear(&mut self, name: &str) -> Result<Linear, LoadError> {
        Ok(Linear::new(self.matrix(name)?, self.ops)?)
    }

    /// The same, if the checkpoint has one.
    pub(crate) fn optional_linear(&mut self, name: &str) -> Result<Option<Linear>, LoadError> {
        match self.linear(name) {
            Ok(linear) => Ok(Some(linear)),
            Err(LoadError::Weights(WeightsError::NotLoaded { .. })) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The layer that a checkpoint calls `model.layers.{layer_idx}`.
    pub(crate) fn decoder_layer(&mut self, layer_idx: usize) -> Result<DecoderLayer, LoadError> {
        let layer = format!("model.layers.{layer_idx}");
        Ok(DecoderLayer {
            input_norm: self.norm(&format!("{layer}.input_layernorm"))?,
            attention: self.attention(layer_idx)?,
            post_attention_norm: self.norm(&format!("{layer}.post_attention_layernorm"))?,
            feed_forward: self.feed_forward(&format!("{layer}.mlp"), layer_idx)?,
        })
    }

    fn attention(&mut self, layer_idx: usize) -> Result<Attention, LoadError> {
        Ok(match &self.config.attention {
            AttentionConfig::Mla(mla) => {
                Attention::Latent(LatentAttention::build(self, mla, layer_idx)?)
            }
            AttentionConfig::Gqa(gqa) => {
                Attention::Grouped(GroupedAttention::build(self, gqa, layer_idx)?)
            }
        })
    }

    fn feed_forward(&mut self, prefix: &str, layer_idx: usize) -> Result<FeedForward, LoadError> {
        let config = self.config;
        let moe = config.moe.as_ref().filter(|_| config.is_moe_layer(layer_idx));
        let Some(moe) = moe else {
            return Ok(FeedForward::Dense(self.mlp(prefix)?));
        };
        let gate = self.weight(&format!("{prefix}.gate"))?;
        let bias = if moe.has_correction_bias() {
            Some(self.tensors.take(&format!("{prefix}.gate.e_score_correction_bias"))?)
        } else {
            None
        };
        let experts = (0..moe.n_routed_experts)
            .map(|expert_idx| self.mlp(&format!("{prefix}.experts.{expert_idx}")))
            .collect::<Result<_, _>>()?;
        let shared = if moe.n_shared_experts > 0 {
            Some(self.mlp(&format!("{prefix}.shared_experts"))?)
        } else {
            None
        };
        let parts = MoeParts { gate, bias, experts, shared };
        Ok(FeedForward::Moe(Box::new(MoeMlp::new(parts, moe, self.ops)?)))
    }

    fn mlp(&mut self, prefix: &str) -> Result<GatedMlp, LoadError> {
        let mut matrix = |name: &str| self.matrix(&format!("{prefix}.{name}"));
        let weights = [matrix("gate_proj")?, matrix("up_proj")?, matrix("down_proj")?];
        Ok(GatedMlp::new(weights, self.ops)?)
    }

    /// A weight in the dtype that the model computes in.
    pub(crate) fn weight(&mut self, name: &str) -> Result<Tensor, LoadError> {
        Ok(self.tensors.take(&format!("{name}.weight"))?)
    }

    /// The weight of a linear layer, which may stay quantised.
    pub(crate) fn matrix(&mut self, name: &str) -> Result<LoadedWeight, LoadError> {
        Ok(self.tensors.take_weight(&format!("{name}.weight"))?)
    }
}

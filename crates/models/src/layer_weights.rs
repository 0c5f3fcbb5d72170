//! From checkpoint names to layers.

use model_config::ModelConfig;
use nn_layers::{
    GatedMlp, Indexer, IndexerWeights, Linear, MlaProjections, MlaWeights, MoeMlp, MoeParts, Ops,
    RmsNorm,
};
use tch::Tensor;
use weights::TensorMap;

use crate::decoder_layer::{DecoderLayer, FeedForward};
use crate::error::LoadError;

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
        Ok(Linear::new(&self.weight(name)?, self.ops)?)
    }

    /// The layer that a checkpoint calls `model.layers.{layer_idx}`.
    pub(crate) fn decoder_layer(&mut self, layer_idx: usize) -> Result<DecoderLayer, LoadError> {
        let layer = format!("model.layers.{layer_idx}");
        Ok(DecoderLayer {
            input_norm: self.norm(&format!("{layer}.input_layernorm"))?,
            attention: self.attention(&format!("{layer}.self_attn"))?,
            indexer: if self.config.has_indexer(layer_idx) {
                Some(self.indexer(&format!("{layer}.self_attn.indexer"))?)
            } else {
                None
            },
            softmax_scale: self.config.softmax_scale(),
            post_attention_norm: self.norm(&format!("{layer}.post_attention_layernorm"))?,
            feed_forward: self.feed_forward(&format!("{layer}.mlp"), layer_idx)?,
        })
    }

    fn attention(&mut self, prefix: &str) -> Result<MlaProjections, LoadError> {
        let config = self.config;
        let has_q_latent = config.attention.q_lora_rank.is_some();
        let mut weight = |name: &str| self.weight(&format!("{prefix}.{name}"));
        let weights = MlaWeights {
            q_a: weight(if has_q_latent { "q_a_proj" } else { "q_proj" })?,
            q_b: if has_q_latent {
                Some((weight("q_a_layernorm")?, weight("q_b_proj")?))
            } else {
                None
            },
            kv_a: weight("kv_a_proj_with_mqa")?,
            kv_a_norm: weight("kv_a_layernorm")?,
            kv_b: weight("kv_b_proj")?,
            o: weight("o_proj")?,
        };
        Ok(MlaProjections::new(&weights, &config.attention, config.rms_norm_eps, self.ops)?)
    }

    fn indexer(&mut self, prefix: &str) -> Result<Indexer, LoadError> {
        let dsa = self.config.dsa.as_ref().expect("an indexer belongs to sparse attention");
        let mut weight = |name: &str| self.weight(&format!("{prefix}.{name}"));
        let (q, k, k_norm) = (weight("wq_b")?, weight("wk")?, weight("k_norm")?);
        let head_weights = weight("weights_proj")?;
        let bias = self.tensors.take(&format!("{prefix}.k_norm.bias"))?;
        let weights = IndexerWeights { q, k, k_norm: (k_norm, bias), head_weights };
        Ok(Indexer::new(&weights, dsa, self.ops)?)
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
        let mut weight = |name: &str| self.weight(&format!("{prefix}.{name}"));
        let weights = [weight("gate_proj")?, weight("up_proj")?, weight("down_proj")?];
        Ok(GatedMlp::new(weights.each_ref(), self.ops)?)
    }

    fn weight(&mut self, name: &str) -> Result<Tensor, LoadError> {
        Ok(self.tensors.take(&format!("{name}.weight"))?)
    }
}

//! What a checkpoint holds, from its headers and its config.

use std::collections::{BTreeMap, BTreeSet};

use model_config::{ConfigSummary, ModelConfig, RawConfig};

use crate::checkpoint::Checkpoint;

/// Stored values by the part of the model that they belong to. For unquantised checkpoints that is
/// the number of parameters; quantisation scales count as values, and packed ones as one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ParameterCounts {
    /// Token embedding of the target.
    pub embeddings: u64,
    /// Attention of the target, with its indexer if it has one.
    pub attention: u64,
    /// Routed experts and routers of the target.
    pub experts: u64,
    /// Shared experts of the target.
    pub shared_experts: u64,
    /// Dense MLPs of the target.
    pub dense_mlp: u64,
    /// Norms of the target outside attention.
    pub norms: u64,
    /// Output head of the target.
    pub head: u64,
    /// Everything of the MTP layers.
    pub mtp: u64,
    /// Tensors that fit none of these.
    pub other: u64,
}

impl ParameterCounts {
    /// All parameters.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.rows().iter().map(|(_, count)| count).sum()
    }

    /// A label and a count for each part, in the order of the fields.
    #[must_use]
    pub fn rows(&self) -> [(&'static str, u64); 9] {
        [
            ("embeddings", self.embeddings),
            ("attention", self.attention),
            ("experts", self.experts),
            ("shared experts", self.shared_experts),
            ("dense mlp", self.dense_mlp),
            ("norms", self.norms),
            ("head", self.head),
            ("mtp", self.mtp),
            ("other", self.other),
        ]
    }

    /// The count that a tensor of this name adds to.
    fn part_of(&mut self, name: &str, num_hidden_layers: Option<usize>) -> &mut u64 {
        if mtp_layer(name, num_hidden_layers).is_some() {
            return &mut self.mtp;
        }
        let Some((_, rest)) = split_layer(name) else {
            return match name.split_once('.') {
                Some(("lm_head", _)) => &mut self.head,
                Some(("model", rest)) if rest.starts_with("embed_tokens.") => &mut self.embeddings,
                Some(("model", rest)) if rest.starts_with("norm.") => &mut self.norms,
                _ => &mut self.other,
            };
        };
        match rest.split('.').collect::<Vec<_>>()[..] {
            ["self_attn", ..] => &mut self.attention,
            ["mlp", "experts" | "gate", ..] => &mut self.experts,
            ["mlp", "shared_experts", ..] => &mut self.shared_experts,
            ["mlp", ..] => &mut self.dense_mlp,
            ["input_layernorm" | "post_attention_layernorm", ..] => &mut self.norms,
            _ => &mut self.other,
        }
    }
}

/// A checkpoint folder described without reading tensor data.
#[derive(Clone, Debug, PartialEq)]
pub struct CheckpointSummary {
    /// What `config.json` says.
    pub config: ConfigSummary,
    /// Parameters by part.
    pub parameters: ParameterCounts,
    /// Bytes of tensor data by stored dtype (safetensors names), sorted by name.
    pub bytes_by_dtype: BTreeMap<String, u64>,
    /// MTP layers that the checkpoint has any tensor of.
    pub num_mtp_layers_present: usize,
    /// Whether every MTP tensor that drafting needs is there in its shape; `None` if the model
    /// cannot be run by this version, so that its needs are unknown, or has no MTP layers.
    pub is_mtp_complete: Option<bool>,
    /// Why this version cannot run the model, be it its config or a tensor of the target that is
    /// missing or misshapen; `None` if it can.
    pub refusal: Option<String>,
}

impl CheckpointSummary {
    /// Bytes of tensor data.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        self.bytes_by_dtype.values().sum()
    }
}

impl Checkpoint {
    /// Describes the checkpoint; `raw` is its config. Works for every model type.
    #[must_use]
    pub fn summarize(&self, raw: &RawConfig) -> CheckpointSummary {
        let config = ConfigSummary::new(raw);
        let mut parameters = ParameterCounts::default();
        let mut bytes_by_dtype = BTreeMap::new();
        let mut mtp_layers = BTreeSet::new();
        for info in self.tensors() {
            let n_values: u64 = info.shape.iter().map(|&n| n as u64).product();
            *parameters.part_of(info.name, config.num_hidden_layers) += n_values;
            *bytes_by_dtype.entry(format!("{:?}", info.dtype)).or_default() += info.n_bytes as u64;
            mtp_layers.extend(mtp_layer(info.name, config.num_hidden_layers));
        }
        let model = ModelConfig::from_raw(raw).ok();
        let drafting = model.as_ref().filter(|model| model.num_mtp_layers > 0);
        let is_mtp_complete = drafting.map(|model| self.check_mtp(model).is_ok());
        let fault = model.and_then(|model| self.check(&model.target_tensors()).err());
        CheckpointSummary {
            refusal: config.refusal.clone().or(fault.map(|fault| fault.to_string())),
            config,
            parameters,
            bytes_by_dtype,
            num_mtp_layers_present: mtp_layers.len(),
            is_mtp_complete,
        }
    }
}

/// The layer of an MTP tensor; `None` for a tensor of the target.
fn mtp_layer(name: &str, num_hidden_layers: Option<usize>) -> Option<usize> {
    let (layer_idx, _) = split_layer(name)?;
    (layer_idx >= num_hidden_layers?).then_some(layer_idx)
}

/// Splits `model.layers.{idx}.{rest}` into index and rest.
fn split_layer(name: &str) -> Option<(usize, &str)> {
    let (layer_idx, rest) = name.strip_prefix("model.layers.")?.split_once('.')?;
    Some((layer_idx.parse().ok()?, rest))
}

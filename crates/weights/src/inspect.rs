//! What a checkpoint holds, from its headers and its config.

use std::collections::{BTreeMap, BTreeSet};

use model_config::{ConfigError, ConfigSummary, LoadDtype, ModelConfig, RawConfig, StoredDtype};

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

/// A checkpoint folder described without reading tensor data, or a config without weights.
#[derive(Clone, Debug, PartialEq)]
pub struct CheckpointSummary {
    /// What `config.json` says.
    pub config: ConfigSummary,
    /// Parameters by part.
    pub parameters: ParameterCounts,
    /// Whether there are weights; without, parameters and bytes are those of dummy weights.
    pub has_weights: bool,
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

    /// Describes a config without weights by the dummy weights that it can run with, in the dtype
    /// that it declares, else bfloat16; nothing of it is in a file.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] if this version cannot run the model, so that its tensors are unknown.
    pub fn of_config(raw: &RawConfig) -> Result<Self, ConfigError> {
        let model = ModelConfig::from_raw(raw)?;
        let mut summary = Self::empty(raw, false);
        let dtype = model.dtype.unwrap_or(StoredDtype::Bfloat16);
        let specs = model.target_tensors().into_iter().chain(model.all_mtp_tensors());
        for spec in specs.filter(|spec| !spec.is_optional) {
            let (dtype, n_bytes) = match (spec.load_dtype, dtype) {
                (LoadDtype::Float32, _) | (_, StoredDtype::Float32) => ("F32", 4),
                (_, StoredDtype::Float16) => ("F16", 2),
                _ => ("BF16", 2),
            };
            let n_values = spec.n_values() as u64;
            summary.add(&spec.name, n_values, (dtype.to_owned(), n_bytes * n_values));
        }
        Ok(summary)
    }

    fn empty(raw: &RawConfig, has_weights: bool) -> Self {
        let config = ConfigSummary::new(raw);
        Self {
            refusal: config.refusal.clone(),
            config,
            parameters: ParameterCounts::default(),
            has_weights,
            bytes_by_dtype: BTreeMap::new(),
            num_mtp_layers_present: 0,
            is_mtp_complete: None,
        }
    }

    fn add(&mut self, name: &str, n_values: u64, (dtype, n_bytes): (String, u64)) {
        *self.parameters.part_of(name, self.config.num_hidden_layers) += n_values;
        *self.bytes_by_dtype.entry(dtype).or_default() += n_bytes;
    }
}

impl Checkpoint {
    /// Describes the checkpoint; `raw` is its config. Works for every model type.
    #[must_use]
    pub fn summarize(&self, raw: &RawConfig) -> CheckpointSummary {
        let mut summary = CheckpointSummary::empty(raw, true);
        let mut mtp_layers = BTreeSet::new();
        for info in self.tensors() {
            let n_values: u64 = info.shape.iter().map(|&n| n as u64).product();
            summary.add(info.name, n_values, (format!("{:?}", info.dtype), info.n_bytes as u64));
            mtp_layers.extend(mtp_layer(info.name, summary.config.num_hidden_layers));
        }
        summary.num_mtp_layers_present = mtp_layers.len();
        if let Ok(model) = ModelConfig::from_raw(raw) {
            summary.is_mtp_complete =
                (model.num_mtp_layers > 0).then(|| self.check_mtp(&model).is_ok());
            let fault = self.check(&model.target_tensors()).err();
            summary.refusal = fault.map(|fault| fault.to_string());
        }
        summary
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

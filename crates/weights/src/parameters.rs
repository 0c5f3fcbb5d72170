//! Parameters, counted by part.

use crate::storage::PACKED;

/// Parameters by the part of the model that they belong to. Of a quantised checkpoint these are the
/// values that it stands for: packed ones count each, and scales not at all.
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
    pub(crate) fn part_of(&mut self, name: &str, num_hidden_layers: Option<usize>) -> &mut u64 {
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

/// Endings of the names of what quantisation adds beside a weight.
const COMPANIONS: [&str; 4] = ["_scale", "_scale_inv", "_zero_point", "_shape"];

/// Whether a tensor only says how another one is quantised.
pub(crate) fn is_companion(name: &str) -> bool {
    COMPANIONS.iter().any(|ending| name.ends_with(ending))
}

/// The name of the weight that a stored tensor holds, which packed ones extend.
pub(crate) fn weight_name(name: &str) -> &str {
    name.strip_suffix(PACKED).unwrap_or(name)
}

/// The layer of an MTP tensor; `None` for a tensor of the target.
pub(crate) fn mtp_layer(name: &str, num_hidden_layers: Option<usize>) -> Option<usize> {
    layer_of(name).filter(|&layer_idx| num_hidden_layers.is_some_and(|n| layer_idx >= n))
}

/// The layer of a tensor, if it is of one.
pub(crate) fn layer_of(name: &str) -> Option<usize> {
    split_layer(name).map(|(layer_idx, _)| layer_idx)
}

/// Splits `model.layers.{idx}.{rest}` into index and rest.
fn split_layer(name: &str) -> Option<(usize, &str)> {
    let (layer_idx, rest) = name.strip_prefix("model.layers.")?.split_once('.')?;
    Some((layer_idx.parse().ok()?, rest))
}

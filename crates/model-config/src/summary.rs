//! What any raw config says about its model, whether or not this version can run it.

use crate::config::{IndexerKind, ModelConfig, StoredDtype};
use crate::dsa::{LayerCounts, indexer_kinds};
use crate::error::ConfigError;
use crate::raw::RawConfig;
use crate::validate::{MAX_LAYERS, stored_dtype};

/// A description of a checkpoint from its `config.json` alone. A field is `None` where the file
/// does not say.
#[derive(Clone, Debug, PartialEq)]
pub struct ConfigSummary {
    /// First entry of `architectures`, else `model_type`.
    pub architecture: Option<String>,
    /// `model_type`.
    pub model_type: Option<String>,
    /// Declared dtype, as [`StoredDtype::name`] if it is known here.
    pub dtype: Option<String>,
    /// Number of token ids.
    pub vocab_size: Option<usize>,
    /// Width of the residual stream.
    pub hidden_size: Option<usize>,
    /// Decoder layers of the target model.
    pub num_hidden_layers: Option<usize>,
    /// Query heads.
    pub num_attention_heads: Option<usize>,
    /// MTP layers that the config promises.
    pub num_mtp_layers: usize,
    /// Routed experts of a layer.
    pub n_routed_experts: Option<usize>,
    /// Routed experts that a token uses.
    pub num_experts_per_tok: Option<usize>,
    /// Shared experts.
    pub n_shared_experts: Option<usize>,
    /// Longest sequence in tokens.
    pub max_position_embeddings: Option<usize>,
    /// Sparse attention; `None` for a model without `index_topk`.
    pub sparse: Option<SparseSummary>,
    /// `quant_method` of `quantization_config`.
    pub quant_method: Option<String>,
    /// Bytes of KV cache a token in the declared dtype, over all layers and MTP layers; without
    /// the index keys of sparse attention ([`SparseSummary::index_bytes_per_token`]).
    pub kv_bytes_per_token: Option<usize>,
    /// Values that a layer's KV cache keeps of a token.
    pub kv_values_per_layer: Option<usize>,
    /// Why this version cannot run the model; `None` if it can.
    pub refusal: Option<String>,
}

/// Bytes of cache that a token takes, over all layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheBytes {
    /// Of the KV cache.
    pub kv: u64,
    /// Of index keys; 0 without sparse attention.
    pub index: u64,
}

impl CacheBytes {
    /// Of both.
    #[must_use]
    pub fn total(self) -> u64 {
        self.kv.saturating_add(self.index)
    }
}

/// What a config says about sparse attention. A field is `None` where the file does not say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SparseSummary {
    /// Keys that a row attends at most.
    pub index_topk: usize,
    /// Query heads of an indexer.
    pub index_n_heads: Option<usize>,
    /// Width of an indexer head.
    pub index_head_dim: Option<usize>,
    /// Layers of the target that select keys for themselves.
    pub num_full_layers: Option<usize>,
    /// Layers of the target that use the selection of a layer before them.
    pub num_shared_layers: Option<usize>,
    /// Whether draft steps after the first reuse its selection.
    pub index_share_for_mtp_iteration: bool,
    /// Bytes of index keys a token in the declared dtype, over the layers that select and the MTP
    /// layers.
    pub index_bytes_per_token: Option<usize>,
}

impl SparseSummary {
    fn new(raw: &RawConfig, index_topk: usize, dtype: Option<StoredDtype>) -> Self {
        let num_full_layers = num_full_layers(raw);
        let index_bytes = |dtype: StoredDtype| {
            let n_layers = num_full_layers?.checked_add(num_mtp_layers(raw))?;
            raw.index_head_dim?.checked_mul(n_layers)?.checked_mul(dtype.n_bytes())
        };
        Self {
            index_topk,
            index_n_heads: raw.index_n_heads,
            index_head_dim: raw.index_head_dim,
            num_full_layers,
            num_shared_layers: raw
                .num_hidden_layers
                .zip(num_full_layers)
                .map(|(n_layers, n_full)| n_layers - n_full),
            index_share_for_mtp_iteration: raw.index_share_for_mtp_iteration.unwrap_or(false),
            index_bytes_per_token: dtype.and_then(index_bytes),
        }
    }
}

/// `None` if the schedule of the layers is unusable.
fn num_full_layers(raw: &RawConfig) -> Option<usize> {
    let target = raw.num_hidden_layers.filter(|&n_layers| n_layers <= MAX_LAYERS)?;
    let kinds = indexer_kinds(raw, LayerCounts { target, mtp: num_mtp_layers(raw) }).ok()?;
    Some(kinds.iter().filter(|&&kind| kind == IndexerKind::Full).count())
}

impl ConfigSummary {
    /// Describes a config.
    #[must_use]
    pub fn new(raw: &RawConfig) -> Self {
        let architecture = raw.architectures.as_ref().and_then(|names| names.first());
        let dtype = stored_dtype(raw).ok().flatten();
        let dtype_text = raw.dtype.as_ref().or(raw.torch_dtype.as_ref());
        Self {
            architecture: architecture.or(raw.model_type.as_ref()).cloned(),
            model_type: raw.model_type.clone(),
            dtype: dtype.map(|dtype| dtype.name().to_owned()).or(dtype_text.cloned()),
            vocab_size: raw.vocab_size,
            hidden_size: raw.hidden_size,
            num_hidden_layers: raw.num_hidden_layers,
            num_attention_heads: raw.num_attention_heads,
            num_mtp_layers: num_mtp_layers(raw),
            n_routed_experts: raw.n_routed_experts,
            num_experts_per_tok: raw.num_experts_per_tok,
            n_shared_experts: raw.n_shared_experts,
            max_position_embeddings: raw.max_position_embeddings,
            sparse: raw.index_topk.map(|topk| SparseSummary::new(raw, topk, dtype)),
            quant_method: quant_method(raw),
            kv_bytes_per_token: dtype.and_then(|dtype| kv_bytes_per_token(raw, dtype)),
            kv_values_per_layer: kv_values_per_layer(raw),
            refusal: ModelConfig::from_raw(raw).err().map(|error: ConfigError| error.to_string()),
        }
    }

    /// Bytes of cache a token where a cached value has `value_bytes`, but one of an index key with
    /// `fp8_index` a byte, beside a float32 scale a key. Without `drafting` the MTP layers have no
    /// caches. `None` if the config does not say.
    #[must_use]
    pub fn cache_bytes_per_token(
        &self,
        value_bytes: usize,
        fp8_index: bool,
        drafting: bool,
    ) -> Option<CacheBytes> {
        let n_mtp = if drafting { self.num_mtp_layers } else { 0 };
        let n_layers = self.num_hidden_layers?.checked_add(n_mtp)?;
        let kv = self.kv_values_per_layer?.checked_mul(n_layers)?.checked_mul(value_bytes)?;
        let index = match &self.sparse {
            None => 0,
            Some(sparse) => {
                let width = sparse.index_head_dim?;
                let key = if fp8_index {
                    width.checked_add(size_of::<f32>())?
                } else {
                    width.checked_mul(value_bytes)?
                };
                key.checked_mul(sparse.num_full_layers?.checked_add(n_mtp)?)?
            }
        };
        Some(CacheBytes { kv: kv as u64, index: index as u64 })
    }
}

fn num_mtp_layers(raw: &RawConfig) -> usize {
    raw.num_nextn_predict_layers.or(raw.num_mtp_layers).unwrap_or(0)
}

/// `quant_method`, or "unnamed" if there is a quantisation without one.
fn quant_method(raw: &RawConfig) -> Option<String> {
    let quantization = raw.quantization_config.as_ref()?;
    let method = quantization.get("quant_method").and_then(|method| method.as_str());
    Some(method.unwrap_or("unnamed").to_owned())
}

fn kv_values_per_layer(raw: &RawConfig) -> Option<usize> {
    // Files of models with grouped-query attention may have leftovers of latent attention.
    let kv_lora_rank = raw.kv_lora_rank.filter(|_| raw.model_type() != Some("glm4_moe"));
    if let Some(kv_lora_rank) = kv_lora_rank {
        return kv_lora_rank.checked_add(raw.qk_rope_head_dim?);
    }
    let n_heads = raw.num_key_value_heads.or(raw.num_attention_heads)?;
    let head_dim = match raw.head_dim {
        Some(head_dim) => head_dim,
        None => raw.hidden_size?.checked_div(raw.num_attention_heads?)?,
    };
    n_heads.checked_mul(head_dim)?.checked_mul(2)
}

fn kv_bytes_per_token(raw: &RawConfig, dtype: StoredDtype) -> Option<usize> {
    let n_layers = raw.num_hidden_layers?.checked_add(num_mtp_layers(raw))?;
    kv_values_per_layer(raw)?.checked_mul(n_layers)?.checked_mul(dtype.n_bytes())
}

//! The validated configuration.

use std::path::Path;

use crate::error::ConfigError;
use crate::generation::GenerationConfig;
use crate::quantization::QuantizationConfig;
use crate::raw::RawConfig;

/// Which model code runs a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Architecture {
    /// DeepSeek-V2, V2.5 and V2-Lite: latent attention, and softmax routers without a bias.
    DeepseekV2,
    /// DeepSeek-V3, R1, Moonlight, Kimi-K2 and GLM-4.7-Flash: MLA attention, routed experts, MTP
    /// layers.
    DeepseekV3,
    /// DeepSeek-V3.2: the same, and always sparse attention.
    DeepseekV32,
    /// GLM-5, GLM-5.1 and GLM-5.2: the same as DeepSeek-V3.2 with other defaults.
    GlmMoeDsa,
    /// GLM-4.5, GLM-4.6 and their Air models: grouped-query attention, routed experts, MTP layers.
    Glm4Moe,
}

/// The dtype that a config declares for the tensors of its checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StoredDtype {
    /// IEEE single precision.
    Float32,
    /// IEEE half precision.
    Float16,
    /// bfloat16.
    Bfloat16,
}

impl StoredDtype {
    /// Bytes an element.
    #[must_use]
    pub fn n_bytes(self) -> usize {
        match self {
            Self::Float32 => 4,
            Self::Float16 | Self::Bfloat16 => 2,
        }
    }

    /// The name that configs and command lines use.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Float32 => "float32",
            Self::Float16 => "float16",
            Self::Bfloat16 => "bfloat16",
        }
    }
}

/// A model that this version can run. Sizes count elements.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Which model code runs it.
    pub architecture: Architecture,
    /// Number of token ids.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Inner width of a dense MLP.
    pub intermediate_size: usize,
    /// Decoder layers of the target model.
    pub num_hidden_layers: usize,
    /// MTP layers that the config promises after the target's (0: the model cannot draft).
    /// Draft step `s` runs layer `s % num_mtp_layers`.
    pub num_mtp_layers: usize,
    /// Longest sequence in tokens.
    pub max_position_embeddings: usize,
    /// Added to the mean square in every RMS norm.
    pub rms_norm_eps: f64,
    /// The output head is the embedding matrix.
    pub tie_word_embeddings: bool,
    /// Dtype of the checkpoint, if the config says.
    pub dtype: Option<StoredDtype>,
    /// Ids that end a sequence, without duplicates; empty if the config names none.
    pub eos_token_ids: Vec<u32>,
    /// The id that starts a sequence.
    pub bos_token_id: Option<u32>,
    /// Attention of every layer, the MTP layers included.
    pub attention: AttentionConfig,
    /// Sparse attention; `None` if every row attends all keys that it sees.
    pub dsa: Option<DsaConfig>,
    /// Rotary positions of every layer.
    pub rope: RopeConfig,
    /// The mixture of experts; `None` if every layer is dense.
    pub moe: Option<MoeConfig>,
    /// How weights are quantised; `None` if no tensor is.
    pub quantization: Option<QuantizationConfig>,
}

/// The attention of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AttentionConfig {
    /// Multi-head latent attention.
    Mla(MlaConfig),
    /// Grouped-query attention.
    Gqa(GqaConfig),
}

impl AttentionConfig {
    /// The sizes of latent attention; `None` if it is another one.
    #[must_use]
    pub fn mla(&self) -> Option<&MlaConfig> {
        match self {
            Self::Mla(mla) => Some(mla),
            Self::Gqa(_) => None,
        }
    }

    /// Width of a query/key head.
    #[must_use]
    pub fn qk_head_dim(&self) -> usize {
        match self {
            Self::Mla(mla) => mla.qk_head_dim(),
            Self::Gqa(gqa) => gqa.head_dim,
        }
    }

    /// Rotated part of a query/key head; even.
    #[must_use]
    pub fn rope_dim(&self) -> usize {
        match self {
            Self::Mla(mla) => mla.qk_rope_head_dim,
            Self::Gqa(gqa) => gqa.rope_dim,
        }
    }

    /// Values that the KV cache keeps for a token and layer.
    #[must_use]
    pub fn cache_width(&self) -> usize {
        match self {
            Self::Mla(mla) => mla.cache_width(),
            Self::Gqa(gqa) => gqa.cache_width(),
        }
    }
}

/// Sizes of grouped-query attention.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GqaConfig {
    /// Query heads, a multiple of `num_kv_heads`.
    pub num_heads: usize,
    /// Heads of keys and values, which equally many successive query heads share.
    pub num_kv_heads: usize,
    /// Width of a head of queries, keys and values.
    pub head_dim: usize,
    /// Rotated part of a query/key head, its start; even.
    pub rope_dim: usize,
    /// Whether the projections of queries, keys and values have a bias.
    pub has_bias: bool,
    /// Whether each head of queries and keys is normalised before it is rotated.
    pub has_qk_norm: bool,
}

impl GqaConfig {
    /// Values that the KV cache keeps for a token and layer: a key and a value for each head.
    #[must_use]
    pub fn cache_width(&self) -> usize {
        2 * self.num_kv_heads * self.head_dim
    }
}

/// Sizes of multi-head latent attention.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MlaConfig {
    /// Query heads; keys and values are latent and shared by all.
    pub num_heads: usize,
    /// Rank of the query projection; `None` if queries come from one full matrix.
    pub q_lora_rank: Option<usize>,
    /// Width of the latent from which keys and values of all heads are made.
    pub kv_lora_rank: usize,
    /// Part of a query/key head without positions.
    pub qk_nope_head_dim: usize,
    /// Rotated part of a query/key head; even.
    pub qk_rope_head_dim: usize,
    /// Width of a value head.
    pub v_head_dim: usize,
}

impl MlaConfig {
    /// Width of a query/key head: the part without positions, then the rotated part.
    #[must_use]
    pub fn qk_head_dim(&self) -> usize {
        self.qk_nope_head_dim + self.qk_rope_head_dim
    }

    /// Values that the KV cache keeps for a token and layer: the latent, then the rotated key.
    #[must_use]
    pub fn cache_width(&self) -> usize {
        self.kv_lora_rank + self.qk_rope_head_dim
    }
}

/// DeepSeek sparse attention (DSA): an indexer scores all keys that a row sees, and the row attends
/// the best of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DsaConfig {
    /// Keys that a row attends at most.
    pub index_topk: usize,
    /// Query heads of an indexer; its key is shared by all.
    pub index_n_heads: usize,
    /// Width of an indexer head; the first `qk_rope_head_dim` values are rotated.
    pub index_head_dim: usize,
    /// Pairs of the indexer's rotation are (0,1), (2,3), ... if true; (0, d/2), ... if false.
    pub rope_interleaved: bool,
    /// Which layers of the target select keys for themselves, `[num_hidden_layers]`; the first
    /// one does. MTP layers always do.
    pub indexer_kinds: Vec<IndexerKind>,
    /// Draft steps after the first reuse its selection.
    pub index_share_for_mtp_iteration: bool,
}

/// Where a layer has its selection of keys from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IndexerKind {
    /// From an indexer of its own, with weights and an index cache.
    Full,
    /// From the last full layer before it.
    Shared,
}

/// Rotary positions.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeConfig {
    /// Base of the frequencies.
    pub theta: f64,
    /// Pairs are (0,1), (2,3), ... if true; (0, d/2), (1, d/2+1), ... if false.
    pub interleaved: bool,
    /// Stretching of the frequencies; `None` if they are plain.
    pub yarn: Option<YarnConfig>,
}

/// YaRN scaling of rotary frequencies.
#[derive(Clone, Debug, PartialEq)]
pub struct YarnConfig {
    /// Ratio of the stretched context to the original one; at least 1.
    pub factor: f64,
    /// Frequencies with more rotations than this over the original context stay as they are.
    pub beta_fast: f64,
    /// Frequencies with fewer rotations than this are divided by `factor`.
    pub beta_slow: f64,
    /// Coefficient of the attention scale on the rotated part.
    pub mscale: f64,
    /// Coefficient of the attention scale on whole heads.
    pub mscale_all_dim: f64,
    /// Context length before stretching, in tokens.
    pub original_max_position_embeddings: usize,
}

impl YarnConfig {
    /// What cosines and sines are multiplied by.
    #[must_use]
    pub fn cos_sin_scale(&self) -> f64 {
        self.attention_scale(self.mscale) / self.attention_scale(self.mscale_all_dim)
    }

    /// What the softmax scale `qk_head_dim^-0.5` is multiplied by.
    #[must_use]
    pub fn softmax_scale_factor(&self) -> f64 {
        self.attention_scale(self.mscale_all_dim).powi(2)
    }

    fn attention_scale(&self, coefficient: f64) -> f64 {
        0.1 * coefficient * self.factor.ln() + 1.0
    }
}

/// How the logits of a router become scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouterScoring {
    /// Each expert for itself.
    Sigmoid,
    /// Over all experts.
    Softmax,
}

/// How a router chooses experts by their scores. Weights are always the scores themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertChoice {
    /// By score plus correction bias; a group's score is the sum of its two best.
    NoauxTc,
    /// By score among all experts; groups have no say.
    Greedy,
    /// By score within the kept groups; a group's score is its best.
    GroupLimitedGreedy,
}

/// A mixture of experts.
#[derive(Clone, Debug, PartialEq)]
pub struct MoeConfig {
    /// Routed experts of a layer.
    pub n_routed_experts: usize,
    /// Routed experts that a token uses.
    pub num_experts_per_tok: usize,
    /// Shared experts, which every token uses; together one MLP of width
    /// `n_shared_experts * moe_intermediate_size`. 0 if there is none.
    pub n_shared_experts: usize,
    /// Inner width of one expert.
    pub moe_intermediate_size: usize,
    /// Groups that the experts are divided into; 1 if choice is not limited to groups, and always
    /// for [`ExpertChoice::Greedy`].
    pub n_group: usize,
    /// Groups that a token may choose from.
    pub topk_group: usize,
    /// What expert weights are multiplied by.
    pub routed_scaling_factor: f64,
    /// Divide the chosen scores by their sum before scaling, whatever the scoring and the choice.
    /// (Readers of DeepSeek-V2 configs differ here: some never divide, some divide and then do not
    /// scale. Those configs are refused if it is true.)
    pub norm_topk_prob: bool,
    /// How the router scores.
    pub scoring: RouterScoring,
    /// How the router chooses.
    pub choice: ExpertChoice,
    /// Layers from this one on may be MoE.
    pub first_k_dense_replace: usize,
    /// Of those, the layers whose index is a multiple of this are MoE.
    pub moe_layer_freq: usize,
}

impl MoeConfig {
    /// Whether routers have a correction bias, `gate.e_score_correction_bias`.
    #[must_use]
    pub fn has_correction_bias(&self) -> bool {
        self.choice == ExpertChoice::NoauxTc
    }

    /// As [`ModelConfig::is_moe_layer`].
    pub(crate) fn is_moe_layer(&self, layer_idx: usize) -> bool {
        layer_idx >= self.first_k_dense_replace && layer_idx.is_multiple_of(self.moe_layer_freq)
    }
}

impl ModelConfig {
    /// Reads and validates `config.json` of a checkpoint folder, and adds the end-of-sequence ids
    /// of its `generation_config.json`, if there is one.
    ///
    /// # Errors
    ///
    /// See [`ConfigError`].
    pub fn load(dir: &Path) -> Result<Self, ConfigError> {
        let mut config = Self::from_raw(&RawConfig::load(dir)?)?;
        if let Some(generation) = GenerationConfig::load(dir)? {
            config.merge_generation(&generation)?;
        }
        Ok(config)
    }

    /// Lowers the longest sequence to the one that is served, in tokens: tables of positions are
    /// made for it. A length that the model does not take is left to be refused.
    pub fn limit_len(&mut self, max_model_len: Option<u32>) {
        if let Some(served @ 1..) = max_model_len {
            self.max_position_embeddings = self.max_position_embeddings.min(served as usize);
        }
    }

    /// Whether the MLP of a layer is a mixture of experts. MTP layer `i` counts as layer
    /// `num_hidden_layers + i`.
    #[must_use]
    pub fn is_moe_layer(&self, layer_idx: usize) -> bool {
        self.moe.as_ref().is_some_and(|moe| moe.is_moe_layer(layer_idx))
    }

    /// Whether a layer has an indexer of its own, and so an index cache. MTP layer `i` counts as
    /// layer `num_hidden_layers + i`.
    #[must_use]
    pub fn has_indexer(&self, layer_idx: usize) -> bool {
        self.dsa.as_ref().is_some_and(|dsa| {
            dsa.indexer_kinds.get(layer_idx).is_none_or(|&kind| kind == IndexerKind::Full)
        })
    }

    /// What attention scores are multiplied by before softmax.
    #[must_use]
    pub fn softmax_scale(&self) -> f64 {
        let plain = (self.attention.qk_head_dim() as f64).powf(-0.5);
        plain * self.rope.yarn.as_ref().map_or(1.0, YarnConfig::softmax_scale_factor)
    }

    /// Layers with an indexer of their own, the MTP layers included.
    #[must_use]
    pub fn num_index_layers(&self) -> usize {
        let n_layers = self.num_hidden_layers + self.num_mtp_layers;
        (0..n_layers).filter(|&layer_idx| self.has_indexer(layer_idx)).count()
    }

    /// Bytes of index keys a token, over all layers with an indexer and the MTP layers;
    /// `n_bytes_per_key` is what one key of `index_head_dim` values takes with its scale, if it
    /// has one. 0 if attention is not sparse.
    #[must_use]
    pub fn index_bytes_per_token(&self, n_bytes_per_key: usize) -> usize {
        self.num_index_layers() * n_bytes_per_key
    }

    /// Bytes of KV cache a token, over all layers and the MTP layers; index keys come on
    /// top ([`ModelConfig::index_bytes_per_token`]).
    #[must_use]
    pub fn kv_bytes_per_token(&self, n_bytes_per_value: usize) -> usize {
        let n_layers = self.num_hidden_layers + self.num_mtp_layers;
        self.attention.cache_width() * n_layers * n_bytes_per_value
    }
}

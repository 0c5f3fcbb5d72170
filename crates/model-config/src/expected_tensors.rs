//! The tensors that a validated model must bring, by name and shape.

use crate::config::{AttentionConfig, DsaConfig, GqaConfig, MlaConfig, ModelConfig};
use crate::quantization::DeclaredFormats;

/// The dtype a tensor is loaded in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadDtype {
    /// The dtype that the model computes in.
    Model,
    /// Always float32: router weights and biases, whose scores are compared in float32, and the
    /// norm of index keys. That norm runs in float32, its parameters are stored so and are few;
    /// rounding them would move scores and so swap selected keys.
    Float32,
}

/// What a tensor is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorRole {
    /// The factors of a norm, one dimension.
    Norm,
    /// Something that is added, one dimension.
    Bias,
    /// A projection, a router or an embedding, two dimensions.
    Matrix,
}

/// One tensor of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// Name in the checkpoint.
    pub name: String,
    /// Shape, outermost dimension first; a projection is `[out, in]`.
    pub shape: Vec<usize>,
    /// The checkpoint may leave it out.
    pub is_optional: bool,
    /// Dtype to load it in.
    pub load_dtype: LoadDtype,
    /// What the config says of its storage.
    pub declared: DeclaredFormats,
}

impl TensorSpec {
    /// A tensor that must be there, in the dtype of the model, of which the config says no more.
    #[must_use]
    pub fn new(name: impl Into<String>, shape: &[usize]) -> Self {
        Self {
            name: name.into(),
            shape: shape.to_vec(),
            is_optional: false,
            load_dtype: LoadDtype::Model,
            declared: DeclaredFormats::default(),
        }
    }

    /// What the tensor is for, as its name says.
    #[must_use]
    pub fn role(&self) -> TensorRole {
        if self.name.ends_with("bias") {
            TensorRole::Bias
        } else if self.name.ends_with("norm.weight") {
            TensorRole::Norm
        } else {
            TensorRole::Matrix
        }
    }

    /// How many values it has.
    #[must_use]
    pub fn n_values(&self) -> usize {
        self.shape.iter().product()
    }
}

impl ModelConfig {
    /// Every tensor of the target model: embedding, decoder layers, final norm, head.
    /// With `tie_word_embeddings` there is no `lm_head.weight`: the embedding is the head, whether
    /// or not the file repeats it.
    #[must_use]
    pub fn target_tensors(&self) -> Vec<TensorSpec> {
        let mut list = SpecList::default();
        let table = [self.vocab_size, self.hidden_size];
        list.add("model.embed_tokens.weight", &table);
        for layer_idx in 0..self.num_hidden_layers {
            list.decoder_layer(self, layer_idx);
        }
        list.add("model.norm.weight", &[self.hidden_size]);
        if !self.tie_word_embeddings {
            list.add("lm_head.weight", &table);
        }
        list.finish(self)
    }

    /// Every tensor of one MTP layer; `mtp_idx` counts from 0, the checkpoint calls it
    /// `model.layers.{num_hidden_layers + mtp_idx}`. Its embedding and head are optional: where
    /// they are absent the target's are used.
    ///
    /// # Panics
    ///
    /// If `mtp_idx` is not below `num_mtp_layers`.
    #[must_use]
    pub fn mtp_tensors(&self, mtp_idx: usize) -> Vec<TensorSpec> {
        assert!(mtp_idx < self.num_mtp_layers, "MTP layer {mtp_idx} of {}", self.num_mtp_layers);
        let mut list = SpecList::default();
        let layer_idx = self.num_hidden_layers + mtp_idx;
        let layer = format!("model.layers.{layer_idx}");
        let hidden = self.hidden_size;
        let table = [self.vocab_size, hidden];
        list.add_optional(format!("{layer}.embed_tokens.weight"), &table);
        list.add(format!("{layer}.enorm.weight"), &[hidden]);
        list.add(format!("{layer}.hnorm.weight"), &[hidden]);
        list.add(format!("{layer}.eh_proj.weight"), &[hidden, 2 * hidden]);
        list.decoder_layer(self, layer_idx);
        list.add(format!("{layer}.shared_head.norm.weight"), &[hidden]);
        list.add_optional(format!("{layer}.shared_head.head.weight"), &table);
        list.finish(self)
    }

    /// The tensors of all MTP layers, in the order of the layers.
    #[must_use]
    pub fn all_mtp_tensors(&self) -> Vec<TensorSpec> {
        (0..self.num_mtp_layers).flat_map(|mtp_idx| self.mtp_tensors(mtp_idx)).collect()
    }
}

#[derive(Default)]
struct SpecList {
    specs: Vec<TensorSpec>,
}

impl SpecList {
    fn add(&mut self, name: impl Into<String>, shape: &[usize]) {
        self.specs.push(TensorSpec::new(name, shape));
    }

    fn add_optional(&mut self, name: String, shape: &[usize]) {
        self.specs.push(TensorSpec { is_optional: true, ..TensorSpec::new(name, shape) });
    }

    fn add_float32(&mut self, name: String, shape: &[usize]) {
        let load_dtype = LoadDtype::Float32;
        self.specs.push(TensorSpec { load_dtype, ..TensorSpec::new(name, shape) });
    }

    /// The tensors, with what the config says of the storage of each matrix.
    fn finish(mut self, config: &ModelConfig) -> Vec<TensorSpec> {
        if let Some(quantization) = &config.quantization {
            let matrices = self.specs.iter_mut().filter(|spec| spec.role() == TensorRole::Matrix);
            matrices.for_each(|spec| spec.declared = quantization.declared(&spec.name));
        }
        self.specs
    }

    fn decoder_layer(&mut self, config: &ModelConfig, layer_idx: usize) {
        let layer = format!("model.layers.{layer_idx}");
        let hidden = config.hidden_size;
        self.add(format!("{layer}.input_layernorm.weight"), &[hidden]);
        let attention = format!("{layer}.self_attn");
        match &config.attention {
            AttentionConfig::Mla(mla) => self.mla(mla, &attention, hidden),
            AttentionConfig::Gqa(gqa) => self.gqa(gqa, &attention, hidden),
        }
        if config.has_indexer(layer_idx) {
            self.indexer(config, &format!("{layer}.self_attn.indexer"));
        }
        self.add(format!("{layer}.post_attention_layernorm.weight"), &[hidden]);
        if config.is_moe_layer(layer_idx) {
            self.experts(config, &format!("{layer}.mlp"));
        } else {
            self.mlp(&format!("{layer}.mlp"), hidden, config.intermediate_size);
        }
    }

    fn mla(&mut self, mla: &MlaConfig, prefix: &str, hidden: usize) {
        let q_width = mla.num_heads * mla.qk_head_dim();
        if let Some(rank) = mla.q_lora_rank {
            self.add(format!("{prefix}.q_a_proj.weight"), &[rank, hidden]);
            self.add(format!("{prefix}.q_a_layernorm.weight"), &[rank]);
            self.add(format!("{prefix}.q_b_proj.weight"), &[q_width, rank]);
        } else {
            self.add(format!("{prefix}.q_proj.weight"), &[q_width, hidden]);
        }
        let kv_rank = mla.kv_lora_rank;
        let kv_width = mla.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim);
        let kv_a = format!("{prefix}.kv_a_proj_with_mqa.weight");
        self.add(kv_a, &[mla.cache_width(), hidden]);
        self.add(format!("{prefix}.kv_a_layernorm.weight"), &[kv_rank]);
        self.add(format!("{prefix}.kv_b_proj.weight"), &[kv_width, kv_rank]);
        self.add(format!("{prefix}.o_proj.weight"), &[hidden, mla.num_heads * mla.v_head_dim]);
    }

    fn gqa(&mut self, gqa: &GqaConfig, prefix: &str, hidden: usize) {
        let (q_width, kv_width) = (gqa.num_heads * gqa.head_dim, gqa.num_kv_heads * gqa.head_dim);
        for (name, width) in [("q_proj", q_width), ("k_proj", kv_width), ("v_proj", kv_width)] {
            self.add(format!("{prefix}.{name}.weight"), &[width, hidden]);
            if gqa.has_bias {
                self.add(format!("{prefix}.{name}.bias"), &[width]);
            }
        }
        if gqa.has_qk_norm {
            self.add(format!("{prefix}.q_norm.weight"), &[gqa.head_dim]);
            self.add(format!("{prefix}.k_norm.weight"), &[gqa.head_dim]);
        }
        self.add(format!("{prefix}.o_proj.weight"), &[hidden, q_width]);
    }

    fn indexer(&mut self, config: &ModelConfig, prefix: &str) {
        let q_lora_rank = config.attention.mla().and_then(|mla| mla.q_lora_rank);
        let (Some(dsa), Some(q_lora_rank)) = (&config.dsa, q_lora_rank) else { return };
        let DsaConfig { index_n_heads, index_head_dim, .. } = *dsa;
        let hidden = config.hidden_size;
        let q_width = index_n_heads * index_head_dim;
        self.add(format!("{prefix}.wq_b.weight"), &[q_width, q_lora_rank]);
        self.add(format!("{prefix}.wk.weight"), &[index_head_dim, hidden]);
        self.add_float32(format!("{prefix}.k_norm.weight"), &[index_head_dim]);
        self.add_float32(format!("{prefix}.k_norm.bias"), &[index_head_dim]);
        self.add(format!("{prefix}.weights_proj.weight"), &[index_n_heads, hidden]);
    }

    fn experts(&mut self, config: &ModelConfig, prefix: &str) {
        let Some(moe) = &config.moe else { return };
        let hidden = config.hidden_size;
        let n_experts = moe.n_routed_experts;
        self.add_float32(format!("{prefix}.gate.weight"), &[n_experts, hidden]);
        if moe.has_correction_bias() {
            self.add_float32(format!("{prefix}.gate.e_score_correction_bias"), &[n_experts]);
        }
        for expert_idx in 0..n_experts {
            let expert = format!("{prefix}.experts.{expert_idx}");
            self.mlp(&expert, hidden, moe.moe_intermediate_size);
        }
        if moe.n_shared_experts > 0 {
            let width = moe.n_shared_experts * moe.moe_intermediate_size;
            self.mlp(&format!("{prefix}.shared_experts"), hidden, width);
        }
    }

    fn mlp(&mut self, prefix: &str, hidden: usize, inner: usize) {
        self.add(format!("{prefix}.gate_proj.weight"), &[inner, hidden]);
        self.add(format!("{prefix}.up_proj.weight"), &[inner, hidden]);
        self.add(format!("{prefix}.down_proj.weight"), &[hidden, inner]);
    }
}

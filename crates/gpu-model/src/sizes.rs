//! The widths that a model's activations have.

use model_config::{MlaConfig, ModelConfig};

/// Widths of a row, in elements.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    pub(crate) hidden: usize,
    pub(crate) vocab: usize,
    pub(crate) n_heads: usize,
    pub(crate) nope: usize,
    pub(crate) rope: usize,
    pub(crate) v: usize,
    pub(crate) kv_rank: usize,
    /// Width of the query part of `qkv`: the query latent, or all heads.
    pub(crate) q: usize,
    /// Whether queries come from a latent.
    pub(crate) has_latent: bool,
    /// Heads, head width and most selected keys of indexers; zeros without them.
    pub(crate) index_heads: usize,
    pub(crate) index_dim: usize,
    pub(crate) topk: usize,
    /// The widest inner width of a dense MLP, shared experts included.
    pub(crate) inner: usize,
    /// Experts of a row; 0 without a mixture.
    pub(crate) moe_topk: usize,
}

/// The attention of a model that [`check_architecture`](crate::check_architecture) lets through.
pub(crate) fn latent(config: &ModelConfig) -> &MlaConfig {
    config.attention.mla().expect("models on a GPU have latent attention")
}

impl Sizes {
    pub(crate) fn of(config: &ModelConfig) -> Self {
        let mla = latent(config);
        let (dsa, moe) = (config.dsa.as_ref(), config.moe.as_ref());
        let n_heads = mla.num_heads;
        Self {
            hidden: config.hidden_size,
            vocab: config.vocab_size,
            n_heads,
            nope: mla.qk_nope_head_dim,
            rope: mla.qk_rope_head_dim,
            v: mla.v_head_dim,
            kv_rank: mla.kv_lora_rank,
            q: mla.q_lora_rank.unwrap_or(n_heads * mla.qk_head_dim()),
            has_latent: mla.q_lora_rank.is_some(),
            index_heads: dsa.map_or(0, |dsa| dsa.index_n_heads),
            index_dim: dsa.map_or(0, |dsa| dsa.index_head_dim),
            topk: dsa.map_or(0, |dsa| dsa.index_topk),
            inner: config
                .intermediate_size
                .max(moe.map_or(0, |moe| moe.n_shared_experts * moe.moe_intermediate_size)),
            moe_topk: moe.map_or(0, |moe| moe.num_experts_per_tok),
        }
    }

    /// A query or key head.
    pub(crate) fn qk(&self) -> usize {
        self.nope + self.rope
    }

    /// A row of the latent cache.
    pub(crate) fn cache(&self) -> usize {
        self.kv_rank + self.rope
    }

    /// The keys and values of a latent, of all heads, without the rotary part.
    pub(crate) fn expanded(&self) -> usize {
        self.n_heads * (self.nope + self.v)
    }

    /// The projections of a layer's input.
    pub(crate) fn qkv(&self, has_indexer: bool) -> usize {
        self.q + self.cache() + if has_indexer { self.index_dim } else { 0 }
    }
}

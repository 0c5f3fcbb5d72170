//! Hugging Face `config.json` to a validated, typed configuration.
//!
//! **Owns** the reading of `config.json` and `generation_config.json` in all their spellings, the
//! decision whether a model can be run, and the list of tensors such a model must bring.
//! **Must not know** tensors, devices or libtorch, nor where checkpoints come from.
//!
//! Reading has two stages. [`RawConfig`] holds the fields as the file spells them; unknown fields
//! are ignored, a field of the wrong JSON type is refused by name. [`ModelConfig`] is what is left
//! after every contradiction was refused. [`ConfigSummary`] describes any raw config, also one
//! that this version cannot run.
//!
//! **Invariants** of a [`ModelConfig`]: no size is zero, and none so large that the bytes of all
//! tensors overflow; the experts divide evenly into their groups and the kept groups hold enough
//! of them to choose from; the rotated part of a head is even, and equally many query heads share
//! a head of keys; sparse attention has a query latent to index with and a first layer that
//! selects; a scaled rope has a factor of at least 1; every end-of-sequence id is in the
//! vocabulary.
//!
//! ```
//! use model_config::{ModelConfig, RawConfig};
//!
//! let text = r#"{
//!     "model_type": "deepseek_v3", "vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 2,
//!     "intermediate_size": 160, "num_attention_heads": 4, "q_lora_rank": null,
//!     "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
//!     "num_nextn_predict_layers": 1, "eos_token_id": [1, 3]
//! }"#;
//! let config = ModelConfig::from_raw(&RawConfig::parse(text, "config.json")?)?;
//! assert_eq!(config.eos_token_ids, [1, 3]);
//! assert_eq!(config.attention.cache_width(), 48);
//! assert!(config.mtp_tensors(0).iter().any(|t| t.name == "model.layers.2.eh_proj.weight"));
//! # Ok::<(), model_config::ConfigError>(())
//! ```

mod attention;
mod config;
mod diagnosis;
mod dsa;
mod error;
mod expected_tensors;
mod fields;
mod generation;
mod moe;
mod quantization;
mod raw;
mod rope;
mod summary;
mod validate;

#[cfg(test)]
mod tests;

pub use config::{
    Architecture, AttentionConfig, DsaConfig, ExpertChoice, GqaConfig, IndexerKind, MlaConfig,
    ModelConfig, MoeConfig, RopeConfig, RouterScoring, StoredDtype, YarnConfig,
};
pub use diagnosis::ConfigDiagnosis;
pub use error::ConfigError;
pub use expected_tensors::{LoadDtype, TensorRole, TensorSpec};
pub use generation::GenerationConfig;
pub use quantization::{DeclaredFormats, QuantizationConfig, WeightFormat};
pub use raw::RawConfig;
pub use summary::{CacheBytes, ConfigSummary, SparseSummary};

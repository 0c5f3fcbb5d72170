//! Everything that is wrong with a config, not only the first of it.

use std::path::Path;

use crate::config::ModelConfig;
use crate::error::ConfigError;
use crate::generation::GenerationConfig;
use crate::raw::RawConfig;

/// Fields that decide neither which tensors a model has nor their shapes.
const SHAPELESS: [&str; 26] = [
    "attention_bias",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "hidden_act",
    "index_share_for_mtp_iteration",
    "indexer_rope_interleave",
    "layer_types",
    "max_position_embeddings",
    "mlp_bias",
    "n_group",
    "norm_topk_prob",
    "num_experts_per_tok",
    "qk_head_dim",
    "quantization_config",
    "rms_norm_eps",
    "rope_interleave",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "routed_scaling_factor",
    "scoring_func",
    "sliding_window",
    "swiglu_limit",
    "topk_group",
    "torch_dtype",
];

/// What a folder's config says and what is wrong with it.
#[derive(Debug)]
pub struct ConfigDiagnosis {
    /// The fields that have usable values.
    pub raw: RawConfig,
    /// Why the config is refused, in the order in which it was read; empty if it is not.
    pub errors: Vec<ConfigError>,
    /// The model. If the config is refused it is good for no more than to list its tensors, with
    /// the faulty fields at their defaults; `None` where the tensors depend on these.
    pub model: Option<ModelConfig>,
}

impl ConfigDiagnosis {
    /// Reads `config.json` of a checkpoint folder, and its `generation_config.json`.
    ///
    /// # Errors
    ///
    /// [`ConfigError::Read`] or [`ConfigError::Json`] for `config.json`.
    pub fn load(dir: &Path) -> Result<Self, ConfigError> {
        let (raw, errors) = RawConfig::load_usable(dir)?;
        let mut diagnosis = Self::new(raw, errors);
        let generation = GenerationConfig::load(dir).and_then(|generation| {
            match (generation, &mut diagnosis.model) {
                (Some(generation), Some(model)) => model.merge_generation(&generation),
                _ => Ok(()),
            }
        });
        diagnosis.errors.extend(generation.err());
        Ok(diagnosis)
    }

    /// Validates again and again, each time without the field that was at fault before.
    fn new(raw: RawConfig, mut errors: Vec<ConfigError>) -> Self {
        let field_of = |error: &ConfigError| {
            let field = error.field().unwrap_or_default();
            field.split(['.', '[']).next().unwrap_or_default().to_owned()
        };
        let mut faulty: Vec<String> = errors.iter().map(field_of).collect();
        let mut rest = raw.clone();
        let model = loop {
            let error = match ModelConfig::from_raw(&rest) {
                Ok(model) => break Some(model),
                Err(error) => error,
            };
            let field = field_of(&error);
            let is_new = !faulty.contains(&field);
            let can_go_on = rest.forget(&field);
            if field.ends_with("_group") {
                // Their limits are about each other.
                rest.forget("n_group");
                rest.forget("topk_group");
            }
            if is_new {
                errors.push(error);
                faulty.push(field);
            }
            if !can_go_on {
                break None;
            }
        };
        let is_known = faulty.iter().all(|field| SHAPELESS.contains(&field.as_str()));
        Self { raw, errors, model: model.filter(|_| is_known) }
    }
}

//! Second stage: refuse what contradicts itself or cannot be run, and fill in the defaults.

use crate::attention::attention;
use crate::config::{Architecture, ModelConfig, StoredDtype};
use crate::dsa::{LayerCounts, dsa};
use crate::error::ConfigError;
use crate::moe::moe;
use crate::quantization::quantization;
use crate::raw::RawConfig;
use crate::rope::rope;

const DEFAULT_MAX_POSITION_EMBEDDINGS: usize = 8_192;
/// Larger counts of tokens and the like are mistakes. With the limits below, the bytes of all
/// tensors that a config can ask for stay below 2^63.
const MAX_COUNT: usize = 1 << 24;
/// Widths of hidden states, latents and MLPs.
pub(crate) const MAX_WIDTH: usize = 1 << 18;
pub(crate) const MAX_HEADS: usize = 1 << 12;
pub(crate) const MAX_HEAD_DIM: usize = 1 << 13;
/// Bounds what is listed and allocated for a config before its weights are looked at.
pub(crate) const MAX_LAYERS: usize = 1 << 10;

impl ModelConfig {
    /// Validates a raw config.
    ///
    /// # Errors
    ///
    /// [`ConfigError::Missing`], [`ConfigError::Invalid`] or [`ConfigError::Unsupported`], naming
    /// the field.
    pub fn from_raw(raw: &RawConfig) -> Result<Self, ConfigError> {
        refuse_nested(raw)?;
        let architecture = architecture(raw)?;
        refuse_unsupported(raw)?;
        let num_hidden_layers =
            size_up_to(raw, "num_hidden_layers", raw.num_hidden_layers, MAX_LAYERS)?;
        let vocab_size = size(raw, "vocab_size", raw.vocab_size)?;
        let n_layers = LayerCounts { target: num_hidden_layers, mtp: num_mtp_layers(raw)? };
        let attention = attention(raw, architecture)?;
        let default_eps = default_rms_norm_eps(architecture);
        let max_position = raw.max_position_embeddings.or(Some(DEFAULT_MAX_POSITION_EMBEDDINGS));
        Ok(Self {
            architecture,
            vocab_size,
            hidden_size: size_up_to(raw, "hidden_size", raw.hidden_size, MAX_WIDTH)?,
            intermediate_size: size_up_to(
                raw,
                "intermediate_size",
                raw.intermediate_size,
                MAX_WIDTH,
            )?,
            num_hidden_layers,
            num_mtp_layers: n_layers.mtp,
            max_position_embeddings: size(raw, "max_position_embeddings", max_position)?,
            rms_norm_eps: positive(raw, "rms_norm_eps", raw.rms_norm_eps, default_eps)?,
            tie_word_embeddings: raw.tie_word_embeddings.unwrap_or(false),
            dtype: stored_dtype(raw)?,
            eos_token_ids: eos_token_ids(raw, vocab_size)?,
            bos_token_id: raw.bos_token_id,
            dsa: dsa(raw, architecture, &attention, n_layers)?,
            attention,
            rope: rope(raw, architecture)?,
            quantization: quantization(raw)?,
            moe: moe(raw, architecture, n_layers)?,
        })
    }
}

/// A model that also sees or hears keeps the fields of its language model one level down, and names
/// the tensors otherwise.
fn refuse_nested(raw: &RawConfig) -> Result<(), ConfigError> {
    let fields = [("text_config", &raw.text_config), ("vision_config", &raw.vision_config)];
    let Some((field, _)) = fields.into_iter().find(|(_, value)| value.is_some()) else {
        return Ok(());
    };
    let reason = "is there, as in models of more than text; only language models are supported: \
                  use a checkpoint of one, whose config.json has its fields at the top level";
    Err(raw.unsupported(field, reason))
}

fn architecture(raw: &RawConfig) -> Result<Architecture, ConfigError> {
    let model_type = raw.model_type().ok_or_else(|| raw.missing("model_type"))?;
    match model_type {
        "deepseek_v2" => Ok(Architecture::DeepseekV2),
        // Kimi-K2 is DeepSeek-V3 under a name of its own, as its `architectures` say.
        "deepseek_v3" | "kimi_k2" => Ok(Architecture::DeepseekV3),
        // So is GLM-4.7-Flash: weights of one give the same logits in the other. But what its
        // config leaves out has other defaults.
        "glm4_moe_lite" if raw.rms_norm_eps.is_none() => Err(raw.missing("rms_norm_eps")),
        "glm4_moe_lite" if raw.routed_scaling_factor.is_none() => {
            Err(raw.missing("routed_scaling_factor"))
        }
        "glm4_moe_lite" => Ok(Architecture::DeepseekV3),
        "deepseek_v32" => Ok(Architecture::DeepseekV32),
        "glm_moe_dsa" => Ok(Architecture::GlmMoeDsa),
        "glm4_moe" => Ok(Architecture::Glm4Moe),
        _ => {
            let reason = format!(
                "is `{model_type}`, which is not supported; use a model of the type \
                 `deepseek_v2`, `deepseek_v3`, `deepseek_v32`, `glm_moe_dsa` or `glm4_moe`"
            );
            Err(raw.unsupported("model_type", reason))
        }
    }
}

/// Defaults of the published configuration classes for files that leave the field out.
fn default_rms_norm_eps(architecture: Architecture) -> f64 {
    match architecture {
        Architecture::DeepseekV2 | Architecture::DeepseekV3 | Architecture::DeepseekV32 => 1e-6,
        Architecture::GlmMoeDsa | Architecture::Glm4Moe => 1e-5,
    }
}

fn refuse_unsupported(raw: &RawConfig) -> Result<(), ConfigError> {
    if raw.mlp_bias == Some(true) {
        return Err(raw.unsupported("mlp_bias", "is true; only false is supported"));
    }
    // They would change what the model computes, so they are not ignored.
    let fields = [("sliding_window", &raw.sliding_window), ("swiglu_limit", &raw.swiglu_limit)];
    if let Some((field, Some(value))) = fields.into_iter().find(|(_, value)| value.is_some()) {
        let reason = format!("is {value}, which is not supported; use a model without it");
        return Err(raw.unsupported(field, reason));
    }
    if let Some(value) = raw.hidden_act.as_deref().filter(|value| *value != "silu") {
        let reason = format!("is `{value}`; only `silu` is supported");
        return Err(raw.unsupported("hidden_act", reason));
    }
    Ok(())
}

/// A count that must be given.
pub(crate) fn count(
    raw: &RawConfig,
    field: &str,
    value: Option<usize>,
) -> Result<usize, ConfigError> {
    match value {
        None => Err(raw.missing(field)),
        Some(value) if value > MAX_COUNT => {
            Err(raw.invalid(field, format!("is {value}; it must be at most {MAX_COUNT}")))
        }
        Some(value) => Ok(value),
    }
}

pub(crate) fn at_most(
    raw: &RawConfig,
    field: &str,
    value: usize,
    max: usize,
) -> Result<(), ConfigError> {
    if value <= max {
        Ok(())
    } else {
        Err(raw.invalid(field, format!("is {value}; it must be at most {max}")))
    }
}

/// A count that must be given and not zero.
pub(crate) fn size(
    raw: &RawConfig,
    field: &str,
    value: Option<usize>,
) -> Result<usize, ConfigError> {
    match count(raw, field, value)? {
        0 => Err(raw.invalid(field, "is 0; it must be at least 1")),
        value => Ok(value),
    }
}

/// As [`size`], with a limit of its own.
pub(crate) fn size_up_to(
    raw: &RawConfig,
    field: &str,
    value: Option<usize>,
    max: usize,
) -> Result<usize, ConfigError> {
    let value = size(raw, field, value)?;
    at_most(raw, field, value, max)?;
    Ok(value)
}

pub(crate) fn positive(
    raw: &RawConfig,
    field: &str,
    value: Option<f64>,
    default: f64,
) -> Result<f64, ConfigError> {
    let value = value.unwrap_or(default);
    if value > 0.0 && (value as f32).is_finite() {
        Ok(value)
    } else {
        Err(raw.invalid(field, format!("is {value}; it must be above 0 and fit a float32")))
    }
}

/// Checks that a list has an entry for every layer of the target, and none behind the MTP layers.
pub(crate) fn layer_list(
    raw: &RawConfig,
    field: &str,
    list: &[String],
    n_layers: LayerCounts,
) -> Result<(), ConfigError> {
    let LayerCounts { target, mtp } = n_layers;
    if (target..=target.saturating_add(mtp)).contains(&list.len()) {
        return Ok(());
    }
    let reason = format!(
        "has length {}; it must have an entry for each of {target} layers (num_hidden_layers), \
         and may have one for each of {mtp} MTP layers (num_nextn_predict_layers)",
        list.len()
    );
    Err(raw.invalid(field, reason))
}

/// One value from two spellings of a field, which must not contradict each other.
pub(crate) fn either<T: PartialEq + std::fmt::Debug>(
    raw: &RawConfig,
    first: (&str, Option<T>),
    second: (&str, Option<T>),
) -> Result<Option<T>, ConfigError> {
    match (first.1, second.1) {
        (Some(a), Some(b)) if a != b => {
            let reason = format!("is {a:?} but `{}` is {b:?}; remove one of the two", second.0);
            Err(raw.invalid(first.0, reason))
        }
        (a, b) => Ok(a.or(b)),
    }
}

fn num_mtp_layers(raw: &RawConfig) -> Result<usize, ConfigError> {
    let field = "num_nextn_predict_layers";
    let first = (field, raw.num_nextn_predict_layers);
    let n_layers = either(raw, first, ("num_mtp_layers", raw.num_mtp_layers))?;
    let n_layers = count(raw, field, n_layers.or(Some(0)))?;
    at_most(raw, field, n_layers, MAX_LAYERS)?;
    Ok(n_layers)
}

pub(crate) fn stored_dtype(raw: &RawConfig) -> Result<Option<StoredDtype>, ConfigError> {
    let parse = |field: &str, text: &Option<String>| {
        let Some(text) = text else { return Ok(None) };
        match text.strip_prefix("torch.").unwrap_or(text) {
            "float32" | "float" => Ok(Some(StoredDtype::Float32)),
            "float16" | "half" => Ok(Some(StoredDtype::Float16)),
            "bfloat16" => Ok(Some(StoredDtype::Bfloat16)),
            _ => {
                let reason = format!("is `{text}`; use float32, float16 or bfloat16");
                Err(raw.unsupported(field, reason))
            }
        }
    };
    let new = parse("dtype", &raw.dtype)?;
    let old = parse("torch_dtype", &raw.torch_dtype)?;
    either(raw, ("dtype", new), ("torch_dtype", old))
}

fn eos_token_ids(raw: &RawConfig, vocab_size: usize) -> Result<Vec<u32>, ConfigError> {
    let mut ids = Vec::new();
    for &id in raw.eos_token_id.as_ref().map_or(&[][..], |ids| ids.as_slice()) {
        if id as usize >= vocab_size {
            let reason = format!("{id} is not below vocab_size ({vocab_size})");
            return Err(raw.invalid("eos_token_id", reason));
        }
        if !ids.contains(&id) {
            ids.push(id);
        }
    }
    Ok(ids)
}

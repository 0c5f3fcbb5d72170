//! Validation of the sizes of attention.

use crate::config::{Architecture, AttentionConfig, GqaConfig, MlaConfig};
use crate::error::ConfigError;
use crate::raw::RawConfig;
use crate::rope::partial_rotary_factor;
use crate::validate::{MAX_HEAD_DIM, MAX_HEADS, MAX_WIDTH, size_up_to};

/// The part of a head that the published configuration class of `glm4_moe` rotates where a file
/// does not say.
const DEFAULT_PARTIAL_ROTARY_FACTOR: f64 = 0.5;

pub(crate) fn attention(
    raw: &RawConfig,
    architecture: Architecture,
) -> Result<AttentionConfig, ConfigError> {
    match architecture {
        Architecture::DeepseekV2
        | Architecture::DeepseekV3
        | Architecture::DeepseekV32
        | Architecture::GlmMoeDsa => Ok(AttentionConfig::Mla(mla(raw)?)),
        Architecture::Glm4Moe => Ok(AttentionConfig::Gqa(gqa(raw)?)),
    }
}

fn mla(raw: &RawConfig) -> Result<MlaConfig, ConfigError> {
    if raw.attention_bias == Some(true) {
        let reason = "is true; with latent attention only false is supported";
        return Err(raw.unsupported("attention_bias", reason));
    }
    if let Some(factor) = partial_rotary_factor(raw)?.filter(|&factor| factor != 1.0) {
        let reason = format!(
            "is {factor}; with latent attention the rotated part is qk_rope_head_dim, so only 1 is \
             supported"
        );
        return Err(raw.unsupported("partial_rotary_factor", reason));
    }
    let num_heads = size_up_to(raw, "num_attention_heads", raw.num_attention_heads, MAX_HEADS)?;
    let head_dim = |field: &str, value| size_up_to(raw, field, value, MAX_HEAD_DIM);
    if let Some(n) = raw.num_key_value_heads.filter(|&n| n != num_heads) {
        let reason = format!(
            "is {n} but num_attention_heads is {num_heads}; with latent attention they are equal"
        );
        return Err(raw.invalid("num_key_value_heads", reason));
    }
    let q_lora_rank = match raw.q_lora_rank {
        None => None,
        rank => Some(size_up_to(raw, "q_lora_rank", rank, MAX_WIDTH)?),
    };
    let config = MlaConfig {
        num_heads,
        q_lora_rank,
        kv_lora_rank: size_up_to(raw, "kv_lora_rank", raw.kv_lora_rank, MAX_WIDTH)?,
        qk_nope_head_dim: head_dim("qk_nope_head_dim", raw.qk_nope_head_dim)?,
        qk_rope_head_dim: head_dim("qk_rope_head_dim", raw.qk_rope_head_dim)?,
        v_head_dim: head_dim("v_head_dim", raw.v_head_dim)?,
    };
    if config.qk_rope_head_dim % 2 == 1 {
        let reason = format!("is {}; it must be even", config.qk_rope_head_dim);
        return Err(raw.invalid("qk_rope_head_dim", reason));
    }
    if let Some(n) = raw.qk_head_dim.filter(|&n| n != config.qk_head_dim()) {
        let reason = format!(
            "is {n} but qk_nope_head_dim + qk_rope_head_dim is {}; remove it or make them agree",
            config.qk_head_dim()
        );
        return Err(raw.invalid("qk_head_dim", reason));
    }
    Ok(config)
}

fn gqa(raw: &RawConfig) -> Result<GqaConfig, ConfigError> {
    let heads = |field: &str, value| size_up_to(raw, field, value, MAX_HEADS);
    let num_heads = heads("num_attention_heads", raw.num_attention_heads)?;
    let num_kv_heads = heads("num_key_value_heads", raw.num_key_value_heads)?;
    if !num_heads.is_multiple_of(num_kv_heads) {
        let reason =
            format!("is {num_kv_heads}, which does not divide num_attention_heads ({num_heads})");
        return Err(raw.invalid("num_key_value_heads", reason));
    }
    let head_dim = raw.head_dim.or(raw.hidden_size.map(|hidden| hidden / num_heads));
    let head_dim = size_up_to(raw, "head_dim", head_dim, MAX_HEAD_DIM)?;
    let factor = partial_rotary_factor(raw)?.unwrap_or(DEFAULT_PARTIAL_ROTARY_FACTOR);
    let rope_dim = (head_dim as f64 * factor) as usize;
    if rope_dim == 0 || rope_dim > head_dim || rope_dim % 2 == 1 {
        let reason = format!(
            "is {factor}; of a head_dim of {head_dim} it must take an even part, at least 2"
        );
        return Err(raw.invalid("partial_rotary_factor", reason));
    }
    Ok(GqaConfig {
        num_heads,
        num_kv_heads,
        head_dim,
        rope_dim,
        has_bias: raw.attention_bias.unwrap_or(false),
        has_qk_norm: raw.use_qk_norm.unwrap_or(false),
    })
}

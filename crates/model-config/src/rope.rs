//! Validation of the rotary settings, in their old and their new spelling.

use serde_json::Value;

use crate::config::{Architecture, RopeConfig, YarnConfig};
use crate::error::ConfigError;
use crate::fields::Fields;
use crate::raw::RawConfig;
use crate::validate::{either, positive};

const DEFAULT_ROPE_THETA: f64 = 10_000.0;

/// `rope_parameters` (new) comes before `rope_scaling` and `rope_theta` (old); where both are
/// given they must agree.
pub(crate) fn rope(raw: &RawConfig, architecture: Architecture) -> Result<RopeConfig, ConfigError> {
    let mut new = Fields::of(raw, "rope_parameters", raw.rope_parameters.as_ref());
    let mut old = Fields::of(raw, "rope_scaling", raw.rope_scaling.as_ref());
    let new_theta = match &mut new {
        Some(fields) => fields.take("rope_theta")?,
        None => None,
    };
    let old_theta = ("rope_theta", raw.rope_theta);
    let theta = either(raw, old_theta, ("rope_parameters.rope_theta", new_theta))?;
    let new_yarn = new.as_mut().map(yarn).transpose()?;
    let old_yarn = old.as_mut().map(yarn).transpose()?;
    if new_yarn.is_some() && old_yarn.is_some() && new_yarn != old_yarn {
        let reason = "and `rope_parameters` ask for different scalings; remove one of the two";
        return Err(raw.invalid("rope_scaling", reason));
    }
    let is_glm4 = architecture == Architecture::Glm4Moe;
    let yarn = new_yarn.or(old_yarn).flatten();
    if is_glm4 && yarn.is_some() {
        let field = if new.is_some() { "rope_parameters" } else { "rope_scaling" };
        return Err(raw.unsupported(field, "asks for yarn, which is not supported for glm4_moe"));
    }
    Ok(RopeConfig {
        theta: positive(raw, "rope_theta", theta, DEFAULT_ROPE_THETA)?,
        interleaved: raw.rope_interleave.unwrap_or(!is_glm4),
        yarn,
    })
}

/// Which part of a head is rotated, in either spelling.
pub(crate) fn partial_rotary_factor(raw: &RawConfig) -> Result<Option<f64>, ConfigError> {
    let field = "partial_rotary_factor";
    let new = match &mut Fields::of(raw, "rope_parameters", raw.rope_parameters.as_ref()) {
        Some(fields) => fields.take(field)?,
        None => None,
    };
    either(raw, (field, raw.partial_rotary_factor), ("rope_parameters.partial_rotary_factor", new))
}

/// The YaRN settings of an object; `None` if it asks for no scaling.
fn yarn(fields: &mut Fields<'_>) -> Result<Option<YarnConfig>, ConfigError> {
    let raw = fields.raw;
    let (kind_name, kind) = kind(fields)?;
    let factor: Option<f64> = fields.take("factor")?;
    let factor_name = fields.name("factor");
    match (kind.as_deref(), factor) {
        (Some("yarn"), _) => {}
        (None, Some(_)) => return Err(raw.missing(&kind_name)),
        (Some("default"), Some(factor)) if factor != 1.0 => {
            let reason = format!("is {factor} but the type is `default`; remove it or use `yarn`");
            return Err(raw.invalid(&factor_name, reason));
        }
        (None | Some("default"), _) => return Ok(None),
        (Some(kind), _) => {
            let reason = format!("is `{kind}`; only `yarn` and `default` are supported");
            return Err(raw.unsupported(&kind_name, reason));
        }
    }
    let factor = factor.ok_or_else(|| raw.missing(&factor_name))?;
    if !(factor >= 1.0 && factor.is_finite()) {
        return Err(raw.invalid(&factor_name, format!("is {factor}; it must be at least 1")));
    }
    if fields.take::<Value>("attention_factor")?.is_some() {
        let reason = "is not supported; use mscale and mscale_all_dim";
        return Err(raw.unsupported(&fields.name("attention_factor"), reason));
    }
    let beta_slow = fields.positive_or("beta_slow", 1.0)?;
    let beta_fast = fields.positive_or("beta_fast", 32.0)?;
    if beta_fast < beta_slow {
        let reason = format!("is {beta_fast}; it must be at least beta_slow ({beta_slow})");
        return Err(raw.invalid(&fields.name("beta_fast"), reason));
    }
    Ok(Some(YarnConfig {
        factor,
        beta_fast,
        beta_slow,
        mscale: fields.not_negative_or("mscale", 1.0)?,
        mscale_all_dim: fields.not_negative_or("mscale_all_dim", 0.0)?,
        original_max_position_embeddings: fields.size("original_max_position_embeddings")?,
    }))
}

/// The kind of scaling, and the name of the field that says it.
fn kind(fields: &mut Fields<'_>) -> Result<(String, Option<String>), ConfigError> {
    let old: Option<String> = fields.take("type")?;
    let new: Option<String> = fields.take("rope_type")?;
    let is_old = old.is_some() && new.is_none();
    let (old_name, new_name) = (fields.name("type"), fields.name("rope_type"));
    let kind = either(fields.raw, (&new_name, new), (&old_name, old))?;
    Ok((if is_old { old_name } else { new_name }, kind))
}

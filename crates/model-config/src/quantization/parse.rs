//! Reading `quantization_config` in the words of each tool.

use serde_json::{Map, Value};

use super::names::NamePatterns;
use super::{MX_GROUP, QuantizationConfig, WeightFormat};
use crate::error::ConfigError;
use crate::fields::Fields;
use crate::raw::RawConfig;

/// What tools call the list of modules that they left as they were.
const EXCLUSIONS: [&str; 4] = ["exclude", "ignore", "modules_to_not_convert", "ignored_layers"];
/// Names of E4M3 without infinities.
const E4M3: [&str; 4] = ["e4m3", "e4m3fn", "float8_e4m3fn", "fp8_e4m3"];
/// The class of modules that compressed-tensors names for all projections.
const LINEAR: &str = "Linear";
const DEFAULT_BLOCK: [usize; 2] = [128, 128];

/// Rules, and the formats of what no rule names.
type Rules = (Vec<(NamePatterns, Option<WeightFormat>)>, Vec<WeightFormat>);

pub(crate) fn quantization(raw: &RawConfig) -> Result<Option<QuantizationConfig>, ConfigError> {
    let object = raw.quantization_config.as_ref();
    let Some(mut fields) = Fields::of(raw, "quantization_config", object) else {
        return Ok(None);
    };
    let method: Option<String> = fields.take("quant_method")?;
    let method = method.ok_or_else(|| raw.missing(&fields.name("quant_method")))?;
    let excluded = excluded(&mut fields)?;
    let (rules, default) = match method.as_str() {
        "fp8" => (Vec::new(), vec![fp8(&mut fields)?]),
        "mxfp8" => (Vec::new(), vec![WeightFormat::Mxfp8]),
        "compressed-tensors" => compressed_tensors(&mut fields)?,
        "quark" => quark(&mut fields)?,
        _ => {
            let reason = format!(
                "is `{method}`, which is not supported; use a checkpoint in FP8, MXFP8 or MXFP4 of \
                 the method `fp8`, `compressed-tensors` or `quark`, or an unquantised one"
            );
            return Err(raw.unsupported(&fields.name("quant_method"), reason));
        }
    };
    Ok(Some(QuantizationConfig { method, default, rules, excluded }))
}

fn excluded(fields: &mut Fields<'_>) -> Result<NamePatterns, ConfigError> {
    let mut all = Vec::new();
    let mut spelling = EXCLUSIONS[0];
    for field in EXCLUSIONS {
        if let Some(entries) = fields.take::<Vec<String>>(field)? {
            all.extend(entries);
            spelling = field;
        }
    }
    patterns(fields, spelling, all)
}

fn patterns(
    fields: &Fields<'_>,
    field: &str,
    entries: Vec<String>,
) -> Result<NamePatterns, ConfigError> {
    NamePatterns::new(entries).map_err(|reason| fields.raw.invalid(&fields.name(field), reason))
}

/// The words of DeepSeek. `activation_scheme` and `scale_fmt` are about activations and about how
/// scales were rounded; weights are the same with any of them.
fn fp8(fields: &mut Fields<'_>) -> Result<WeightFormat, ConfigError> {
    let fmt: Option<String> = fields.take("fmt")?;
    if let Some(fmt) = fmt.filter(|fmt| !E4M3.contains(&fmt.as_str())) {
        let reason =
            format!("is `{fmt}`; only `e4m3`, the variant without infinities, can be read");
        return Err(fields.raw.unsupported(&fields.name("fmt"), reason));
    }
    let block = block(fields, "weight_block_size")?;
    Ok(block.map_or(WeightFormat::Fp8Tensor, WeightFormat::Fp8Block))
}

fn block(fields: &mut Fields<'_>, field: &str) -> Result<Option<[usize; 2]>, ConfigError> {
    let block: Option<[usize; 2]> = fields.take(field)?;
    match block {
        Some(block) if block.contains(&0) => {
            let reason = format!("is {block:?}; a block has at least one row and one column");
            Err(fields.raw.invalid(&fields.name(field), reason))
        }
        block => Ok(block),
    }
}

/// Old versions of the tool write it as `128x128`.
fn block_structure(weights: &mut Fields<'_>) -> Result<Option<[usize; 2]>, ConfigError> {
    weights.rewrite("block_structure", |value| {
        let sizes = value.as_str()?.split('x').map(|size| size.parse().ok());
        sizes.collect::<Option<Vec<u64>>>().map(Value::from)
    });
    block(weights, "block_structure")
}

fn compressed_tensors(fields: &mut Fields<'_>) -> Result<Rules, ConfigError> {
    let raw = fields.raw;
    let transforms: Option<Map<String, Value>> = fields.take("transform_config")?;
    if transforms.is_some_and(|transforms| !transforms.is_empty()) {
        let reason = "asks for transforms of activations, which are not supported";
        return Err(raw.unsupported(&fields.name("transform_config"), reason));
    }
    if let Some(mut sparsity) = fields.object("sparsity_config")? {
        let format: Option<String> = sparsity.take("format")?;
        if let Some(format) = format.filter(|format| format != "dense") {
            let reason = format!("is `{format}`; sparse weights are not supported");
            return Err(raw.unsupported(&sparsity.name("format"), reason));
        }
    }
    let format: Option<String> = fields.take("format")?;
    let groups = fields.object("config_groups")?;
    let groups = groups.ok_or_else(|| raw.missing(&fields.name("config_groups")))?;
    let (mut rules, mut default) = (Vec::new(), Vec::new());
    for (_, mut group) in groups.objects()? {
        let own: Option<String> = group.take("format")?;
        let packing = own.or_else(|| format.clone()).unwrap_or_default();
        let weights = group.object("weights")?;
        let weights = weights.map(|weights| compressed_weights(weights, &packing)).transpose()?;
        let targets: Vec<String> = group.take("targets")?.unwrap_or_default();
        let (all, named) = targets.into_iter().partition::<Vec<_>, _>(|target| target == LINEAR);
        if !all.is_empty() {
            default.extend(weights);
        }
        rules.push((patterns(&group, "targets", named)?, weights));
    }
    Ok((rules, default))
}

fn compressed_weights(mut weights: Fields<'_>, packing: &str) -> Result<WeightFormat, ConfigError> {
    let raw = weights.raw;
    let kind: String = weights.take("type")?.unwrap_or_default();
    let num_bits = weights.size("num_bits")?;
    let group_size: Option<i64> = weights.take("group_size")?;
    let is_mx = group_size == Some(MX_GROUP as i64);
    let strategy: Option<String> = weights.take("strategy")?;
    let strategy = strategy.as_deref().unwrap_or(match group_size {
        None => "tensor",
        Some(-1) => "channel",
        Some(_) => "group",
    });
    if weights.take("symmetric")? == Some(false) {
        let reason = "is false; weights with zero points are not supported";
        return Err(raw.unsupported(&weights.name("symmetric"), reason));
    }
    match (kind.as_str(), num_bits, strategy) {
        ("float", 8, "tensor") => Ok(WeightFormat::Fp8Tensor),
        ("float", 8, "channel") => Ok(WeightFormat::Fp8Channel),
        ("float", 8, "block") => {
            let block = block_structure(&mut weights)?;
            let block = block.ok_or_else(|| raw.missing(&weights.name("block_structure")))?;
            Ok(WeightFormat::Fp8Block(block))
        }
        ("float", 8, "group") if is_mx => Ok(WeightFormat::Mxfp8),
        ("float", 4, "group") if is_mx && packing.starts_with("mxfp4") => Ok(WeightFormat::Mxfp4),
        _ => {
            let format = match packing {
                "" => String::new(),
                packing => format!(" in the format `{packing}`"),
            };
            let groups = group_size.map_or(String::new(), |size| format!(" of {size}"));
            Err(other_format(
                &weights,
                &format!("{num_bits}-bit {kind}, {strategy}{groups}{format}"),
            ))
        }
    }
}

fn quark(fields: &mut Fields<'_>) -> Result<Rules, ConfigError> {
    let types: Option<Map<String, Value>> = fields.take("layer_type_quant_config")?;
    if types.is_some_and(|types| !types.is_empty()) {
        let reason = "is not supported; only `layer_quant_config` tells layers apart";
        return Err(fields.raw.unsupported(&fields.name("layer_type_quant_config"), reason));
    }
    let global = fields.object("global_quant_config")?;
    let default = global.map(quark_weight).transpose()?.flatten();
    let mut rules = Vec::new();
    if let Some(layers) = fields.object("layer_quant_config")? {
        for (pattern, layer) in layers.objects()? {
            let format = quark_weight(layer)?;
            rules.push((patterns(fields, "layer_quant_config", vec![pattern])?, format));
        }
    }
    Ok((rules, default.into_iter().collect()))
}

/// The format of a layer's weights; `None` if they are not quantised.
fn quark_weight(mut layer: Fields<'_>) -> Result<Option<WeightFormat>, ConfigError> {
    let Some(mut weight) = layer.object("weight")? else { return Ok(None) };
    let dtype: String = weight.take("dtype")?.unwrap_or_default();
    let qscheme: String = weight.take("qscheme")?.unwrap_or_default();
    let group_size: Option<usize> = weight.take("group_size")?;
    let scale_format: Option<String> = weight.take("scale_format")?;
    let is_mx = group_size == Some(MX_GROUP)
        && scale_format.as_deref().is_none_or(|format| format == "e8m0");
    match (dtype.as_str(), qscheme.as_str()) {
        ("fp8_e4m3", "per_tensor") => Ok(Some(WeightFormat::Fp8Tensor)),
        ("fp8_e4m3", "per_channel") => Ok(Some(WeightFormat::Fp8Channel)),
        ("fp8_e4m3", "per_block") => {
            let block = block(&mut weight, "block_size")?;
            Ok(Some(WeightFormat::Fp8Block(block.unwrap_or(DEFAULT_BLOCK))))
        }
        ("fp8_e4m3", "per_group") if is_mx => Ok(Some(WeightFormat::Mxfp8)),
        ("fp4", "per_group") if is_mx => Ok(Some(WeightFormat::Mxfp4)),
        _ => {
            let groups = group_size.map_or(String::new(), |size| format!(" of {size}"));
            let scales =
                scale_format.map_or(String::new(), |scale| format!(" with {scale} scales"));
            Err(other_format(&weight, &format!("{dtype} {qscheme}{groups}{scales}")))
        }
    }
}

fn other_format(weights: &Fields<'_>, format: &str) -> ConfigError {
    let reason = format!(
        "is {format}, which is not supported; use FP8 (e4m3) with one scale a tensor, channel or \
         block, MXFP8 or MXFP4"
    );
    weights.raw.unsupported(weights.outer(), reason)
}

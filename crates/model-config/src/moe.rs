//! Validation of the mixture of experts.

use crate::config::{Architecture, ExpertChoice, MoeConfig, RouterScoring};
use crate::dsa::LayerCounts;
use crate::error::ConfigError;
use crate::raw::RawConfig;
use crate::validate::{MAX_WIDTH, at_most, count, layer_list, positive, size, size_up_to};

/// Routed experts of all layers together; the largest public models have 30 thousand.
const MAX_EXPERTS: usize = 1 << 18;
const MAX_SHARED_EXPERTS: usize = 1 << 6;

/// `None` if the config names no routed experts.
pub(crate) fn moe(
    raw: &RawConfig,
    architecture: Architecture,
    n_layers: LayerCounts,
) -> Result<Option<MoeConfig>, ConfigError> {
    if raw.n_routed_experts.is_none() {
        check_layer_types(raw, None, n_layers)?;
        return Ok(None);
    }
    let is_v2 = architecture == Architecture::DeepseekV2;
    let scoring = router_scoring(raw, is_v2)?;
    let choice = expert_choice(raw, scoring)?;
    if is_v2 && raw.norm_topk_prob == Some(true) {
        // transformers does not divide, the model's own code divides and does not scale, and others
        // do both.
        let reason = "is true, on which readers of this model_type differ; only false is supported";
        return Err(raw.unsupported("norm_topk_prob", reason));
    }
    let mut config = MoeConfig {
        n_routed_experts: size(raw, "n_routed_experts", raw.n_routed_experts)?,
        num_experts_per_tok: size(raw, "num_experts_per_tok", raw.num_experts_per_tok)?,
        n_shared_experts: count(raw, "n_shared_experts", raw.n_shared_experts)?,
        moe_intermediate_size: size_up_to(
            raw,
            "moe_intermediate_size",
            raw.moe_intermediate_size,
            MAX_WIDTH,
        )?,
        n_group: size(raw, "n_group", raw.n_group.or(Some(1)))?,
        topk_group: size(raw, "topk_group", raw.topk_group.or(Some(1)))?,
        routed_scaling_factor: positive(
            raw,
            "routed_scaling_factor",
            raw.routed_scaling_factor,
            default_routed_scaling_factor(architecture),
        )?,
        norm_topk_prob: raw.norm_topk_prob.unwrap_or(!is_v2),
        scoring,
        choice,
        first_k_dense_replace: first_k_dense_replace(raw, n_layers)?,
        moe_layer_freq: size(raw, "moe_layer_freq", raw.moe_layer_freq.or(Some(1)))?,
    };
    if choice == ExpertChoice::Greedy {
        (config.n_group, config.topk_group) = (1, 1);
    }
    at_most(raw, "n_shared_experts", config.n_shared_experts, MAX_SHARED_EXPERTS)?;
    check_n_experts(raw, config.n_routed_experts, n_layers)?;
    check_moe(raw, &config, n_layers.target)?;
    check_layer_types(raw, Some(&config), n_layers)?;
    Ok(Some(config))
}

fn check_n_experts(
    raw: &RawConfig,
    n_routed_experts: usize,
    n_layers: LayerCounts,
) -> Result<(), ConfigError> {
    let n_layers = n_layers.target + n_layers.mtp;
    let max = MAX_EXPERTS / n_layers;
    if n_routed_experts <= max {
        return Ok(());
    }
    let reason = format!(
        "is {n_routed_experts}; with {n_layers} layers (num_hidden_layers and \
         num_nextn_predict_layers) it must be at most {max}"
    );
    Err(raw.invalid("n_routed_experts", reason))
}

/// Defaults of the published configuration classes, which old files leave out.
fn default_routed_scaling_factor(architecture: Architecture) -> f64 {
    match architecture {
        Architecture::DeepseekV2 | Architecture::Glm4Moe => 1.0,
        Architecture::DeepseekV3 | Architecture::DeepseekV32 | Architecture::GlmMoeDsa => 2.5,
    }
}

fn router_scoring(raw: &RawConfig, is_v2: bool) -> Result<RouterScoring, ConfigError> {
    match raw.scoring_func.as_deref() {
        None if is_v2 => Ok(RouterScoring::Softmax),
        None | Some("sigmoid") => Ok(RouterScoring::Sigmoid),
        Some("softmax") => Ok(RouterScoring::Softmax),
        Some(other) => {
            let reason = format!("is `{other}`; use sigmoid or softmax");
            Err(raw.unsupported("scoring_func", reason))
        }
    }
}

/// Where the config does not say, a sigmoid router has a correction bias and a softmax router, as
/// those before DeepSeek-V3, has none.
fn expert_choice(raw: &RawConfig, scoring: RouterScoring) -> Result<ExpertChoice, ConfigError> {
    match raw.topk_method.as_deref() {
        None if scoring == RouterScoring::Softmax => {
            let is_grouped = raw.n_group.is_some_and(|n_group| n_group > 1);
            Ok(if is_grouped { ExpertChoice::GroupLimitedGreedy } else { ExpertChoice::Greedy })
        }
        None | Some("noaux_tc") => Ok(ExpertChoice::NoauxTc),
        Some("greedy") => Ok(ExpertChoice::Greedy),
        Some("group_limited_greedy") => Ok(ExpertChoice::GroupLimitedGreedy),
        Some(other) => {
            let reason = format!("is `{other}`; use noaux_tc, greedy or group_limited_greedy");
            Err(raw.unsupported("topk_method", reason))
        }
    }
}

fn check_moe(
    raw: &RawConfig,
    config: &MoeConfig,
    num_hidden_layers: usize,
) -> Result<(), ConfigError> {
    let MoeConfig { n_routed_experts, n_group, topk_group, num_experts_per_tok, .. } = *config;
    if !n_routed_experts.is_multiple_of(n_group) {
        let reason = format!("is {n_routed_experts}, which n_group ({n_group}) does not divide");
        return Err(raw.invalid("n_routed_experts", reason));
    }
    if topk_group > n_group {
        let reason = format!("is {topk_group}; it must be at most n_group ({n_group})");
        return Err(raw.invalid("topk_group", reason));
    }
    let group_size = n_routed_experts / n_group;
    if config.choice == ExpertChoice::NoauxTc && n_group > 1 && group_size < 2 {
        let reason = format!(
            "is {n_group}, one expert a group; a group's score is the sum of its two best, so it \
             must be at most {}",
            n_routed_experts / 2
        );
        return Err(raw.invalid("n_group", reason));
    }
    let n_choices = group_size * topk_group;
    if num_experts_per_tok > n_choices {
        let reason = format!(
            "is {num_experts_per_tok}, but topk_group ({topk_group}) groups of n_routed_experts / \
             n_group ({group_size}) hold {n_choices} experts; it must be at most that"
        );
        return Err(raw.invalid("num_experts_per_tok", reason));
    }
    if config.first_k_dense_replace > num_hidden_layers {
        let reason = format!(
            "is {}; it must be at most num_hidden_layers ({num_hidden_layers})",
            config.first_k_dense_replace
        );
        return Err(raw.invalid("first_k_dense_replace", reason));
    }
    Ok(())
}

/// The leading dense layers, by number or by the list.
fn first_k_dense_replace(raw: &RawConfig, n_layers: LayerCounts) -> Result<usize, ConfigError> {
    let listed = || raw.mlp_layer_types.as_ref()?.iter().position(|name| name != "dense");
    let is_listed = raw.first_k_dense_replace.is_none() && raw.mlp_layer_types.is_some();
    let value = if is_listed {
        Some(listed().unwrap_or(n_layers.target))
    } else {
        raw.first_k_dense_replace
    };
    count(raw, "first_k_dense_replace", value)
}

/// Checks that `mlp_layer_types` says of each layer what the numbers say.
fn check_layer_types(
    raw: &RawConfig,
    config: Option<&MoeConfig>,
    n_layers: LayerCounts,
) -> Result<(), ConfigError> {
    let Some(types) = &raw.mlp_layer_types else { return Ok(()) };
    layer_list(raw, "mlp_layer_types", types, n_layers)?;
    for (layer_idx, name) in types.iter().enumerate() {
        let field = format!("mlp_layer_types[{layer_idx}]");
        if name != "dense" && name != "sparse" {
            let reason = format!("is `{name}`; use dense or sparse");
            return Err(raw.unsupported(&field, reason));
        }
        let is_moe = config.is_some_and(|moe| moe.is_moe_layer(layer_idx));
        let expected = if is_moe { "sparse" } else { "dense" };
        if name != expected {
            let reason = format!(
                "is `{name}`, but by n_routed_experts, first_k_dense_replace and moe_layer_freq \
                 the layer is {expected}; make them agree"
            );
            return Err(raw.invalid(&field, reason));
        }
    }
    Ok(())
}

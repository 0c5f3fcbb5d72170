//! Validation of the settings of sparse attention, and the schedule of its layers.

use crate::config::{Architecture, AttentionConfig, DsaConfig, IndexerKind};
use crate::error::ConfigError;
use crate::raw::{Letters, RawConfig};
use crate::validate::{MAX_HEAD_DIM, MAX_HEADS, layer_list, size, size_up_to};

/// Layers from the last of so many on follow the frequency, where the config does not say.
const DEFAULT_SKIP_OFFSET: usize = 2;
const ONLY_LAYER_TYPE: &str = "deepseek_sparse_attention";

/// `None` for a config without `index_topk` of an architecture that may be dense; what else it may
/// say about indexers has no effect.
pub(crate) fn dsa(
    raw: &RawConfig,
    architecture: Architecture,
    attention: &AttentionConfig,
    n_layers: LayerCounts,
) -> Result<Option<DsaConfig>, ConfigError> {
    if raw.index_topk.is_none() {
        match architecture {
            Architecture::DeepseekV2 | Architecture::DeepseekV3 | Architecture::Glm4Moe => {
                return Ok(None);
            }
            Architecture::DeepseekV32 | Architecture::GlmMoeDsa => {}
        }
        let reason = "is missing, but this model's attention is sparse; set it to the number of \
                      keys that a row attends, or use the model_type `deepseek_v3` if it is dense";
        return Err(raw.invalid("index_topk", reason));
    }
    let AttentionConfig::Mla(attention) = attention else {
        let reason = "is set, but this model's attention is grouped-query, which has no sparse \
                      form here; remove it if the attention is dense";
        return Err(raw.unsupported("index_topk", reason));
    };
    if attention.q_lora_rank.is_none() {
        let reason = "is missing; the indexer of sparse attention (index_topk) makes its queries \
                      from the query latent, so it needs one";
        return Err(raw.invalid("q_lora_rank", reason));
    }
    let config = DsaConfig {
        index_topk: size(raw, "index_topk", raw.index_topk)?,
        index_n_heads: size_up_to(raw, "index_n_heads", raw.index_n_heads, MAX_HEADS)?,
        index_head_dim: size_up_to(raw, "index_head_dim", raw.index_head_dim, MAX_HEAD_DIM)?,
        rope_interleaved: raw
            .indexer_rope_interleave
            .unwrap_or(architecture == Architecture::GlmMoeDsa),
        indexer_kinds: indexer_kinds(raw, n_layers)?,
        index_share_for_mtp_iteration: raw.index_share_for_mtp_iteration.unwrap_or(false),
    };
    if config.index_head_dim < attention.qk_rope_head_dim {
        let reason = format!(
            "is {}; it must be at least qk_rope_head_dim ({}), the rotated part of the head",
            config.index_head_dim, attention.qk_rope_head_dim
        );
        return Err(raw.invalid("index_head_dim", reason));
    }
    check_layer_types(raw, n_layers)?;
    Ok(Some(config))
}

/// Layers of a model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LayerCounts {
    /// Of the target.
    pub(crate) target: usize,
    /// Behind the target.
    pub(crate) mtp: usize,
}

/// What each layer of the target does: `indexer_types` says, else `index_topk_pattern`, else
/// `index_topk_freq`, else every layer has an indexer.
///
/// What is declared always holds: a checkpoint has no indexer for a layer that it declares shared,
/// so there is no switch (`use_index_cache` elsewhere) to ignore it. Entries behind the target's
/// layers are read and not used, because an MTP layer never shares: the target's selection is not
/// its own. If its indexer is not in the checkpoint, drafting is refused by the tensors' names.
pub(crate) fn indexer_kinds(
    raw: &RawConfig,
    n_layers: LayerCounts,
) -> Result<Vec<IndexerKind>, ConfigError> {
    let (field, mut kinds) = if let Some(types) = &raw.indexer_types {
        let field = "indexer_types";
        (field, kinds_of_words(raw, field, types, n_layers)?)
    } else if let Some(pattern) = &raw.index_topk_pattern {
        let field = "index_topk_pattern";
        let letters = match pattern {
            Letters::Text(text) => text.chars().map(String::from).collect(),
            Letters::List(list) => list.clone(),
        };
        (field, kinds_of_words(raw, field, &letters, n_layers)?)
    } else {
        ("index_topk_freq", kinds_by_frequency(raw, n_layers)?)
    };
    kinds.truncate(n_layers.target);
    if kinds.first() == Some(&IndexerKind::Shared) {
        let reason = "is shared, but no layer before it selects keys; the first layer must be full";
        return Err(raw.invalid(&format!("{field}[0]"), reason));
    }
    Ok(kinds)
}

fn kinds_of_words(
    raw: &RawConfig,
    field: &str,
    words: &[String],
    n_layers: LayerCounts,
) -> Result<Vec<IndexerKind>, ConfigError> {
    layer_list(raw, field, words, n_layers)?;
    let kind = |(entry_idx, word): (usize, &String)| match word.as_str() {
        "full" | "F" => Ok(IndexerKind::Full),
        "shared" | "S" => Ok(IndexerKind::Shared),
        other => {
            let reason = format!("is `{other}`; use full (F) or shared (S)");
            Err(raw.unsupported(&format!("{field}[{entry_idx}]"), reason))
        }
    };
    words.iter().enumerate().map(kind).collect()
}

/// The first `index_skip_topk_offset` layers are full, and behind them each one that is a multiple
/// of `index_topk_freq` after the last of these, as transformers 5 reads the two fields; GLM-5.2,
/// whose config has 3 and 4, runs the indexer in its layers 0, 1, 2, 6, 10, ... A checkpoint that
/// was meant for another reading lacks the indexer of a full layer and is refused by its name.
fn kinds_by_frequency(
    raw: &RawConfig,
    n_layers: LayerCounts,
) -> Result<Vec<IndexerKind>, ConfigError> {
    let freq = size(raw, "index_topk_freq", raw.index_topk_freq.or(Some(1)))?;
    let offset = raw.index_skip_topk_offset.unwrap_or(DEFAULT_SKIP_OFFSET);
    if offset == 0 && freq > 1 {
        let reason = "is 0, but no layer before the first selects keys; it must be at least 1";
        return Err(raw.invalid("index_skip_topk_offset", reason));
    }
    let kind = |layer_idx: usize| {
        if (layer_idx + 1).saturating_sub(offset).is_multiple_of(freq) {
            IndexerKind::Full
        } else {
            IndexerKind::Shared
        }
    };
    Ok((0..n_layers.target).map(kind).collect())
}

fn check_layer_types(raw: &RawConfig, n_layers: LayerCounts) -> Result<(), ConfigError> {
    let Some(types) = &raw.layer_types else { return Ok(()) };
    layer_list(raw, "layer_types", types, n_layers)?;
    match types.iter().position(|name| name != ONLY_LAYER_TYPE) {
        None => Ok(()),
        Some(entry_idx) => {
            let reason = format!(
                "is `{}`; with index_topk only `{ONLY_LAYER_TYPE}` is supported",
                types[entry_idx]
            );
            Err(raw.unsupported(&format!("layer_types[{entry_idx}]"), reason))
        }
    }
}

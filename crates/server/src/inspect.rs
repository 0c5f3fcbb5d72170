//! `tandem inspect`: a checkpoint described from its config and its headers.

use std::fmt::Write as _;

use anyhow::Result;
use model_config::RawConfig;
use serde_json::{Map, Value, json};
use weights::{Checkpoint, CheckpointSummary, WeightsError};

use crate::cli::InspectArgs;
use crate::output;

pub(crate) fn run(args: &InspectArgs) -> Result<()> {
    let dir = bundled_checkpoints::resolve(&args.model, None)?;
    let raw = RawConfig::load(&dir)?;
    let summary = match Checkpoint::open(&dir) {
        Err(WeightsError::NoWeights { .. }) => CheckpointSummary::of_config(&raw)?,
        opened => opened?.summarize(&raw),
    };
    if args.json { output::json_line(&to_json(&summary)) } else { output::text(&to_text(&summary)) }
}

fn to_json(summary: &CheckpointSummary) -> Value {
    let config = &summary.config;
    let sparse = config.sparse.as_ref();
    let mut parameters: Map<String, Value> = summary
        .parameters
        .rows()
        .iter()
        .map(|&(part, count)| (part.replace(' ', "_"), json!(count)))
        .collect();
    parameters.insert("total".to_owned(), json!(summary.parameters.total()));
    json!({
        "architecture": config.architecture,
        "model_type": config.model_type,
        "dtype": config.dtype,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "n_routed_experts": config.n_routed_experts,
        "num_experts_per_tok": config.num_experts_per_tok,
        "n_shared_experts": config.n_shared_experts,
        "max_position_embeddings": config.max_position_embeddings,
        "index_topk": sparse.map(|sparse| sparse.index_topk),
        "index_n_heads": sparse.and_then(|sparse| sparse.index_n_heads),
        "index_head_dim": sparse.and_then(|sparse| sparse.index_head_dim),
        "num_full_index_layers": sparse.and_then(|sparse| sparse.num_full_layers),
        "num_shared_index_layers": sparse.and_then(|sparse| sparse.num_shared_layers),
        "index_share_for_mtp_iteration": sparse.map(|sparse| sparse.index_share_for_mtp_iteration),
        "parameters": parameters,
        "has_weights": summary.has_weights,
        "bytes": summary.total_bytes(),
        "bytes_by_dtype": summary.bytes_by_dtype,
        "kv_bytes_per_token": config.kv_bytes_per_token,
        "index_bytes_per_token": sparse.and_then(|sparse| sparse.index_bytes_per_token),
        "num_mtp_layers": config.num_mtp_layers,
        "num_mtp_layers_present": summary.num_mtp_layers_present,
        "is_mtp_complete": summary.is_mtp_complete,
        "quantization": config.quant_method,
        "refusal": summary.refusal,
    })
}

fn to_text(summary: &CheckpointSummary) -> String {
    let config = &summary.config;
    let mut text = String::new();
    let mut line = |label: &str, value: String| {
        writeln!(text, "{label:<22}{value}").expect("writing to a string succeeds");
    };
    line("architecture", shown(config.architecture.as_ref()));
    line("model type", shown(config.model_type.as_ref()));
    line("dtype", shown(config.dtype.as_ref()));
    line("layers", shown(config.num_hidden_layers));
    line("hidden size", shown(config.hidden_size));
    line("attention heads", shown(config.num_attention_heads));
    if let Some(n_experts) = config.n_routed_experts {
        let per_tok = shown(config.num_experts_per_tok);
        let shared = config.n_shared_experts.unwrap_or(0);
        line("experts", format!("{n_experts} routed, {per_tok} a token, {shared} shared"));
    }
    if let Some(sparse) = &config.sparse {
        line("sparse attention", format!("a row attends {} keys at most", sparse.index_topk));
        let (heads, width) = (shown(sparse.index_n_heads), shown(sparse.index_head_dim));
        line("  indexer heads", format!("{heads} of width {width}"));
        let (full, shared) = (shown(sparse.num_full_layers), shown(sparse.num_shared_layers));
        line("  layers", format!("{full} select, {shared} share"));
        let is_shared = sparse.index_share_for_mtp_iteration;
        let steps = if is_shared { "share the selection of the first" } else { "each select" };
        line("  draft steps", steps.to_owned());
    }
    line("vocabulary", shown(config.vocab_size));
    line("longest sequence", format!("{} tokens", shown(config.max_position_embeddings)));
    if !summary.has_weights {
        line("weights", "none: needs --load-format dummy".to_owned());
    }
    line("parameters", summary.parameters.total().to_string());
    for (part, count) in summary.parameters.rows() {
        if count > 0 {
            line(&format!("  {part}"), count.to_string());
        }
    }
    line("bytes", summary.total_bytes().to_string());
    for (dtype, bytes) in &summary.bytes_by_dtype {
        line(&format!("  {dtype}"), bytes.to_string());
    }
    line("KV bytes a token", shown(config.kv_bytes_per_token));
    if let Some(sparse) = &config.sparse {
        line("index bytes a token", shown(sparse.index_bytes_per_token));
    }
    line("MTP layers", mtp_layers(summary));
    line("quantisation", config.quant_method.clone().unwrap_or_else(|| "none".to_owned()));
    if let Some(refusal) = &summary.refusal {
        line("not runnable", refusal.clone());
    }
    text
}

fn mtp_layers(summary: &CheckpointSummary) -> String {
    let state = match summary.is_mtp_complete {
        Some(true) => "complete",
        Some(false) => "INCOMPLETE: drafting is not possible",
        None => "not checked",
    };
    let (promised, present) = (summary.config.num_mtp_layers, summary.num_mtp_layers_present);
    if !summary.has_weights || promised == 0 && present == 0 {
        return promised.to_string();
    }
    format!("{promised} in the config, {present} in the files, {state}")
}

fn shown(value: Option<impl ToString>) -> String {
    value.map_or_else(|| "not said".to_owned(), |value| value.to_string())
}

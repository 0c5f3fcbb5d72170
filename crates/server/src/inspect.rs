//! `tandem inspect`: a checkpoint described from its config and its headers.

mod fit;

use std::fmt::Write as _;
use std::process::ExitCode;

use anyhow::Result;
use chat_template::ChatTemplate;
use model_config::ConfigSummary;
use serde_json::{Map, Value, json};
use settings::{Dtype, IndexCacheArg};
use tokenization::Tokenizer;
use weights::{CheckpointSummary, Problem, WeightsSource};

use crate::cli::InspectArgs;
use crate::output;
use fit::Fit;
pub(crate) use fit::FitArgs;

/// Lines of a problem that are shown; JSON has all.
const MAX_LINES: usize = 12;

/// A summary seen with the flags of a command.
struct Report<'a> {
    args: &'a InspectArgs,
    summary: CheckpointSummary,
    drafting: bool,
    /// Bytes of a value in the dtype that the model would compute in.
    value_bytes: u64,
}

/// Succeeds if the checkpoint would load.
pub(crate) fn run(args: &InspectArgs) -> Result<ExitCode> {
    let dir = bundled_checkpoints::resolve(&args.model, None)?;
    let mut summary = CheckpointSummary::of(&dir)?;
    let tokenizer = Tokenizer::load_if_present(&dir).err().map(|error| error.to_string());
    let template = ChatTemplate::load(&dir).err().map(|error| error.to_string());
    let problems = tokenizer.into_iter().chain(template);
    summary.problems.extend(problems.map(|text| Problem { text, only_drafting: false }));
    let value_bytes = match (args.fit.dtype, summary.config.dtype.as_deref()) {
        (Some(Dtype::Float32), _) | (None, Some("float32")) => 4,
        _ => 2,
    };
    let drafting = args.num_speculative_tokens > 0;
    let report = Report { args, summary, drafting, value_bytes };
    if args.json { output::json_line(&report.to_json()) } else { output::text(&report.to_text()) }?;
    Ok(if report.loads() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

impl Report<'_> {
    fn loads(&self) -> bool {
        self.summary.problems(self.drafting).next().is_none()
    }

    fn dtype(&self) -> &'static str {
        if self.value_bytes == 4 { "float32" } else { "bfloat16" }
    }

    /// Whether it is known which tensors there are.
    fn is_known(&self) -> bool {
        self.summary.total_bytes() > 0
    }

    /// Bytes of weights in memory, if it is known what the model keeps.
    fn loaded_bytes(&self) -> Option<u64> {
        let target = self.summary.loaded?.n_bytes(self.value_bytes);
        let mtp = self.summary.loaded_mtp.n_bytes(self.value_bytes);
        Some(target + if self.drafting { mtp } else { 0 })
    }

    /// Bytes of KV and of index keys a token.
    fn cache_bytes(&self) -> Option<(u64, u64)> {
        let is_fp8 = self.args.fit.index_cache_dtype == IndexCacheArg::Fp8;
        let config = &self.summary.config;
        let bytes =
            config.cache_bytes_per_token(self.value_bytes as usize, is_fp8, self.drafting)?;
        Some((bytes.kv, bytes.index))
    }

    /// Tokens of the longest sequence.
    fn longest(&self) -> u64 {
        self.summary.config.max_position_embeddings.unwrap_or(usize::MAX) as u64
    }

    /// What a GPU holds, with a name for how the weights are held.
    fn fits(&self) -> Option<Vec<(&'static str, Fit)>> {
        let args = &self.args.fit;
        let usable = (args.gpu_memory? as f64 * args.gpu_memory_utilization) as u64;
        let (kv, index) = self.cache_bytes()?;
        let longest = self.longest();
        // No sequence is longer than the model takes.
        let (context, batch) = (args.context.min(longest), args.batch);
        let fit = |weights| Fit { usable, weights, token: kv + index, context, batch, longest };
        let stored = self.is_known().then(|| self.summary.total_bytes());
        let weights = [("as_loaded", self.loaded_bytes()), ("as_stored", stored)];
        Some(weights.into_iter().filter_map(|(name, bytes)| Some((name, fit(bytes?)))).collect())
    }

    fn to_json(&self) -> Value {
        let summary = &self.summary;
        let mut object = config_json(summary);
        let parts = summary.parameters.rows();
        let mut parameters: Map<String, Value> =
            parts.iter().map(|&(part, count)| (part.replace(' ', "_"), json!(count))).collect();
        parameters.insert("total".to_owned(), json!(summary.parameters.total()));
        object["parameters"] = json!(self.is_known().then_some(parameters));
        object["source"] = json!(match summary.source {
            WeightsSource::Shards => "shards",
            WeightsSource::Index => "index",
            WeightsSource::Config => "config",
        });
        object["bytes"] = json!(self.is_known().then(|| summary.total_bytes()));
        object["bytes_by_dtype"] = json!(summary.bytes_by_dtype);
        object["compute_dtype"] = json!(self.dtype());
        object["loaded_bytes"] = json!(self.loaded_bytes());
        object["kv_bytes_per_token"] = json!(self.cache_bytes().map(|(kv, _)| kv));
        let index = self.cache_bytes().filter(|_| summary.config.sparse.is_some());
        object["index_bytes_per_token"] = json!(index.map(|(_, index)| index));
        object["num_mtp_layers_present"] = json!(summary.num_mtp_layers_present);
        object["is_mtp_complete"] = json!(summary.is_mtp_complete);
        object["gpu"] = self.gpu_json();
        object["loads"] = json!(self.loads());
        let problems = summary.problems(self.drafting);
        let problems =
            problems.map(|it| json!({"text": it.text, "only_drafting": it.only_drafting}));
        object["problems"] = problems.collect();
        object
    }

    fn gpu_json(&self) -> Value {
        let Some(fits) = self.fits() else { return Value::Null };
        let args = &self.args.fit;
        let mut gpu = json!({"context": args.context.min(self.longest()), "batch": args.batch});
        for (name, fit) in fits {
            gpu["usable_bytes"] = json!(fit.usable);
            // No memory has so many bytes that these would not be numbers of JSON.
            gpu["cache_bytes"] = json!(fit.cache() as u64);
            gpu[name] = json!({
                "weight_bytes": fit.weights,
                "left_bytes": fit.left() as i64,
                "max_sequences": fit.max_sequences(),
                "max_context": fit.max_context(),
            });
        }
        gpu
    }

    fn to_text(&self) -> String {
        let Self { summary, .. } = self;
        let mut lines = config_lines(&summary.config);
        let mut line = |label: &str, value: String| lines.push((label.to_owned(), value));
        let from = match summary.source {
            WeightsSource::Shards => "",
            WeightsSource::Index => ", by the index and the config: no shard is here",
            WeightsSource::Config => ", by the config: there are no weights here",
        };
        let total = self.is_known().then(|| grouped(summary.parameters.total()));
        line("parameters", format!("{}{from}", shown(total)));
        for (part, count) in summary.parameters.rows().into_iter().filter(|row| row.1 > 0) {
            line(&format!("  {part}"), grouped(count));
        }
        line("bytes", shown(self.is_known().then(|| bytes(summary.total_bytes().into()))));
        for (dtype, &n_bytes) in &summary.bytes_by_dtype {
            line(&format!("  {dtype}"), bytes(n_bytes.into()));
        }
        let loaded = self.loaded_bytes().map(|n_bytes| bytes(n_bytes.into()));
        line(&format!("bytes in {}", self.dtype()), shown(loaded));
        line("KV bytes a token", shown(self.cache_bytes().map(|(kv, _)| grouped(kv))));
        if summary.config.sparse.is_some() {
            line("index bytes a token", shown(self.cache_bytes().map(|(_, n)| grouped(n))));
        }
        line("MTP layers", mtp_layers(summary));
        let quantization = summary.config.quant_method.clone();
        line("quantisation", quantization.unwrap_or_else(|| "none".to_owned()));
        let mut fits = self.fits().unwrap_or_default();
        // Once is enough where weights are loaded as they are stored.
        fits.dedup_by_key(|(_, fit)| fit.weights);
        for (name, fit) in fits {
            self.fit_lines(name, &fit, &mut line);
        }
        let mut text = String::new();
        for (label, value) in lines {
            writeln!(text, "{label:<24}{value}").expect("writing to a string succeeds");
        }
        for problem in summary.problems(self.drafting) {
            text.push_str(&shown_problem(problem));
        }
        text
    }

    fn fit_lines(&self, name: &str, fit: &Fit, line: &mut impl FnMut(&str, String)) {
        let (context, batch) = (grouped(fit.context), fit.batch);
        let how = if name == "as_stored" { "as stored" } else { self.dtype() };
        line(&format!("one GPU, {how}"), format!("{} usable", bytes(fit.usable.into())));
        line("  weights", bytes(fit.weights.into()));
        line("  KV and index", format!("{}, {batch} x {context} tokens", bytes(fit.cache())));
        let sign = if fit.left() < 0 { "-" } else { "" };
        let end = if fit.left() < 0 { ": does not fit" } else { "" };
        line("  left", format!("{sign}{}{end}", bytes(fit.left().unsigned_abs())));
        line("  sequences", format!("at most {} of {context} tokens", fit.max_sequences()));
        let longest = grouped(fit.max_context());
        line("  context", format!("at most {longest} tokens for {batch} sequences"));
    }
}

fn shown_problem(problem: &Problem) -> String {
    let label = if problem.only_drafting { "cannot draft" } else { "cannot load" };
    let n_lines = problem.text.lines().count();
    if n_lines <= MAX_LINES {
        return format!("{label}: {}\n", problem.text);
    }
    let shown = problem.text.lines().take(MAX_LINES).collect::<Vec<_>>().join("\n");
    format!("{label}: {shown}\n  and {} more, see --json\n", n_lines - MAX_LINES)
}

fn config_json(summary: &CheckpointSummary) -> Value {
    let config = &summary.config;
    let sparse = config.sparse.as_ref();
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
        "num_mtp_layers": config.num_mtp_layers,
        "quantization": config.quant_method,
    })
}

fn config_lines(config: &ConfigSummary) -> Vec<(String, String)> {
    let mut lines = Vec::new();
    let mut line = |label: &str, value: String| lines.push((label.to_owned(), value));
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
    lines
}

fn mtp_layers(summary: &CheckpointSummary) -> String {
    let state = match summary.is_mtp_complete {
        Some(true) => "complete",
        Some(false) => "INCOMPLETE: drafting is not possible",
        None => "not checked",
    };
    let (promised, present) = (summary.config.num_mtp_layers, summary.num_mtp_layers_present);
    if summary.source == WeightsSource::Config || promised == 0 && present == 0 {
        return promised.to_string();
    }
    let place = if summary.source == WeightsSource::Index { "index" } else { "files" };
    format!("{promised} in the config, {present} in the {place}, {state}")
}

fn shown(value: Option<impl ToString>) -> String {
    value.map_or_else(|| "not said".to_owned(), |value| value.to_string())
}

/// Digits in groups of three.
fn grouped(number: impl ToString) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (idx, digit) in digits.chars().enumerate() {
        if idx > 0 && (digits.len() - idx).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Bytes, and what they are in GiB where that says more.
fn bytes(n_bytes: u128) -> String {
    let gib = n_bytes as f64 / f64::from(1 << 30);
    if gib < 0.1 { grouped(n_bytes) } else { format!("{} ({gib:.1} GiB)", grouped(n_bytes)) }
}

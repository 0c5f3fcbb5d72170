//! `[engine]`: what every command that runs a model needs to know.

use std::time::Duration;

use clap::builder::RangedI64ValueParser;
use clap::{Args, ValueEnum, value_parser};
use serde::Serialize;

use crate::seconds;

/// What runs where no model is named.
pub const DEFAULT_MODEL: &str = "tiny-glm52";

/// What every command that runs a model needs to know.
#[derive(Clone, Debug, PartialEq, Args, Serialize)]
#[group(id = "engine")]
#[serde(rename_all = "kebab-case")]
pub struct EngineSettings {
    /// Checkpoint folder in the Hugging Face layout, or the name of a bundled checkpoint
    #[arg(long, default_value = DEFAULT_MODEL)]
    pub model: String,
    /// Whether the weights are the checkpoint's, or random ones of the same shapes, for benches:
    /// then a folder needs no more than a config.json, and the texts mean nothing
    #[arg(long, value_enum, default_value_t = LoadFormatArg::Auto)]
    pub load_format: LoadFormatArg,
    /// Drafts a step from the checkpoint's MTP layers, 0 to 8; 0 turns drafting off
    #[arg(long, default_value_t = 3)]
    pub num_speculative_tokens: u32,
    /// Whether draft steps after the first attend to the keys that the first selected, in models
    /// with sparse attention, instead of running their indexer again
    #[arg(long, value_enum, default_value_t = IndexShareArg::Auto)]
    pub index_share: IndexShareArg,
    /// Whether drafts are the MTP layers' likeliest tokens, or drawn from their distribution at the
    /// request's temperature; either way outputs have the target's distribution
    #[arg(long, value_enum, default_value_t = DraftSamplingArg::Greedy)]
    pub draft_sampling: DraftSamplingArg,
    /// For benches: accept drafts by a schedule with this mean length of a step's run, 1 to
    /// --num-speculative-tokens + 1, instead of by the model; the texts mean nothing then
    #[arg(long)]
    pub spec_decode_acceptance_length: Option<f64>,
    /// The same by the share of accepted drafts, 0 to 1
    #[arg(long)]
    pub spec_decode_acceptance_rate: Option<f64>,
    /// Compute and KV cache dtype [default: the checkpoint's]
    #[arg(long, value_enum)]
    pub dtype: Option<Dtype>,
    /// How the indexer's keys are cached, in models with sparse attention
    #[arg(long, value_enum, default_value_t = IndexCacheArg::Auto)]
    pub index_cache_dtype: IndexCacheArg,
    /// Tokens a KV block
    #[arg(long, default_value_t = 16)]
    pub block_size: u32,
    /// KV blocks in the pool [default: what --max-num-seqs full-length requests or
    /// --kv-cache-memory hold, whichever is less]
    #[arg(long)]
    pub num_blocks: Option<u32>,
    /// Upper bound of the KV pool in MiB where --num-blocks is not given [default: 256; on a GPU
    /// what --gpu-memory-utilization leaves]
    #[arg(long)]
    pub kv_cache_memory: Option<u64>,
    /// Largest number of requests in one step
    #[arg(long, default_value_t = 64, value_parser = value_parser!(u32).range(1..=1 << 16))]
    pub max_num_seqs: u32,
    /// Largest number of tokens in one step; longer prompts are prefilled in chunks [default: 2048;
    /// on a GPU 8192]
    #[arg(long)]
    pub max_num_batched_tokens: Option<u32>,
    /// Largest length of a request, prompt and output together [default: the model's]
    #[arg(long)]
    pub max_model_len: Option<u32>,
    /// Requests that may wait behind the running ones before new ones are refused
    #[arg(long, default_value_t = 256)]
    pub max_queued_requests: u32,
    /// Seconds that a request may wait for its first step; one that waits longer ends without
    /// tokens [default: no limit]
    #[arg(long, value_parser = seconds::fraction)]
    #[serde(serialize_with = "seconds::serialize")]
    pub max_queue_wait: Option<Duration>,
    /// How many drafts a request makes in a step: always --num-speculative-tokens, or up to that as
    /// many as pay by its acceptance and the size of the batch; outputs are the same either way
    /// [default: adaptive for serve, fixed for generate, whose figures can then be compared]
    #[arg(long, value_enum)]
    pub drafting: Option<DraftingArg>,
    /// Whether the next step is planned and launched before the tokens of this one have come, so
    /// that a device does not wait for the host; outputs are the same either way
    #[arg(long, value_enum, default_value_t = OutputModeArg::Immediate)]
    pub output_mode: OutputModeArg,
    /// Who starts first, and who gives up blocks last
    #[arg(long, value_enum, default_value_t = PolicyArg::Fcfs)]
    pub scheduling_policy: PolicyArg,
    /// With --scheduling-policy priority: steps of waiting that make up for one level of priority,
    /// so that nobody waits for ever [default: 1000]
    #[arg(long, value_parser = at_least_1())]
    pub priority_aging_steps: Option<u32>,
    /// Chunks of a prompt that does not fit a step are a multiple of this, or of --block-size if
    /// that is greater
    #[arg(long, default_value_t = 64, value_parser = at_least_1())]
    pub chunk_alignment: u32,
    /// Largest number of prompt tokens of one request and step, at least --block-size, so that long
    /// prompts leave room for others; 0 sets no limit
    #[arg(long, default_value_t = 0)]
    pub long_prefill_token_threshold: u32,
    /// Compute every prompt afresh instead of sharing the KV blocks of equal prefixes; outputs are
    /// the same either way
    #[arg(long)]
    pub no_prefix_caching: bool,
    /// Where the model runs: auto takes the first GPU that is usable, and else the CPU
    #[arg(
        long,
        value_name = "auto|cpu|cuda:N|rocm:N",
        default_value = "auto",
        value_parser = device
    )]
    pub device: String,
    /// Share of the GPU's memory that weights, workspaces and the KV pool take together, where
    /// --num-blocks is not given
    #[arg(long, default_value_t = 0.9, value_parser = share)]
    pub gpu_memory_utilization: f64,
    /// Queue the launches of decode steps on a GPU one by one instead of replaying graphs; outputs
    /// are the same either way
    #[arg(long)]
    pub no_gpu_graphs: bool,
    /// CPU threads [default: one a core]
    #[arg(long)]
    pub threads: Option<usize>,
}

fn device(text: &str) -> Result<String, String> {
    let is_number = |text: &str| text.parse::<u32>().is_ok();
    let is_device = match text.split_once(':') {
        None => matches!(text, "auto" | "cpu" | "cuda" | "rocm"),
        Some((kind, number)) => matches!(kind, "cuda" | "rocm") && is_number(number),
    };
    if is_device { Ok(text.to_owned()) } else { Err("give auto, cpu, cuda:N or rocm:N".to_owned()) }
}

fn share(text: &str) -> Result<f64, String> {
    let share = text.parse().ok().filter(|share: &f64| *share > 0.0 && *share <= 1.0);
    share.ok_or_else(|| "give a number above 0 and up to 1".to_owned())
}

fn at_least_1() -> RangedI64ValueParser<u32> {
    value_parser!(u32).range(1..)
}

impl EngineSettings {
    /// Whether drafts are accepted by a schedule instead of by the model.
    pub fn is_synthetic(&self) -> bool {
        self.spec_decode_acceptance_length.or(self.spec_decode_acceptance_rate).is_some()
    }
}

/// Where weights are from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum LoadFormatArg {
    /// The checkpoint's files
    Auto,
    /// Drawn, the same on every run
    Dummy,
}

/// How drafts are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum DraftSamplingArg {
    /// The likeliest tokens
    Greedy,
    /// Drawn
    Sampled,
}

/// How the number of drafts is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum DraftingArg {
    /// Always --num-speculative-tokens
    Fixed,
    /// As many as pay
    Adaptive,
}

/// When the host learns a step's tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum OutputModeArg {
    /// Before the next step is planned
    Immediate,
    /// After the next step is planned and launched
    Deferred,
}

/// Who goes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum PolicyArg {
    /// First come, first served
    Fcfs,
    /// The lowest `priority` of a request first
    Priority,
}

/// Whether draft steps share a selection of keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum IndexShareArg {
    /// As the checkpoint's config says
    Auto,
    /// Share, whatever the config says
    On,
    /// Run the indexer at every draft step
    Off,
}

/// How index keys are cached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum IndexCacheArg {
    /// In the compute dtype
    Auto,
    /// As 8-bit floats with a scale for each token
    Fp8,
}

/// The compute dtypes of the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Dtype {
    /// 32-bit floating point
    Float32,
    /// Brain floating point, 16 bits
    Bfloat16,
}

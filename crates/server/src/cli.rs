//! The command line, as parsed; `config` validates it.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::RangedI64ValueParser;
use clap::{Args, Parser, Subcommand, ValueEnum, value_parser};

/// What runs where no model is named.
const DEFAULT_MODEL: &str = "tiny-glm52";

/// Speculative decoding with a model's own MTP layer.
#[derive(Debug, Parser)]
#[command(name = "tandem", version, propagate_version = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Serve a model over gRPC
    Serve(ServeArgs),
    /// Continue one prompt, or a file of prompts through one engine at once
    Generate(GenerateArgs),
    /// Log probability of each prompt token after the first
    Score(ScoreArgs),
    /// Describe a checkpoint folder from its configuration and headers
    Inspect(InspectArgs),
}

/// What every command that runs a model needs to know.
#[derive(Clone, Debug, Args)]
pub(crate) struct EngineArgs {
    /// Checkpoint folder in the Hugging Face layout, or the name of a bundled checkpoint
    #[arg(long, default_value = DEFAULT_MODEL)]
    pub(crate) model: String,
    /// Drafts a step from the checkpoint's MTP layers, 0 to 8; 0 turns drafting off
    #[arg(long, default_value_t = 3)]
    pub(crate) num_speculative_tokens: u32,
    /// Whether draft steps after the first attend to the keys that the first selected, in models
    /// with sparse attention, instead of running their indexer again
    #[arg(long, value_enum, default_value_t = IndexShareArg::Auto)]
    pub(crate) index_share: IndexShareArg,
    /// Whether drafts are the MTP layers' likeliest tokens, or drawn from their distribution at the
    /// request's temperature; either way outputs have the target's distribution
    #[arg(long, value_enum, default_value_t = DraftSamplingArg::Greedy)]
    pub(crate) draft_sampling: DraftSamplingArg,
    /// For benches: accept drafts by a schedule with this mean length of a step's run, 1 to
    /// --num-speculative-tokens + 1, instead of by the model; the texts mean nothing then
    #[arg(long, conflicts_with = "spec_decode_acceptance_rate")]
    pub(crate) spec_decode_acceptance_length: Option<f64>,
    /// The same by the share of accepted drafts, 0 to 1
    #[arg(long)]
    pub(crate) spec_decode_acceptance_rate: Option<f64>,
    /// Compute and KV cache dtype [default: the checkpoint's]
    #[arg(long, value_enum)]
    pub(crate) dtype: Option<Dtype>,
    /// How the indexer's keys are cached, in models with sparse attention
    #[arg(long, value_enum, default_value_t = IndexCacheArg::Auto)]
    pub(crate) index_cache_dtype: IndexCacheArg,
    /// Tokens a KV block
    #[arg(long, default_value_t = 16)]
    pub(crate) block_size: u32,
    /// KV blocks in the pool [default: what --max-num-seqs full-length requests or
    /// --kv-cache-memory hold, whichever is less]
    #[arg(long)]
    pub(crate) num_blocks: Option<u32>,
    /// Upper bound of the KV pool in MiB where --num-blocks is not given
    #[arg(long, default_value_t = 256)]
    pub(crate) kv_cache_memory: u64,
    /// Largest number of requests in one step
    #[arg(long, default_value_t = 64, value_parser = value_parser!(u32).range(1..=1 << 16))]
    pub(crate) max_num_seqs: u32,
    /// Largest number of tokens in one step; longer prompts are prefilled in chunks
    #[arg(long, default_value_t = 2048)]
    pub(crate) max_num_batched_tokens: u32,
    /// Largest length of a request, prompt and output together [default: the model's]
    #[arg(long)]
    pub(crate) max_model_len: Option<u32>,
    /// Requests that may wait behind the running ones before new ones are refused
    #[arg(long, default_value_t = 256)]
    pub(crate) max_queued_requests: u32,
    /// Seconds that a request may wait for its first step; one that waits longer ends without
    /// tokens [default: no limit]
    #[arg(long, value_parser = seconds)]
    pub(crate) max_queue_wait: Option<Duration>,
    /// How many drafts a request makes in a step: always --num-speculative-tokens, or up to that as
    /// many as pay by its acceptance and the size of the batch; outputs are the same either way
    /// [default: adaptive for serve, fixed for generate, whose figures can then be compared]
    #[arg(long, value_enum)]
    pub(crate) drafting: Option<DraftingArg>,
    /// Whether the next step is planned and launched before the tokens of this one have come, so
    /// that a device does not wait for the host; outputs are the same either way
    #[arg(long, value_enum, default_value_t = OutputModeArg::Immediate)]
    pub(crate) output_mode: OutputModeArg,
    /// Who starts first, and who gives up blocks last
    #[arg(long, value_enum, default_value_t = PolicyArg::Fcfs)]
    pub(crate) scheduling_policy: PolicyArg,
    /// With --scheduling-policy priority: steps of waiting that make up for one level of priority,
    /// so that nobody waits for ever [default: 1000]
    #[arg(long, value_parser = at_least_1())]
    pub(crate) priority_aging_steps: Option<u32>,
    /// Chunks of a prompt that does not fit a step are a multiple of this, or of --block-size if
    /// that is greater
    #[arg(long, default_value_t = 64, value_parser = at_least_1())]
    pub(crate) chunk_alignment: u32,
    /// Largest number of prompt tokens of one request and step, at least --block-size, so that long
    /// prompts leave room for others; 0 sets no limit
    #[arg(long, default_value_t = 0)]
    pub(crate) long_prefill_token_threshold: u32,
    /// Compute every prompt afresh instead of sharing the KV blocks of equal prefixes; outputs are
    /// the same either way
    #[arg(long)]
    pub(crate) no_prefix_caching: bool,
    /// CPU threads [default: one a core]
    #[arg(long)]
    pub(crate) threads: Option<usize>,
}

#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
    /// Address to listen on
    #[arg(long, default_value = "127.0.0.1")]
    pub(crate) host: std::net::IpAddr,
    /// Port to listen on; 0 takes a free one
    #[arg(long, default_value_t = 50051)]
    pub(crate) port: u16,
    /// Name under which clients see the model [default: the folder's name]
    #[arg(long)]
    pub(crate) served_model_name: Option<String>,
    /// Seconds that running requests may take after a request to stop
    #[arg(long, default_value_t = 30)]
    pub(crate) drain_timeout: u64,
}

impl ServeArgs {
    pub(crate) fn address(&self) -> SocketAddr {
        SocketAddr::new(self.host, self.port)
    }
}

#[derive(Debug, Args)]
pub(crate) struct GenerateArgs {
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
    #[command(flatten)]
    pub(crate) prompt: PromptArgs,
    /// File of prompts, one JSON object a line with `prompt` or `prompt_ids` and, where they
    /// differ from the flags, `max_tokens`, `num_speculative_tokens`, `ignore_eos`,
    /// `stop_token_ids`, `cache_salt`, `priority`. They run at once, and a prompt shares a prefix
    /// that another had computed when it started; with --max-num-seqs 1 each starts when the one
    /// before it ends
    #[arg(long, conflicts_with_all = ["prompt", "prompt_ids"])]
    pub(crate) prompts: Option<PathBuf>,
    /// Largest number of generated tokens [default: until the model's length]
    #[arg(long)]
    pub(crate) max_tokens: Option<u32>,
    /// Go on after the model's end-of-sequence token
    #[arg(long)]
    pub(crate) ignore_eos: bool,
    /// Token ids that end a request
    #[arg(long, value_delimiter = ',')]
    pub(crate) stop_token_ids: Vec<u32>,
    /// Prompts share cached prefixes only with those of the same salt, or of none as well: 1 to 256
    /// bytes
    #[arg(long, value_name = "TEXT")]
    pub(crate) cache_salt: Option<String>,
    /// Continuations of each prompt, 1 to 256, which share the KV of the prompt; greedy ones are
    /// the same
    #[arg(long, default_value_t = 1, value_parser = value_parser!(u32).range(1..=256))]
    pub(crate) n: u32,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
    /// Text that ends a continuation, which it does not belong to; may be given several times
    #[arg(long, value_name = "TEXT")]
    pub(crate) stop: Vec<String>,
    /// Print one JSON object a continuation instead of the text; with --n above 1 it has an
    /// `index`. `cached_tokens` of its `usage` are the prompt tokens whose KV the prefix cache or
    /// another continuation had. With sparse attention its `indexer` counts what the indexers did
    /// in the whole run, all prompts together: `launches`, `rows` and `scored_keys` of the target's
    /// prefill and verify passes and of each draft step
    #[arg(long)]
    pub(crate) json: bool,
}

/// How `generate` chooses tokens.
#[derive(Debug, Args)]
pub(crate) struct SamplingArgs {
    /// Divides the logits before a token is drawn; 0 takes the likeliest token instead
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    pub(crate) temperature: f32,
    /// Draw from the likeliest tokens only, as many as reach this probability together
    #[arg(long, default_value_t = 1.0, allow_negative_numbers = true)]
    pub(crate) top_p: f32,
    /// Draw from this many of the likeliest tokens only; 0 sets no limit
    #[arg(long, default_value_t = 0)]
    pub(crate) top_k: u32,
    /// Draw from tokens only that have this share of the likeliest one's probability
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    pub(crate) min_p: f32,
    /// Makes draws the same on every run; continuations of one prompt still differ [default:
    /// another one each time]
    #[arg(long)]
    pub(crate) seed: Option<u64>,
    /// With --json: the log probability of each token and of this many of the likeliest ones, 0 to
    /// 20, as `logprobs`
    #[arg(long, requires = "json")]
    pub(crate) logprobs: Option<u32>,
}

#[derive(Debug, Args)]
pub(crate) struct PromptArgs {
    /// Prompt text
    #[arg(long)]
    pub(crate) prompt: Option<String>,
    /// Prompt token ids, separated by commas
    #[arg(long, conflicts_with = "prompt", allow_hyphen_values = true)]
    pub(crate) prompt_ids: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct ScoreArgs {
    /// Checkpoint folder, or the name of a bundled checkpoint
    #[arg(long, default_value = DEFAULT_MODEL)]
    pub(crate) model: String,
    #[command(flatten)]
    pub(crate) prompt: PromptArgs,
    /// Compute dtype [default: the checkpoint's]
    #[arg(long, value_enum)]
    pub(crate) dtype: Option<Dtype>,
    /// Tokens a forward pass
    #[arg(long, default_value_t = 2048)]
    pub(crate) max_num_batched_tokens: u32,
    /// Tokens a KV block
    #[arg(long, default_value_t = 16)]
    pub(crate) block_size: u32,
    /// CPU threads [default: one a core]
    #[arg(long)]
    pub(crate) threads: Option<usize>,
    /// Print one JSON object instead of a line a token
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct InspectArgs {
    /// Checkpoint folder, or the name of a bundled checkpoint
    pub(crate) model: String,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

fn at_least_1() -> RangedI64ValueParser<u32> {
    value_parser!(u32).range(1..)
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().filter(|seconds: &f64| *seconds > 0.0);
    let duration = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    duration.ok_or_else(|| "give a number of seconds above 0".to_owned())
}

impl EngineArgs {
    /// Whether drafts are accepted by a schedule instead of by the model.
    pub(crate) fn is_synthetic(&self) -> bool {
        self.spec_decode_acceptance_length.or(self.spec_decode_acceptance_rate).is_some()
    }
}

/// How drafts are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum DraftSamplingArg {
    /// The likeliest tokens
    Greedy,
    /// Drawn
    Sampled,
}

/// How the number of drafts is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum DraftingArg {
    /// Always --num-speculative-tokens
    Fixed,
    /// As many as pay
    Adaptive,
}

/// When the host learns a step's tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum OutputModeArg {
    /// Before the next step is planned
    Immediate,
    /// After the next step is planned and launched
    Deferred,
}

/// Who goes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum PolicyArg {
    /// First come, first served
    Fcfs,
    /// The lowest `priority` of a request first
    Priority,
}

/// Whether draft steps share a selection of keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum IndexShareArg {
    /// As the checkpoint's config says
    Auto,
    /// Share, whatever the config says
    On,
    /// Run the indexer at every draft step
    Off,
}

/// How index keys are cached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum IndexCacheArg {
    /// In the compute dtype
    Auto,
    /// As 8-bit floats with a scale for each token
    Fp8,
}

/// The compute dtypes of the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Dtype {
    /// 32-bit floating point
    Float32,
    /// Brain floating point, 16 bits
    Bfloat16,
}

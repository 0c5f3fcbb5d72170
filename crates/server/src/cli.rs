//! The command line, less the settings of a server, which are the crate `settings`.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, value_parser};
use clap_complete::Shell;
use settings::{
    DEFAULT_MODEL, Dtype, EngineSettings, LoadFormatArg, ServeArgs, SettingsError, Sources,
};

use crate::bench::{BenchArgs, BenchCommand};
use crate::inspect::FitArgs;
use crate::program;

/// Speculative decoding with a model's own MTP layer.
#[derive(Debug, Parser)]
#[command(name = "tandem", version = program::version(), propagate_version = true)]
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
    /// Chat in the terminal with a model, or with that of a server
    Chat(ChatArgs),
    /// Watch a server in the terminal
    Top(TopArgs),
    /// Log probability of each prompt token after the first
    Score(ScoreArgs),
    /// Describe a checkpoint folder from its configuration and headers, with everything that would
    /// keep it from loading; fails if there is any
    Inspect(InspectArgs),
    /// Measure servers and engines, and compare what was measured
    Bench(BenchArgs),
    /// Print a script that completes these commands in a shell
    Completions {
        /// Shell that runs the script
        #[arg(value_enum)]
        shell: Shell,
    },
}

impl Command {
    /// Checks the settings together; a flag alone is checked where it is parsed.
    pub(crate) fn validate(&self, sources: &Sources) -> Result<(), SettingsError> {
        match self {
            Self::Serve(args) => args.settings.validate(sources),
            Self::Generate(args) => args.engine.validate(sources),
            Self::Chat(args) => args.engine.validate(sources),
            Self::Bench(args) => match &args.command {
                BenchCommand::Latency(args) => args.engine.validate(sources),
                BenchCommand::Throughput(args) => args.engine.validate(sources),
                _ => Ok(()),
            },
            _ => Ok(()),
        }
    }
}

#[derive(Debug, Args)]
pub(crate) struct GenerateArgs {
    /// TOML file with settings, as `serve` takes it; its section `engine` is read
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) engine: EngineSettings,
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
    /// With --json: the log probability of each token and of this many of the likeliest ones, 0 to
    /// 20, as `logprobs`
    #[arg(long, requires = "json")]
    pub(crate) logprobs: Option<u32>,
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

/// How `generate` and `chat` choose tokens.
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
}

/// Each line is a message; without a terminal as well, when nothing but the answers is printed.
#[derive(Debug, Args)]
pub(crate) struct ChatArgs {
    /// TOML file with settings, as `serve` takes it; its section `engine` is read
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) engine: EngineSettings,
    /// Chat with the model of the server at http://HOST:PORT or https://HOST:PORT instead of
    /// loading it; --model is its checkpoint, whose template and tokenizer are used, and nothing
    /// else of the engine's flags counts
    #[arg(long, value_name = "URL")]
    pub(crate) connect: Option<String>,
    #[command(flatten)]
    pub(crate) client: ClientArgs,
    /// Chat template in place of the checkpoint's
    #[arg(long, value_name = "FILE")]
    pub(crate) chat_template: Option<PathBuf>,
    /// Largest number of tokens of an answer [default: a quarter of the model's length]
    #[arg(long, value_parser = value_parser!(u32).range(1..))]
    pub(crate) max_tokens: Option<u32>,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
    /// Put accepted drafts into brackets instead of colouring them; NO_COLOR does the same
    #[arg(long)]
    pub(crate) no_color: bool,
    /// Keep no file of the lines that were typed
    #[arg(long)]
    pub(crate) no_history: bool,
}

#[derive(Debug, Args)]
pub(crate) struct TopArgs {
    /// The server: http://HOST:PORT, or https://HOST:PORT
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:50051")]
    pub(crate) connect: String,
    #[command(flatten)]
    pub(crate) client: ClientArgs,
    /// Print the figures once as text and stop
    #[arg(long)]
    pub(crate) once: bool,
    /// Print the figures once as one JSON object and stop
    #[arg(long, conflicts_with = "once")]
    pub(crate) json: bool,
}

/// What a server may ask of its clients.
#[derive(Debug, Args)]
pub(crate) struct ClientArgs {
    /// File with the key that is sent to the server
    #[arg(long, value_name = "FILE")]
    pub(crate) api_key_file: Option<PathBuf>,
    /// PEM file with the certificates that may sign the server's, for https:// [default: those of
    /// the system]
    #[arg(long, value_name = "FILE")]
    pub(crate) tls_ca: Option<PathBuf>,
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
    /// TOML file with settings, as `serve` takes it; what these flags are in its section `engine`
    /// is read
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Checkpoint folder, or the name of a bundled checkpoint
    #[arg(long, default_value = DEFAULT_MODEL)]
    pub(crate) model: String,
    /// Whether the weights are the checkpoint's or random ones
    #[arg(long, value_enum, default_value_t = LoadFormatArg::Auto)]
    pub(crate) load_format: LoadFormatArg,
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
    /// Checkpoint folder, or the name of a bundled checkpoint. Shards may be absent all together,
    /// and so may the index: then shapes, dtypes and, without an index, names are the config's
    pub(crate) model: String,
    /// Drafts a step that it is to be loaded for; with 0 the MTP layers are neither needed nor
    /// counted as memory
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(0..=8))]
    pub(crate) num_speculative_tokens: u32,
    #[command(flatten)]
    pub(crate) fit: FitArgs,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn no_two_flags_of_a_command_are_in_each_others_way() {
        Cli::command().debug_assert();
    }
}

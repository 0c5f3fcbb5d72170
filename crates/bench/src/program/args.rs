//! The command line. Options are named as in the benchmarks of vLLM and ATOM.

use std::path::PathBuf;

use bench::Slo;
use clap::{Args, Parser, Subcommand, value_parser};

/// Benchmarks of serving that can be trusted.
#[derive(Debug, Parser)]
#[command(name = "bench", version)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Measure a server
    Serve(ServeArgs),
    /// Measure two servers in turn, A B, B A, and say whether they differ by more than the noise
    Ab(AbArgs),
    /// Measure a server at several concurrencies, prompt lengths and numbers of drafts
    Sweep(SweepArgs),
    /// Print how two results differ; exits with 1 if the second is worse: acceptance by more than a
    /// percentage point, or throughput by more than the spread
    Compare {
        /// The result to compare with
        a: PathBuf,
        /// The other one
        b: PathBuf,
        /// Compare what should not be: another checkpoint or workload
        #[arg(long)]
        force: bool,
    },
    /// Write the Markdown and HTML of a result again
    Report {
        /// The result, JSON
        file: PathBuf,
    },
}

#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    #[command(flatten)]
    pub(crate) server: ServerArgs,
    #[command(flatten)]
    pub(crate) workload: WorkloadArgs,
    #[command(flatten)]
    pub(crate) load: LoadArgs,
    #[command(flatten)]
    pub(crate) output: Output,
}

/// Which server is measured.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub(crate) struct ServerArgs {
    /// A running Tandem server, such as http://127.0.0.1:50051, or any other one's OpenAI API, such
    /// as openai+http://127.0.0.1:8000/v1
    #[arg(long, value_name = "URL")]
    pub(crate) url: Option<String>,
    /// Start `tandem serve` with these arguments on a free port, and stop it at the end
    #[arg(long, value_name = "ARGS", allow_hyphen_values = true)]
    pub(crate) start: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct AbArgs {
    /// The first server: a URL as of `serve --url`, or arguments of `tandem serve` to start one
    #[arg(long, value_name = "URL|ARGS", allow_hyphen_values = true)]
    pub(crate) a: String,
    /// The second one
    #[arg(long, value_name = "URL|ARGS", allow_hyphen_values = true)]
    pub(crate) b: String,
    /// Pairs of runs
    #[arg(long, default_value_t = 5, value_parser = value_parser!(u32).range(1..))]
    pub(crate) pairs: u32,
    #[command(flatten)]
    pub(crate) workload: WorkloadArgs,
    #[command(flatten)]
    pub(crate) load: LoadArgs,
    #[command(flatten)]
    pub(crate) output: Output,
}

#[derive(Debug, Args)]
pub(crate) struct SweepArgs {
    #[command(flatten)]
    pub(crate) server: ServerArgs,
    /// Requests at a time, one run each
    #[arg(long, value_delimiter = ',', default_values_t = [1, 4, 16, 64])]
    pub(crate) concurrencies: Vec<usize>,
    /// Prompt lengths, in place of --random-input-len
    #[arg(long, value_delimiter = ',')]
    pub(crate) input_lens: Vec<u32>,
    /// Drafts a step, each in runs of its own [default: the server's number]
    #[arg(long, value_delimiter = ',')]
    pub(crate) num_speculative_tokens: Vec<u32>,
    /// Requests a run for each of those that run at a time
    #[arg(long, default_value_t = 4)]
    pub(crate) prompts_per_place: usize,
    #[command(flatten)]
    pub(crate) workload: WorkloadArgs,
    /// Runs of each setting
    #[arg(long, default_value_t = 1, value_parser = value_parser!(u32).range(1..))]
    pub(crate) repeats: u32,
    #[command(flatten)]
    pub(crate) output: Output,
}

/// What is asked.
#[derive(Clone, Debug, Args)]
pub(crate) struct WorkloadArgs {
    /// Number of requests
    #[arg(long, default_value_t = 100)]
    pub(crate) num_prompts: usize,
    /// File of prompts, one JSON object a line with `prompt` or `prompt_ids`; without one prompts
    /// are random ids
    #[arg(long, value_name = "FILE")]
    pub(crate) dataset_path: Option<PathBuf>,
    /// Largest number of random prompt tokens
    #[arg(long, default_value_t = 256)]
    pub(crate) random_input_len: u32,
    /// Largest number of generated tokens
    #[arg(long, default_value_t = 128)]
    pub(crate) random_output_len: u32,
    /// Least share of both, in (0, 1]; 1 fixes the lengths
    #[arg(long, default_value_t = 1.0)]
    pub(crate) random_range_ratio: f64,
    /// Tokens that all random prompts begin with, beside their own
    #[arg(long, default_value_t = 0)]
    pub(crate) random_prefix_len: u32,
    /// Let the model end the answers of a file's prompts
    #[arg(long)]
    pub(crate) no_ignore_eos: bool,
    /// 0 is greedy
    #[arg(long, default_value_t = 0.0)]
    pub(crate) temperature: f64,
    /// Requests before those that are measured
    #[arg(long, default_value_t = 4)]
    pub(crate) num_warmups: usize,
    /// Seed of prompts, lengths and times
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
    /// Limits that a good request keeps, in milliseconds: ttft:200 tpot:20 e2el:3000
    #[arg(long, value_parser = slo_limit, num_args = 1..)]
    pub(crate) goodput: Vec<(SloKey, f64)>,
}

/// When requests are sent.
#[derive(Clone, Debug, Args)]
pub(crate) struct LoadArgs {
    /// Requests at a time; the next one is sent when one ends
    #[arg(long, default_value_t = 16, conflicts_with = "request_rate")]
    pub(crate) max_concurrency: usize,
    /// Requests a second, at times of their own, whatever the server does
    #[arg(long)]
    pub(crate) request_rate: Option<f64>,
    /// Shape of the gaps between them: 1 is a Poisson process, below is burstier
    #[arg(long, default_value_t = 1.0, requires = "request_rate")]
    pub(crate) burstiness: f64,
    /// Runs of the same
    #[arg(long, default_value_t = 3, value_parser = value_parser!(u32).range(1..))]
    pub(crate) repeats: u32,
}

/// Where results go.
#[derive(Clone, Debug, Args)]
pub(crate) struct Output {
    /// The result as JSON, with a .md and a .html file beside it
    #[arg(long, value_name = "FILE.json")]
    pub(crate) output: Option<PathBuf>,
    /// Keep every request's record in it
    #[arg(long)]
    pub(crate) save_detailed: bool,
    /// Title of the report
    #[arg(long, default_value = "Benchmark")]
    pub(crate) title: String,
    /// The program that --start runs [default: `tandem` beside this one]
    #[arg(long, value_name = "FILE")]
    pub(crate) tandem: Option<PathBuf>,
    /// Bearer token of the server
    #[arg(long, value_name = "FILE")]
    pub(crate) api_key_file: Option<PathBuf>,
    /// Folder of the server's checkpoint, whose hash goes into the result
    #[arg(long, value_name = "DIR")]
    pub(crate) checkpoint: Option<PathBuf>,
}

/// What a limit is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SloKey {
    Ttft,
    Tpot,
    E2el,
}

fn slo_limit(text: &str) -> Result<(SloKey, f64), String> {
    let (key, limit) = text.split_once(':').ok_or("give KEY:MILLISECONDS, such as ttft:200")?;
    let key = match key {
        "ttft" => SloKey::Ttft,
        "tpot" => SloKey::Tpot,
        "e2el" => SloKey::E2el,
        _ => return Err(format!("`{key}` is none of ttft, tpot, e2el")),
    };
    let limit = limit.parse().ok().filter(|limit: &f64| *limit > 0.0 && limit.is_finite());
    Ok((key, limit.ok_or("give a number of milliseconds above 0")?))
}

impl WorkloadArgs {
    pub(crate) fn slo(&self) -> Slo {
        let mut slo = Slo::default();
        for (key, limit) in &self.goodput {
            match key {
                SloKey::Ttft => slo.ttft_ms = Some(*limit),
                SloKey::Tpot => slo.tpot_ms = Some(*limit),
                SloKey::E2el => slo.e2el_ms = Some(*limit),
            }
        }
        slo
    }
}

//! The arguments of `tandem bench`, named as in the benchmarks of vLLM and ATOM.

use std::path::PathBuf;

use bench::Slo;
use clap::{ArgGroup, Args, Subcommand, ValueEnum, value_parser};
use serde::Serialize;
use settings::EngineSettings;

use super::seed_table::SeedTableArgs;

/// Measure servers and engines, and compare what was measured
#[derive(Debug, Args, Serialize)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    pub(crate) command: BenchCommand,
}

#[derive(Debug, Subcommand, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum BenchCommand {
    /// Measure a server
    Serve(ServeArgs),
    /// Measure two servers in turn, A B, B A, and say whether they differ by more than the noise
    Ab(AbArgs),
    /// Measure a server at several concurrencies, prompt lengths and numbers of drafts
    Sweep(SweepArgs),
    /// Measure how long an engine in this process takes for one batch
    Latency(LatencyArgs),
    /// Measure how fast an engine in this process answers many prompts at once
    Throughput(ThroughputArgs),
    /// Measure what index sharing changes by the protocol of its first measurements: prompts of
    /// 1,024, 8,192 and 10,240 tokens, 1,024 tokens out, 160 requests, 16 at once, 3 drafts a step,
    /// on servers with sharing off, on and off that are measured in turn
    SeedTable(SeedTableArgs),
    /// Print how two results differ; exits with 1 if the second is worse, acceptance by more than a
    /// percentage point or throughput by more than the spread, and with 2 if they cannot be read or
    /// must not be compared
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

#[derive(Debug, Args, Serialize)]
pub(crate) struct ServeArgs {
    #[command(flatten)]
    pub(crate) server: ServerArgs,
    #[command(flatten)]
    pub(crate) programs: ProgramArgs,
    #[command(flatten)]
    pub(crate) workload: WorkloadArgs,
    #[command(flatten)]
    pub(crate) load: LoadArgs,
    /// Runs of the same
    #[arg(long, default_value_t = 3, value_parser = value_parser!(u32).range(1..))]
    pub(crate) repeats: u32,
    #[command(flatten)]
    pub(crate) output: Output,
}

/// Which server is measured.
#[derive(Debug, Args, Serialize)]
#[group(skip)]
#[command(group = ArgGroup::new("measured").required(true).args(["url", "port", "start"]))]
pub(crate) struct ServerArgs {
    /// A running Tandem server, such as http://127.0.0.1:50051, or any other one's OpenAI API, such
    /// as openai+http://127.0.0.1:8000/v1
    #[arg(long, visible_alias = "base-url", value_name = "URL")]
    pub(crate) url: Option<String>,
    /// In place of --url a running Tandem server's port
    #[arg(long)]
    pub(crate) port: Option<u16>,
    /// The machine of --port
    #[arg(long, default_value = "127.0.0.1", requires = "port")]
    pub(crate) host: String,
    /// Start `tandem serve` with these arguments on a free port, and stop it at the end
    #[arg(long, value_name = "ARGS", allow_hyphen_values = true)]
    pub(crate) start: Option<String>,
}

#[derive(Debug, Args, Serialize)]
pub(crate) struct AbArgs {
    /// The first server: a URL as of `serve --url`, or arguments of `tandem serve` to start one
    #[arg(long, value_name = "URL|ARGS", allow_hyphen_values = true)]
    pub(crate) a: String,
    /// The second one
    #[arg(long, value_name = "URL|ARGS", allow_hyphen_values = true)]
    pub(crate) b: Option<String>,
    /// In place of --b another engine's OpenAI API, such as http://127.0.0.1:8000/v1, which reports
    /// call peer
    #[arg(long, value_name = "URL", required_unless_present = "b", conflicts_with = "b")]
    pub(crate) peer: Option<String>,
    /// The program that --b starts, to compare two builds [default: that of --a]
    #[arg(long, value_name = "FILE", requires = "b")]
    pub(crate) b_tandem: Option<PathBuf>,
    /// Pairs of runs
    #[arg(long, default_value_t = 5, value_parser = value_parser!(u32).range(1..))]
    pub(crate) pairs: u32,
    #[command(flatten)]
    pub(crate) programs: ProgramArgs,
    #[command(flatten)]
    pub(crate) workload: WorkloadArgs,
    #[command(flatten)]
    pub(crate) load: LoadArgs,
    #[command(flatten)]
    pub(crate) output: Output,
}

#[derive(Debug, Args, Serialize)]
pub(crate) struct SweepArgs {
    #[command(flatten)]
    pub(crate) server: ServerArgs,
    #[command(flatten)]
    pub(crate) programs: ProgramArgs,
    /// Requests at a time, one run each
    #[arg(long, value_delimiter = ',', default_values_t = [1, 4, 16, 64],
        value_parser = value_parser!(u32).range(1..))]
    pub(crate) concurrencies: Vec<u32>,
    /// Prompt lengths, in place of --random-input-len
    #[arg(long, value_delimiter = ',', value_parser = value_parser!(u32).range(1..))]
    pub(crate) input_lens: Vec<u32>,
    /// Drafts a step, each in runs of its own [default: the server's number]
    #[arg(long, value_delimiter = ',')]
    pub(crate) num_speculative_tokens: Vec<u32>,
    /// Requests a run for each of those that run at a time, in place of --num-prompts
    #[arg(long, default_value_t = 4)]
    pub(crate) prompts_per_place: u32,
    #[command(flatten)]
    pub(crate) workload: WorkloadArgs,
    /// Runs of each setting
    #[arg(long, default_value_t = 1, value_parser = value_parser!(u32).range(1..))]
    pub(crate) repeats: u32,
    #[command(flatten)]
    pub(crate) output: Output,
}

#[derive(Debug, Args, Serialize)]
pub(crate) struct LatencyArgs {
    #[command(flatten)]
    pub(crate) engine: EngineSettings,
    /// Requests of a batch
    #[arg(long, default_value_t = 8, value_parser = value_parser!(u32).range(1..))]
    pub(crate) batch_size: u32,
    /// Prompt tokens of each, random ids
    #[arg(long, default_value_t = 32, value_parser = value_parser!(u32).range(1..))]
    pub(crate) input_len: u32,
    /// Generated tokens of each
    #[arg(long, default_value_t = 128, value_parser = value_parser!(u32).range(1..))]
    pub(crate) output_len: u32,
    /// Batches before those that are measured
    #[arg(long, default_value_t = 10)]
    pub(crate) num_iters_warmup: u32,
    /// Batches that are measured
    #[arg(long, default_value_t = 30, value_parser = value_parser!(u32).range(1..))]
    pub(crate) num_iters: u32,
    /// Seed of the prompts
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
    #[command(flatten)]
    pub(crate) output: Output,
}

#[derive(Debug, Args, Serialize)]
pub(crate) struct ThroughputArgs {
    #[command(flatten)]
    pub(crate) engine: EngineSettings,
    #[command(flatten)]
    pub(crate) workload: WorkloadArgs,
    /// Runs of the same
    #[arg(long, default_value_t = 3, value_parser = value_parser!(u32).range(1..))]
    pub(crate) repeats: u32,
    #[command(flatten)]
    pub(crate) output: Output,
}

/// What is asked.
#[derive(Clone, Debug, Args, Serialize)]
pub(crate) struct WorkloadArgs {
    /// Number of requests
    #[arg(long, default_value_t = 100, value_parser = value_parser!(u32).range(1..))]
    pub(crate) num_prompts: u32,
    /// What prompts are [default: random, or file where there is a --dataset-path]
    #[arg(long, value_enum)]
    pub(crate) dataset_name: Option<DatasetArg>,
    /// File of prompts, one JSON object a line with `prompt` or `prompt_ids`, and `max_tokens` and
    /// `ignore_eos` where they differ
    #[arg(long, value_name = "FILE")]
    pub(crate) dataset_path: Option<PathBuf>,
    /// Largest number of random prompt tokens
    #[arg(long, visible_alias = "input-len", default_value_t = 256,
        value_parser = value_parser!(u32).range(1..))]
    pub(crate) random_input_len: u32,
    /// Largest number of generated tokens
    #[arg(long, visible_alias = "output-len", default_value_t = 128,
        value_parser = value_parser!(u32).range(1..))]
    pub(crate) random_output_len: u32,
    /// Least share of both, above 0 and at most 1; 1 fixes the lengths
    #[arg(long, default_value_t = 1.0)]
    pub(crate) random_range_ratio: f64,
    /// Tokens that all random prompts begin with, beside their own
    #[arg(long, default_value_t = 0)]
    pub(crate) random_prefix_len: u32,
    /// Random prompts are of the ids below this [default: the model's vocabulary; 1000 where a
    /// server does not tell it]
    #[arg(long, value_parser = value_parser!(u32).range(4..))]
    pub(crate) vocab_size: Option<u32>,
    /// Go on after the model's end-of-sequence token, so that lengths are as planned; the default
    #[arg(long, overrides_with = "no_ignore_eos")]
    pub(crate) ignore_eos: bool,
    /// Let the model end its answers
    #[arg(long)]
    pub(crate) no_ignore_eos: bool,
    /// 0 is greedy
    #[arg(long, default_value_t = 0.0)]
    pub(crate) temperature: f64,
    /// Requests before those that are measured
    #[arg(long, default_value_t = 4)]
    pub(crate) num_warmups: u32,
    /// Seed of prompts, lengths and times
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
    /// Limits that a good request keeps, in milliseconds: ttft:200 tpot:20 e2el:3000
    #[arg(long, value_parser = slo_limit, num_args = 1..)]
    pub(crate) goodput: Vec<(SloKey, f64)>,
}

/// What prompts are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum DatasetArg {
    /// Random token ids
    Random,
    /// Those of --dataset-path
    File,
    /// Beginnings of Python code that come with the program, as text
    Builtin,
}

/// When requests are sent.
#[derive(Clone, Debug, Args, Serialize)]
pub(crate) struct LoadArgs {
    /// Requests at a time; the next one is sent when one ends [default: 16, or all with
    /// --request-rate inf]
    #[arg(long, value_parser = value_parser!(u32).range(1..))]
    pub(crate) max_concurrency: Option<u32>,
    /// Requests a second, at times of their own, whatever the server does; `inf` sends all at once,
    /// or as many as --max-concurrency lets run
    #[arg(long)]
    pub(crate) request_rate: Option<f64>,
    /// Shape of the gaps between them: 1 is a Poisson process, below is burstier
    #[arg(long, default_value_t = 1.0, requires = "request_rate")]
    pub(crate) burstiness: f64,
}

/// Where results go.
#[derive(Clone, Debug, Args, Serialize)]
pub(crate) struct Output {
    /// The result as JSON, with a .md and a .html file beside it
    #[arg(long, visible_alias = "result-filename", value_name = "FILE.json")]
    pub(crate) output: Option<PathBuf>,
    /// Folder of --output
    #[arg(long, value_name = "DIR", requires = "output")]
    pub(crate) result_dir: Option<PathBuf>,
    /// What readers should know of the measurement, kept in its settings: KEY=VALUE ...
    #[arg(long, value_name = "KEY=VALUE", value_parser = metadata, num_args = 1..)]
    pub(crate) metadata: Vec<String>,
    /// Keep every request's record in it
    #[arg(long)]
    pub(crate) save_detailed: bool,
    /// Title of the report; `seed-table` puts its protocol behind it
    #[arg(long)]
    pub(crate) title: Option<String>,
    /// Latencies whose percentiles are printed as well: ttft, tpot, itl, e2el
    #[arg(long, value_delimiter = ',', value_enum)]
    pub(crate) percentile_metrics: Vec<PercentileMetric>,
    /// Which percentiles those are, 0 to 100
    #[arg(long, value_delimiter = ',', default_values_t = [99],
        value_parser = value_parser!(u8).range(..=100))]
    pub(crate) metric_percentiles: Vec<u8>,
}

/// A latency that has percentiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum PercentileMetric {
    /// Time to the first token
    Ttft,
    /// Time per output token after the first
    Tpot,
    /// Gap between tokens
    Itl,
    /// Time to the end
    E2el,
}

/// How servers are started, and what they do not tell.
#[derive(Clone, Debug, Args, Serialize)]
pub(crate) struct ProgramArgs {
    /// The program that is started [default: this one]
    #[arg(long, value_name = "FILE")]
    pub(crate) tandem: Option<PathBuf>,
    /// Bearer token of running servers
    #[arg(long, value_name = "FILE")]
    pub(crate) api_key_file: Option<PathBuf>,
    /// Folder of a running server's checkpoint, or the name of a bundled one, whose hash goes into
    /// the result
    #[arg(long, value_name = "DIR|NAME")]
    pub(crate) checkpoint: Option<String>,
    /// Model to ask an OpenAI API for [default: the first one that it lists]
    #[arg(long, value_name = "NAME")]
    pub(crate) served_model_name: Option<String>,
}

/// What a limit is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
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

fn metadata(text: &str) -> Result<String, String> {
    let is_fine = text.split_once('=').is_some_and(|(key, _)| !key.is_empty());
    if is_fine { Ok(text.to_owned()) } else { Err("give KEY=VALUE".to_owned()) }
}

impl Output {
    /// Where the JSON goes.
    pub(crate) fn path(&self) -> Option<PathBuf> {
        let file = self.output.as_ref()?;
        Some(self.result_dir.as_ref().map_or_else(|| file.clone(), |folder| folder.join(file)))
    }
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

impl ServerArgs {
    /// A URL, or arguments of `tandem serve`.
    pub(crate) fn what(&self) -> String {
        let Self { url, port, host, start } = self;
        let of_port = || port.map(|port| format!("http://{host}:{port}"));
        let what = url.clone().or_else(of_port).or_else(|| start.clone());
        what.expect("one of them is required")
    }
}

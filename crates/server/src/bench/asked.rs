//! What is asked: the requests of a run and of its warm-up.

use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use bench::{Load, Planned, Prompt, RandomPrompts, Vocabulary, from_jsonl};
use rand::SeedableRng as _;
use rand_chacha::ChaCha8Rng;

use super::args::{DatasetArg, LoadArgs, WorkloadArgs};

/// Beginnings of Python code, which the bundled models continue.
const BUILTIN: &str = include_str!("prompts.jsonl");

/// What prompts are that are not text.
pub(super) const TOKEN_IDS: &str = "token ids";

/// Requests at a time where no flag says it.
const CONCURRENCY: u32 = 16;

/// Requests of a warm-up where no flag says it.
const N_WARMUPS: usize = 4;

/// The requests of a run.
#[derive(Clone)]
pub(super) struct Asked {
    pub(super) requests: Arc<[Planned]>,
    pub(super) warm_up: Arc<[Planned]>,
    /// For readers.
    pub(super) description: String,
}

impl Asked {
    /// Of these flags; random prompts are of this vocabulary.
    pub(super) fn new(args: &WorkloadArgs, vocabulary: &Vocabulary) -> Result<Self> {
        let ratio = args.random_range_ratio;
        ensure!(ratio > 0.0 && ratio <= 1.0, "--random-range-ratio {ratio}: give 0 to 1, not 0");
        let dataset = dataset(args)?;
        let n = args.num_prompts as usize;
        let random = |n, seed| random(args, vocabulary, n, seed);
        let (mut requests, description) = match (dataset, &args.dataset_path) {
            (DatasetArg::File, Some(path)) => {
                let text = std::fs::read_to_string(path);
                let text = text.with_context(|| path.display().to_string())?;
                let lines = from_jsonl(&text, args.random_output_len);
                let lines = lines.with_context(|| path.display().to_string())?;
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                (again(lines, n), format!("prompts of {name}"))
            }
            (DatasetArg::Builtin, _) => {
                let lines = from_jsonl(BUILTIN, args.random_output_len)?;
                (again(lines, n), "built-in prompts, as text".to_owned())
            }
            _ => {
                let (n_input, n_output) = (args.random_input_len, args.random_output_len);
                let prefix = args.random_prefix_len;
                let description = format!(
                    "random token ids, {n_input} in and {n_output} out, range ratio {ratio}, \
                     {prefix} shared"
                );
                (random(n, args.seed), description)
            }
        };
        // A seed of its own: nothing of the warm-up shall be known to a prefix cache.
        let mut warm_up = random(args.num_warmups as usize, args.seed.wrapping_add(1));
        for planned in requests.iter_mut().chain(&mut warm_up) {
            planned.temperature = args.temperature;
            planned.ignore_eos |= !args.no_ignore_eos;
            planned.seed = (args.temperature > 0.0).then_some(args.seed);
        }
        Ok(Self { requests: requests.into(), warm_up: warm_up.into(), description })
    }

    /// So many random prompts of fixed lengths, in and out, from a seed.
    pub(super) fn random(
        (n, seed): (u32, u64),
        (input_len, output_len): (u32, u32),
        vocabulary: &Vocabulary,
    ) -> Self {
        let random = RandomPrompts { input_len, output_len, range_ratio: 1.0, prefix_len: 0 };
        let plan = |n: usize, seed| -> Arc<[Planned]> {
            random.plan(n, vocabulary, &mut ChaCha8Rng::seed_from_u64(seed)).into()
        };
        Self {
            requests: plan(n as usize, seed),
            warm_up: plan(N_WARMUPS, seed.wrapping_add(1)),
            description: format!("random token ids, {input_len} in and {output_len} out"),
        }
    }

    /// The same with so many drafts a step.
    pub(super) fn with_drafts(&self, num_speculative_tokens: Option<u32>) -> Self {
        let with = |requests: &[Planned]| {
            let planned = requests.iter().cloned();
            planned.map(|planned| Planned { num_speculative_tokens, ..planned }).collect()
        };
        Self {
            requests: with(&self.requests),
            warm_up: with(&self.warm_up),
            description: self.description.clone(),
        }
    }

    /// Whether prompts are text or ids, for readers.
    pub(super) fn kind(&self) -> &'static str {
        let is_text = |planned: &Planned| matches!(planned.prompt, Prompt::Text(_));
        if self.requests.iter().any(is_text) { "text" } else { TOKEN_IDS }
    }

    /// Tokens of the longest request, in and out; of texts those that come out.
    pub(super) fn longest(&self) -> usize {
        let len = |planned: &Planned| n_ids(planned) + planned.max_tokens as usize;
        self.requests.iter().chain(&*self.warm_up).map(len).max().unwrap_or_default()
    }

    /// How much work it is beside others, roughly: tokens, those of prompts at a fraction.
    pub(super) fn weight(&self) -> f64 {
        let tokens = |of: &Planned| f64::from(of.max_tokens) + n_ids(of) as f64 / 4.0;
        self.requests.iter().chain(&*self.warm_up).map(tokens).sum()
    }
}

/// Tokens of a prompt, where they are known.
fn n_ids(planned: &Planned) -> usize {
    match &planned.prompt {
        Prompt::TokenIds(ids) => ids.len(),
        Prompt::Text(_) => 0,
    }
}

pub(super) fn dataset(args: &WorkloadArgs) -> Result<DatasetArg> {
    match (args.dataset_name, &args.dataset_path) {
        (Some(DatasetArg::File), None) => bail!("--dataset-name file: give --dataset-path FILE"),
        (Some(name @ (DatasetArg::Random | DatasetArg::Builtin)), Some(_)) => {
            bail!("--dataset-name {name:?} has no file: leave out --dataset-path")
        }
        (None, Some(_)) => Ok(DatasetArg::File),
        (name, _) => Ok(name.unwrap_or(DatasetArg::Random)),
    }
}

fn random(args: &WorkloadArgs, vocabulary: &Vocabulary, n: usize, seed: u64) -> Vec<Planned> {
    let random = RandomPrompts {
        input_len: args.random_input_len,
        output_len: args.random_output_len,
        range_ratio: args.random_range_ratio,
        prefix_len: args.random_prefix_len,
    };
    let mut planned = random.plan(n, vocabulary, &mut ChaCha8Rng::seed_from_u64(seed));
    planned.iter_mut().for_each(|planned| planned.ignore_eos = false);
    planned
}

/// So many of these, from the first one again after the last.
fn again(prompts: Vec<Planned>, n: usize) -> Vec<Planned> {
    prompts.into_iter().cycle().take(n).collect()
}

/// When `n_requests` are sent, and what runs of that are called.
pub(super) fn load(args: &LoadArgs, n_requests: u32) -> Result<(Load, String)> {
    let LoadArgs { max_concurrency, request_rate, burstiness } = *args;
    let rate = request_rate.unwrap_or(f64::INFINITY);
    if rate == f64::INFINITY {
        ensure!(burstiness == 1.0, "--burstiness {burstiness}: all at once has no gaps");
        let all = if request_rate.is_some() { n_requests } else { CONCURRENCY };
        let concurrency = max_concurrency.unwrap_or(all);
        let load = Load::Closed { concurrency: concurrency as usize };
        return Ok((load, format!("{concurrency} at once")));
    }
    ensure!(
        max_concurrency.is_none(),
        "--max-concurrency: a loop of --request-rate {rate} waits for nobody"
    );
    let is_fine = |number: f64| number > 0.0 && number.is_finite();
    ensure!(is_fine(rate), "--request-rate {rate}: give a number above 0, or inf");
    ensure!(is_fine(burstiness), "--burstiness {burstiness}: give a number above 0");
    Ok((Load::Open { rate, burstiness }, format!("{rate} a second, burstiness {burstiness}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::args::BenchCommand;
    use crate::cli::{Cli, Command};
    use clap::Parser as _;

    fn serve(args: &[&str]) -> (WorkloadArgs, LoadArgs) {
        let all = ["tandem", "bench", "serve", "--url", "http://a:1"];
        let cli = Cli::try_parse_from(all.iter().chain(args)).unwrap();
        let Command::Bench(args) = cli.command else { panic!("another command") };
        let BenchCommand::Serve(args) = args.command else { panic!("another command") };
        (args.workload, args.load)
    }

    fn asked(args: &[&str]) -> Result<Asked> {
        let vocabulary = Vocabulary { size: 100, eos_token_ids: vec![1] };
        Asked::new(&serve(args).0, &vocabulary)
    }

    #[test]
    fn built_in_prompts_are_text_and_all_different() {
        let asked = asked(&["--dataset-name", "builtin", "--num-prompts", "41"]).unwrap();
        assert_eq!((asked.requests.len(), asked.kind()), (41, "text"));
        assert_eq!(asked.requests[0], asked.requests[40], "there are 40");
        let of = |idx: usize| &asked.requests[idx].prompt;
        assert!((1..40).all(|idx| (0..idx).all(|other| of(other) != of(idx))));
    }

    #[test]
    fn a_file_is_a_dataset_of_its_own() {
        let message = |args: &[&str]| format!("{:#}", asked(args).err().unwrap());
        assert!(message(&["--dataset-name", "file"]).contains("--dataset-path"));
        let file = ["--dataset-path", "nowhere.jsonl"];
        assert!(message(&file).contains("nowhere.jsonl"));
        assert!(message(&[&file[..], &["--dataset-name", "random"]].concat()).contains("no file"));
        assert_eq!(asked(&[]).unwrap().kind(), "token ids");
    }

    #[test]
    fn the_last_of_the_two_flags_of_eos_counts() {
        let ignores = |args: &[&str]| asked(args).unwrap().requests[0].ignore_eos;
        assert!(ignores(&[]) && ignores(&["--ignore-eos"]));
        assert!(!ignores(&["--no-ignore-eos"]));
        assert!(ignores(&["--no-ignore-eos", "--ignore-eos"]));
    }

    #[test]
    fn infinite_rates_are_closed_loops() {
        let of = |args: &[&str]| load(&serve(args).1, 50).map(|(load, _)| load);
        assert_eq!(of(&[]).unwrap(), Load::Closed { concurrency: 16 });
        let inf = ["--request-rate", "inf"];
        assert_eq!(of(&inf).unwrap(), Load::Closed { concurrency: 50 });
        let both = [&inf[..], &["--max-concurrency", "4"]].concat();
        assert_eq!(of(&both).unwrap(), Load::Closed { concurrency: 4 });
        let open = ["--request-rate", "2.5", "--burstiness", "0.5"];
        assert_eq!(of(&open).unwrap(), Load::Open { rate: 2.5, burstiness: 0.5 });
        assert!(of(&[&open[..2], &["--max-concurrency", "4"]].concat()).is_err());
        assert!(of(&["--request-rate=-1"]).is_err() && of(&["--request-rate=nan"]).is_err());
    }
}

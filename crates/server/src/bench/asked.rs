//! What is asked: the requests of a run and of its warm-up.

use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use bench::{Load, Planned, Prompt, RandomPrompts, Vocabulary, from_jsonl};
use rand::SeedableRng as _;
use rand_chacha::ChaCha8Rng;
use serde_json::Value;

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
    /// Of prompts, lengths and times.
    pub(super) seed: u64,
}

/// Refuses what no server could be asked, before one is started.
pub(super) fn check(args: &WorkloadArgs) -> Result<()> {
    let some = Vocabulary { size: 4, eos_token_ids: vec![] };
    Asked::new(args, &some, 0).map(drop)
}

impl Asked {
    /// Of these flags; random prompts are of this vocabulary. Each repeat asks others: a peer may
    /// remember those of the one before.
    pub(super) fn new(args: &WorkloadArgs, vocabulary: &Vocabulary, repeat: u32) -> Result<Self> {
        let ratio = args.random_range_ratio;
        ensure!(ratio > 0.0 && ratio <= 1.0, "--random-range-ratio {ratio}: give 0 to 1, not 0");
        let (seed, warm_up_seed) = seeds(args.seed, repeat);
        let (n, n_warm_up) = (args.num_prompts as usize, args.num_warmups as usize);
        let random = |n, seed| random(args, vocabulary, n, seed);
        let skipped = |n: usize| n * repeat as usize;
        let (mut requests, texts, description) = match (dataset(args)?, &args.dataset_path) {
            (DatasetArg::File, Some(path)) => {
                let text = std::fs::read_to_string(path);
                let text = text.with_context(|| path.display().to_string())?;
                let lines = of_lines(&text, args).with_context(|| path.display().to_string())?;
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                let requests = lines.iter().cycle().skip(skipped(n)).take(n).cloned().collect();
                (requests, lines, format!("prompts of {name}"))
            }
            (DatasetArg::Builtin, _) => {
                let lines = of_lines(BUILTIN, args)?;
                let numbered = (skipped(n)..skipped(n) + n).map(|idx| numbered(&lines, idx));
                (numbered.collect(), lines, "built-in prompts, as text".to_owned())
            }
            _ => {
                let (n_input, n_output) = (args.random_input_len, args.random_output_len);
                let prefix = args.random_prefix_len;
                let description = format!(
                    "random token ids, {n_input} in and {n_output} out, range ratio {ratio}, \
                     {prefix} shared"
                );
                (random(n, seed), vec![], description)
            }
        };
        let texts: Vec<Planned> = texts.into_iter().filter(is_text).collect();
        let mut warm_up = match texts.as_slice() {
            [] => random(n_warm_up, warm_up_seed),
            // Peers may take nothing but text.
            texts => (skipped(n_warm_up)..skipped(n_warm_up) + n_warm_up)
                .map(|idx| headed(&texts[idx % texts.len()], &format!("warm-up {}", idx + 1)))
                .collect(),
        };
        for planned in requests.iter_mut().chain(&mut warm_up) {
            planned.temperature = args.temperature;
            planned.seed = (args.temperature > 0.0).then_some(seed);
        }
        Ok(Self { requests: requests.into(), warm_up: warm_up.into(), description, seed })
    }

    /// So many random prompts of fixed lengths, in and out, from a seed.
    pub(super) fn random(
        (n, seed): (u32, u64),
        repeat: u32,
        (input_len, output_len): (u32, u32),
        vocabulary: &Vocabulary,
    ) -> Self {
        let (seed, warm_up_seed) = seeds(seed, repeat);
        let random = RandomPrompts { input_len, output_len, range_ratio: 1.0, prefix_len: 0 };
        let plan = |n: usize, seed| -> Arc<[Planned]> {
            random.plan(n, vocabulary, &mut ChaCha8Rng::seed_from_u64(seed)).into()
        };
        Self {
            requests: plan(n as usize, seed),
            warm_up: plan(N_WARMUPS, warm_up_seed),
            description: format!("random token ids, {input_len} in and {output_len} out"),
            seed,
        }
    }

    /// The same with so many drafts a step.
    pub(super) fn with_drafts(&self, num_speculative_tokens: Option<u32>) -> Self {
        let with = |requests: &[Planned]| {
            let planned = requests.iter().cloned();
            planned.map(|planned| Planned { num_speculative_tokens, ..planned }).collect()
        };
        Self { requests: with(&self.requests), warm_up: with(&self.warm_up), ..self.clone() }
    }

    /// Whether prompts are text or ids, for readers.
    pub(super) fn kind(&self) -> &'static str {
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
    planned.iter_mut().for_each(|planned| planned.ignore_eos = !args.no_ignore_eos);
    planned
}

/// The seeds of a repeat and of its warm-up, which no repeat has: nothing of a warm-up shall be
/// known to a prefix cache.
fn seeds(seed: u64, repeat: u32) -> (u64, u64) {
    let seed = seed.wrapping_add(repeat.into());
    (seed, !seed)
}

/// Requests of a text with an object a line.
fn of_lines(text: &str, args: &WorkloadArgs) -> Result<Vec<Planned>> {
    let mut planned = from_jsonl(text, args.random_output_len)?;
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    for ((idx, line), planned) in lines.zip(&mut planned) {
        let is_empty = planned.prompt == Prompt::TokenIds(vec![]);
        ensure!(!is_empty, "line {}: prompt_ids is empty", idx + 1);
        // What a line says counts more than the flag.
        let line: Value = serde_json::from_str(line)?;
        planned.ignore_eos = line["ignore_eos"].as_bool().unwrap_or(!args.no_ignore_eos);
    }
    Ok(planned)
}

/// One of these texts; from the second round on with a first line that no other round has.
fn numbered(texts: &[Planned], idx: usize) -> Planned {
    let text = &texts[idx % texts.len()];
    match idx / texts.len() {
        0 => text.clone(),
        round => headed(text, &(round + 1).to_string()),
    }
}

/// The same behind a comment, if it is text.
fn headed(planned: &Planned, comment: &str) -> Planned {
    let mut planned = planned.clone();
    if let Prompt::Text(text) = &mut planned.prompt {
        text.insert_str(0, &format!("# {comment}\n"));
    }
    planned
}

fn is_text(planned: &Planned) -> bool {
    matches!(planned.prompt, Prompt::Text(_))
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
        Asked::new(&serve(args).0, &vocabulary, 0)
    }

    #[test]
    fn built_in_prompts_and_their_warm_up_are_text_and_all_different() {
        let (args, _) = serve(&["--dataset-name", "builtin", "--num-prompts", "50"]);
        let vocabulary = Vocabulary { size: 100, eos_token_ids: vec![1] };
        let repeats = [0, 1].map(|repeat| Asked::new(&args, &vocabulary, repeat).unwrap());
        assert_eq!((repeats[0].requests.len(), repeats[0].kind()), (50, "text"));
        assert!(repeats.iter().flat_map(|asked| &*asked.warm_up).all(is_text));
        let all = repeats.iter().flat_map(|asked| asked.requests.iter().chain(&*asked.warm_up));
        let all: Vec<&Prompt> = all.map(|planned| &planned.prompt).collect();
        assert_eq!(all.len(), 2 * (50 + 4));
        assert!((1..all.len()).all(|idx| !all[..idx].contains(&all[idx])));
        assert_eq!(repeats[0].longest(), 128, "the tokens of a text are not known");
    }

    #[test]
    fn repeats_ask_other_ids_and_every_run_the_same_again() {
        let vocabulary = Vocabulary { size: 100, eos_token_ids: vec![1] };
        let of = |repeat| Asked::new(&serve(&[]).0, &vocabulary, repeat).unwrap();
        assert_eq!((of(1).requests, of(1).seed), (of(1).requests, 1));
        assert_ne!(of(0).requests, of(1).requests);
        assert_ne!(of(0).warm_up[0], of(1).requests[0], "seed + 1 is the next repeat's");
    }

    #[test]
    fn lines_keep_what_they_say_and_empty_ones_are_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let path = file.path().to_str().unwrap();
        let args = ["--dataset-path", path, "--num-prompts", "3"];
        let lines = r#"{"prompt_ids": [1], "ignore_eos": false}
            {"prompt_ids": [2]}"#;
        std::fs::write(path, lines).unwrap();
        let ignores = |planned: &Planned| planned.ignore_eos;
        let of = |args: &[&str]| -> Vec<bool> {
            asked(args).unwrap().requests.iter().map(ignores).collect()
        };
        assert_eq!(of(&args), [false, true, false]);
        assert_eq!(of(&[&args[..], &["--no-ignore-eos"]].concat()), [false; 3]);
        std::fs::write(path, "\n{\"prompt_ids\": []}").unwrap();
        let message = format!("{:#}", asked(&args).err().unwrap());
        assert!(message.contains("line 2: prompt_ids is empty"), "{message}");
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

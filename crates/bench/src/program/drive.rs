//! What the commands do: runs in their order, progress, results.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use bench::{
    GeneratorLoad, Load, Metrics, Monitor, Plan, Planned, Progress, Provenance, RandomPrompts,
    Record, ResultFile, RunResult, Series, Watcher, Workload, from_jsonl, measure,
};
use rand::SeedableRng as _;
use rand_chacha::ChaCha8Rng;
use serde_json::json;
use tokio_util::sync::CancellationToken;

use crate::args::{AbArgs, LoadArgs, Output, ServeArgs, ServerArgs, SweepArgs, WorkloadArgs};
use crate::subject::Subject;
use crate::{complain, publish};

/// How long the machine is looked at before a run.
const BEFORE: Duration = Duration::from_secs(2);
/// How often progress is told.
const PROGRESS: Duration = Duration::from_secs(1);

/// What is the same for the runs of a command.
struct Sitting<'a> {
    workload: &'a WorkloadArgs,
    output: &'a Output,
    result: ResultFile,
    stop: CancellationToken,
}

/// One run.
struct Run<'a> {
    name: String,
    subject: &'a Subject,
    /// The server's name in the result.
    label: String,
    load: Load,
    repeat: u32,
    requests: Arc<[Planned]>,
    warm_up: Arc<[Planned]>,
    description: String,
}

pub(crate) async fn serve(args: &ServeArgs) -> Result<()> {
    let mut sitting = Sitting::new(&args.workload, &args.output);
    let subject = Subject::new("server", args.server.what(), &args.output).await?;
    let (load, name) = load(&args.load)?;
    sitting.result.add_server(subject.server.clone());
    for repeat in 0..args.load.repeats {
        let run = sitting.run(&subject, name.clone(), load, repeat)?;
        if !sitting.measure(run).await? {
            break;
        }
    }
    sitting.end(&[&subject])
}

pub(crate) async fn ab(args: &AbArgs) -> Result<()> {
    let mut sitting = Sitting::new(&args.workload, &args.output);
    let a = Subject::new("A", &args.a, &args.output).await?;
    let b = Subject::new("B", &args.b, &args.output).await?;
    let (load, name) = load(&args.load)?;
    for subject in [&a, &b] {
        sitting.result.add_server(subject.server.clone());
    }
    'pairs: for pair in 0..args.pairs {
        // In turn, so that what drifts meets both alike.
        let order = if pair % 2 == 0 { [&a, &b] } else { [&b, &a] };
        for subject in order {
            let run = sitting.run(subject, name.clone(), load, pair)?;
            if !sitting.measure(run).await? {
                break 'pairs;
            }
        }
    }
    sitting.result.judge_pairs("A", "B");
    sitting.end(&[&a, &b])
}

pub(crate) async fn sweep(args: &SweepArgs) -> Result<()> {
    let mut sitting = Sitting::new(&args.workload, &args.output);
    let subject = Subject::new("server", args.server.what(), &args.output).await?;
    let widths: Vec<Option<u32>> = match args.num_speculative_tokens.as_slice() {
        [] => vec![None],
        widths => widths.iter().copied().map(Some).collect(),
    };
    let lengths = match args.input_lens.as_slice() {
        [] => vec![args.workload.random_input_len],
        lengths => lengths.to_vec(),
    };
    'all: for (width, input_len, concurrency) in widths.iter().flat_map(|width| {
        let points =
            lengths.iter().flat_map(|len| args.concurrencies.iter().map(move |n| (len, n)));
        points.map(move |(len, n)| (*width, *len, *n))
    }) {
        let label = width.map_or_else(|| "server".to_owned(), |k| format!("k = {k}"));
        let mut server = subject.server.clone();
        server.name.clone_from(&label);
        sitting.result.add_server(server);
        ensure!(concurrency > 0, "--concurrencies: at least 1");
        let workload = WorkloadArgs {
            random_input_len: input_len,
            num_prompts: (args.prompts_per_place * concurrency).max(8),
            ..args.workload.clone()
        };
        for repeat in 0..args.repeats {
            let load = Load::Closed { concurrency };
            let name = format!("{input_len} tokens, {concurrency} at once");
            let mut run = sitting.run_of(&workload, &subject, name, load, repeat)?;
            run.label.clone_from(&label);
            for requests in [&mut run.requests, &mut run.warm_up] {
                *requests = requests
                    .iter()
                    .map(|planned| Planned { num_speculative_tokens: width, ..planned.clone() })
                    .collect();
            }
            if !sitting.measure(run).await? {
                break 'all;
            }
        }
    }
    sitting.end(&[&subject])
}

impl ServerArgs {
    fn what(&self) -> &str {
        self.url.as_deref().or(self.start.as_deref()).expect("one of the two is required")
    }
}

fn load(args: &LoadArgs) -> Result<(Load, String)> {
    let Some(rate) = args.request_rate else {
        let concurrency = args.max_concurrency;
        ensure!(concurrency > 0, "--max-concurrency: at least 1");
        return Ok((Load::Closed { concurrency }, format!("{concurrency} at once")));
    };
    let burstiness = args.burstiness;
    let is_fine = |number: f64| number > 0.0 && number.is_finite();
    ensure!(is_fine(rate), "--request-rate {rate}: give a number above 0");
    ensure!(is_fine(burstiness), "--burstiness {burstiness}: give a number above 0");
    Ok((Load::Open { rate, burstiness }, format!("{rate} a second, burstiness {burstiness}")))
}

impl<'a> Sitting<'a> {
    fn new(workload: &'a WorkloadArgs, output: &'a Output) -> Self {
        let stop = CancellationToken::new();
        let stopped = stop.clone();
        tokio::spawn(async move {
            if tokio::signal::ctrl_c().await.is_ok() {
                complain("stopping; what was measured is kept, interrupt again to lose it");
                stopped.cancel();
                if tokio::signal::ctrl_c().await.is_ok() {
                    std::process::exit(130);
                }
            }
        });
        let arguments: Vec<String> = std::env::args().skip(1).collect();
        let settings = json!({
            "workload": format!("{workload:?}"),
            "num_warmups": workload.num_warmups,
            "seed": workload.seed,
        });
        let provenance = Provenance::now(&arguments, settings);
        let result = ResultFile::new(provenance, output.title.clone());
        Self { workload, output, result, stop }
    }

    fn run<'s>(
        &self,
        subject: &'s Subject,
        name: String,
        load: Load,
        repeat: u32,
    ) -> Result<Run<'s>> {
        self.run_of(self.workload, subject, name, load, repeat)
    }

    fn run_of<'s>(
        &self,
        workload: &WorkloadArgs,
        subject: &'s Subject,
        name: String,
        load: Load,
        repeat: u32,
    ) -> Result<Run<'s>> {
        let (requests, warm_up, description) = plan(workload, subject)?;
        let label = subject.server.name.clone();
        Ok(Run { name, subject, label, load, repeat, requests, warm_up, description })
    }

    /// Measures once; false once the sitting was stopped.
    async fn measure(&mut self, run: Run<'_>) -> Result<bool> {
        let Run { name, subject, label, load, repeat, requests, warm_up, description } = run;
        complain(&format!("{label}, {name}, run {}", repeat + 1));
        let n_warmup = u32::try_from(warm_up.len()).unwrap_or(u32::MAX);
        let monitor = Monitor::start(subject.process);
        tokio::time::sleep(BEFORE).await;
        let seed = self.workload.seed;
        let workload = Workload::of(description, &requests);
        let mut watcher = Shown::new(&monitor, requests.len());
        let plan = Plan { requests, load, warm_up, seed };
        let measured = measure(&subject.target, &plan, &self.stop, &mut watcher).await;
        let machine = monitor.finish();
        let measured = measured.with_context(|| label.clone())?;
        subject.check()?;
        let slo = self.workload.slo();
        let metrics = Metrics::of(&measured.records, &slo);
        let generator = GeneratorLoad::of(&machine, subject.process, &metrics);
        self.result.push(RunResult {
            name,
            server: label,
            load,
            workload,
            repeat,
            seed,
            n_warmup,
            slo,
            metrics,
            counters: measured.counters,
            machine,
            generator,
            is_partial: measured.is_partial,
            series: Series::of(&measured.records),
            records: self.output.save_detailed.then_some(measured.records),
        })?;
        Ok(!self.stop.is_cancelled())
    }

    fn end(self, subjects: &[&Subject]) -> Result<()> {
        for subject in subjects {
            subject.check()?;
        }
        publish(&self.result, self.output)
    }
}

/// The requests of a run, those of its warm-up, and what they are in words.
#[expect(clippy::type_complexity, reason = "they are made together")]
fn plan(
    args: &WorkloadArgs,
    subject: &Subject,
) -> Result<(Arc<[Planned]>, Arc<[Planned]>, String)> {
    let random = RandomPrompts {
        input_len: args.random_input_len,
        output_len: args.random_output_len,
        range_ratio: args.random_range_ratio,
        prefix_len: args.random_prefix_len,
    };
    let ratio = random.range_ratio;
    ensure!(ratio > 0.0 && ratio <= 1.0, "--random-range-ratio {ratio}: give 0 to 1, not 0");
    let of_seed =
        |n, seed| random.plan(n, &subject.vocabulary, &mut ChaCha8Rng::seed_from_u64(seed));
    // A seed of its own: nothing of the warm-up shall be known to a prefix cache.
    let mut warm_up = of_seed(args.num_warmups, args.seed.wrapping_add(1));
    let (mut requests, description) = match &args.dataset_path {
        None => {
            let (n_input, n_output) = (random.input_len, random.output_len);
            let prefix = random.prefix_len;
            let text = format!(
                "random ids, {n_input} in and {n_output} out, range ratio {ratio}, {prefix} shared"
            );
            (of_seed(args.num_prompts, args.seed), text)
        }
        Some(path) => {
            let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
            let prompts = from_jsonl(&text, args.random_output_len);
            let prompts = prompts.with_context(|| path.display().to_string())?;
            let n = args.num_prompts;
            let requests: Vec<_> = prompts.into_iter().cycle().take(n).collect();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            (requests, format!("prompts of {name}"))
        }
    };
    for planned in requests.iter_mut().chain(&mut warm_up) {
        planned.temperature = args.temperature;
        planned.ignore_eos |= !args.no_ignore_eos;
        planned.seed = (args.temperature > 0.0).then_some(args.seed);
    }
    Ok((requests.into(), warm_up.into(), description))
}

/// Shows progress once a second, and tells the monitor when a run begins.
struct Shown<'a> {
    monitor: &'a Monitor,
    n_requests: usize,
    progress: Option<Progress>,
    told: Instant,
}

impl<'a> Shown<'a> {
    fn new(monitor: &'a Monitor, n_requests: usize) -> Self {
        Self { monitor, n_requests, progress: None, told: Instant::now() }
    }
}

impl Watcher for Shown<'_> {
    fn begins(&mut self) {
        self.monitor.begin();
        self.progress = Some(Progress::new(self.n_requests));
        self.told = Instant::now();
    }

    fn ended(&mut self, record: &Record) {
        let Some(progress) = &mut self.progress else { return };
        progress.add(record);
        if self.told.elapsed() >= PROGRESS {
            complain(&format!("  {}", progress.line()));
            self.told = Instant::now();
        }
    }
}

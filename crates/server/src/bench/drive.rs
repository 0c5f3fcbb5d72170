//! What the commands measure: which runs, in which order.

use anyhow::{Result, ensure};
use bench::{Batches, Load, Vocabulary};
use serde_json::Value;
use tokio_util::sync::CancellationToken;

use super::args::{
    AbArgs, DatasetArg, LatencyArgs, ServeArgs, SweepArgs, ThroughputArgs, WorkloadArgs,
};
use super::asked::{self, Asked};
use super::sitting::{Run, Sitting};
use super::subject::Subject;

/// What the command line came to, and what ends the command early.
pub(super) struct Context {
    pub(super) settings: Value,
    pub(super) stop: CancellationToken,
}

pub(super) async fn serve(args: &ServeArgs, context: Context) -> Result<()> {
    let stop = context.stop.clone();
    let mut subject = Subject::new("server", args.server.what(), &args.programs, &stop).await?;
    let asked = Asked::new(&args.workload, &vocabulary(&args.workload, &[&subject]))?;
    subject.take(&asked).await?;
    let (load, name) = asked::load(&args.load, args.workload.num_prompts)?;
    let mut sitting = Sitting::new(context.settings, &args.output, "Benchmark of a server", stop);
    sitting.of(&args.workload);
    sitting.result.add_server(subject.server.clone());
    let runs = repeats(args.repeats, &run(&subject, name, load, asked));
    sitting.measure_all(&runs).await?;
    sitting.end(&[&subject])
}

pub(super) async fn ab(args: &AbArgs, context: Context) -> Result<()> {
    let stop = context.stop.clone();
    let mut a = Subject::new("A", &args.a, &args.programs, &stop).await?;
    let mut b = match (&args.peer, &args.b) {
        (Some(peer), _) => {
            let url = if peer.contains('+') { peer.clone() } else { format!("openai+{peer}") };
            Subject::new("peer", &url, &args.programs, &stop).await?
        }
        (None, what) => {
            let mut programs = args.programs.clone();
            programs.tandem = args.b_tandem.clone().or(programs.tandem);
            Subject::new("B", what.as_deref().unwrap_or_default(), &programs, &stop).await?
        }
    };
    let asked = Asked::new(&args.workload, &vocabulary(&args.workload, &[&a, &b]))?;
    let (load, name) = asked::load(&args.load, args.workload.num_prompts)?;
    let mut sitting = Sitting::new(context.settings, &args.output, "A against B", stop);
    sitting.of(&args.workload);
    for subject in [&mut a, &mut b] {
        subject.take(&asked).await?;
        sitting.result.add_server(subject.server.clone());
    }
    let mut runs = vec![];
    for pair in 0..args.pairs {
        // In turn, so that what drifts meets both alike.
        let order = if pair % 2 == 0 { [&a, &b] } else { [&b, &a] };
        for subject in order {
            let run = run(subject, name.clone(), load, asked.clone());
            runs.push(Run { repeat: pair, ..run });
        }
    }
    sitting.measure_all(&runs).await?;
    sitting.result.judge_pairs(&a.server.name, &b.server.name);
    sitting.end(&[&a, &b])
}

pub(super) async fn sweep(args: &SweepArgs, context: Context) -> Result<()> {
    let stop = context.stop.clone();
    let mut subject = Subject::new("server", args.server.what(), &args.programs, &stop).await?;
    let widths: Vec<Option<u32>> = match args.num_speculative_tokens.as_slice() {
        [] => vec![None],
        widths => widths.iter().copied().map(Some).collect(),
    };
    let lengths = match args.input_lens.as_slice() {
        [] => vec![args.workload.random_input_len],
        lengths => lengths.to_vec(),
    };
    ensure!(args.concurrencies.iter().all(|n| *n > 0), "--concurrencies: at least 1");
    let is_random = asked::dataset(&args.workload)? == DatasetArg::Random;
    ensure!(
        is_random || args.input_lens.is_empty(),
        "--input-lens: the prompts of a file and built-in ones are as long as they are"
    );
    let mut settings = vec![];
    for (len, n) in lengths.iter().flat_map(|len| args.concurrencies.iter().map(move |n| (len, n)))
    {
        let workload = WorkloadArgs {
            random_input_len: *len,
            num_prompts: args.prompts_per_place.saturating_mul(*n).max(8),
            ..args.workload.clone()
        };
        let asked = Asked::new(&workload, &vocabulary(&workload, &[&subject]))?;
        subject.take(&asked).await?;
        let length = if is_random { format!("{len} tokens, ") } else { String::new() };
        let name = format!("{length}{n} at once");
        settings.push((name, *n as usize, asked));
    }
    let mut sitting = Sitting::new(context.settings, &args.output, "Sweep", stop);
    sitting.of(&args.workload);
    let mut runs = vec![];
    for width in widths {
        let label = width.map_or_else(|| "server".to_owned(), |k| format!("k = {k}"));
        let mut server = subject.server.clone();
        server.name.clone_from(&label);
        sitting.result.add_server(server);
        for (name, concurrency, asked) in &settings {
            let load = Load::Closed { concurrency: *concurrency };
            let run = run(&subject, name.clone(), load, asked.with_drafts(width));
            runs.extend(repeats(args.repeats, &Run { label: label.clone(), ..run }));
        }
    }
    sitting.measure_all(&runs).await?;
    sitting.end(&[&subject])
}

pub(super) async fn latency(args: &LatencyArgs, context: Context) -> Result<()> {
    let stop = context.stop.clone();
    let mut engine = args.engine.clone();
    // A batch is a batch: none of it waits or is refused.
    engine.max_num_seqs = engine.max_num_seqs.max(args.batch_size);
    let mut subject = Subject::in_process(&engine, &stop).await?;
    let lens = (args.input_len, args.output_len);
    let mut asked = Asked::random((args.batch_size, args.seed), lens, &subject.vocabulary);
    asked.warm_up = vec![&*asked.requests; args.num_iters_warmup as usize].concat().into();
    subject.take(&asked).await?;
    let title = "Latency of a batch";
    let mut sitting = Sitting::new(context.settings, &args.output, title, stop);
    sitting.seed = args.seed;
    sitting.result.add_server(subject.server.clone());
    let n = args.batch_size as usize;
    let name = format!("batches of {n}");
    let run = run(&subject, name, Load::Closed { concurrency: n }, asked);
    let batches = Batches {
        requests: run.asked.requests.clone(),
        n_warmup: args.num_iters_warmup as usize,
        n: args.num_iters as usize,
    };
    sitting.measure_batches(&run, batches).await?;
    sitting.end(&[&subject])
}

pub(super) async fn throughput(args: &ThroughputArgs, context: Context) -> Result<()> {
    let stop = context.stop.clone();
    let n = args.workload.num_prompts;
    let mut engine = args.engine.clone();
    // All prompts are known and wait here anyway: nothing is refused for the length of the queue.
    engine.max_queued_requests = engine.max_queued_requests.max(n);
    let mut subject = Subject::in_process(&engine, &stop).await?;
    let asked = Asked::new(&args.workload, &vocabulary(&args.workload, &[&subject]))?;
    subject.take(&asked).await?;
    let mut sitting = Sitting::new(context.settings, &args.output, "Throughput", stop);
    sitting.of(&args.workload);
    sitting.result.add_server(subject.server.clone());
    let load = Load::Closed { concurrency: n as usize };
    let runs = repeats(args.repeats, &run(&subject, format!("{n} at once"), load, asked));
    sitting.measure_all(&runs).await?;
    sitting.end(&[&subject])
}

/// The first run of a setting.
pub(super) fn run(subject: &Subject, name: String, load: Load, asked: Asked) -> Run<'_> {
    Run { name, label: subject.server.name.clone(), subject, load, repeat: 0, asked }
}

fn repeats<'a>(n: u32, run: &Run<'a>) -> Vec<Run<'a>> {
    (0..n).map(|repeat| Run { repeat, ..run.clone() }).collect()
}

/// The ids that all of these have, and that end outputs of none.
fn vocabulary(args: &WorkloadArgs, subjects: &[&Subject]) -> Vocabulary {
    let size = |subject: &&Subject| match args.vocab_size {
        // What is assumed of a peer is less than it has.
        Some(given) if subject.max_model_len.is_none() => given,
        given => given.unwrap_or(u32::MAX).min(subject.vocabulary.size),
    };
    let mut eos_token_ids: Vec<u32> =
        subjects.iter().flat_map(|subject| subject.vocabulary.eos_token_ids.clone()).collect();
    eos_token_ids.sort_unstable();
    eos_token_ids.dedup();
    Vocabulary { size: subjects.iter().map(size).min().unwrap_or_default(), eos_token_ids }
}

impl Sitting<'_> {
    /// Takes over what a workload says of all runs.
    pub(super) fn of(&mut self, args: &WorkloadArgs) {
        (self.seed, self.slo) = (args.seed, args.slo());
    }
}

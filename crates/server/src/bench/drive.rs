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
    asked::check(&args.workload)?;
    let (load, name) = asked::load(&args.load, args.workload.num_prompts)?;
    let stop = context.stop.clone();
    let mut sitting = Sitting::new(context, &args.output, "Benchmark of a server")?;
    sitting.slo = args.workload.slo();
    let mut subject = Subject::new("server", &args.server.what(), &args.programs, &stop).await?;
    let asked = repeats(args.repeats, &args.workload, &[&subject])?;
    subject.take(&asked).await?;
    sitting.result.add_server(subject.server.clone());
    sitting.measure_all(&runs(&subject, &name, load, asked)).await;
    sitting.end()
}

pub(super) async fn ab(args: &AbArgs, context: Context) -> Result<()> {
    asked::check(&args.workload)?;
    let (load, name) = asked::load(&args.load, args.workload.num_prompts)?;
    let stop = context.stop.clone();
    let mut sitting = Sitting::new(context, &args.output, "A against B")?;
    sitting.slo = args.workload.slo();
    let what = match (&args.peer, &args.b) {
        (Some(peer), _) if peer.contains('+') => peer.clone(),
        (Some(peer), _) => format!("openai+{peer}"),
        (None, what) => what.clone().unwrap_or_default(),
    };
    let is_same = args.a.contains("://") && args.a == what;
    ensure!(!is_same, "--a and --b are one server: start another one to compare with");
    let mut a = Subject::new("A", &args.a, &args.programs, &stop).await?;
    let mut programs = args.programs.clone();
    programs.tandem = args.b_tandem.clone().or(programs.tandem);
    let name_of_b = if args.peer.is_some() { "peer" } else { "B" };
    let mut b = Subject::new(name_of_b, &what, &programs, &stop).await?;
    if let (Some(pid), Some(of_b)) = (a.process.pid(), b.process.pid()) {
        ensure!(pid != of_b, "A and {name_of_b} are one server, process {pid}");
    }
    let asked = repeats(args.pairs, &args.workload, &[&a, &b])?;
    for subject in [&mut a, &mut b] {
        subject.take(&asked).await?;
        sitting.result.add_server(subject.server.clone());
    }
    let of_a = runs(&a, &name, load, asked.clone());
    let pairs = of_a.into_iter().zip(runs(&b, &name, load, asked));
    // In turn, so that what drifts meets both alike.
    let in_turn = pairs.flat_map(|(a, b)| if a.repeat % 2 == 0 { [a, b] } else { [b, a] });
    sitting.measure_all(&in_turn.collect::<Vec<_>>()).await;
    sitting.result.judge_pairs(&a.server.name, &b.server.name);
    sitting.end()
}

pub(super) async fn sweep(args: &SweepArgs, context: Context) -> Result<()> {
    asked::check(&args.workload)?;
    ensure_once("--concurrencies", &args.concurrencies)?;
    ensure_once("--input-lens", &args.input_lens)?;
    ensure_once("--num-speculative-tokens", &args.num_speculative_tokens)?;
    let is_random = asked::dataset(&args.workload)? == DatasetArg::Random;
    ensure!(
        is_random || args.input_lens.is_empty(),
        "--input-lens: the prompts of a file and built-in ones are as long as they are"
    );
    let stop = context.stop.clone();
    let mut sitting = Sitting::new(context, &args.output, "Sweep")?;
    sitting.slo = args.workload.slo();
    let mut subject = Subject::new("server", &args.server.what(), &args.programs, &stop).await?;
    for width in &args.num_speculative_tokens {
        subject.ensure_drafts(*width)?;
    }
    let widths: Vec<Option<u32>> = match args.num_speculative_tokens.as_slice() {
        [] => vec![None],
        widths => widths.iter().copied().map(Some).collect(),
    };
    let lengths = match args.input_lens.as_slice() {
        [] => vec![args.workload.random_input_len],
        lengths => lengths.to_vec(),
    };
    let mut settings = vec![];
    for (len, n) in lengths.iter().flat_map(|len| args.concurrencies.iter().map(move |n| (len, n)))
    {
        let workload = WorkloadArgs {
            random_input_len: *len,
            // Of its own, and not by place: other settings beside it change nothing.
            seed: args.workload.seed.wrapping_add(u64::from(*len) << 32 | u64::from(*n) << 20),
            num_prompts: args.prompts_per_place.saturating_mul(*n),
            ..args.workload.clone()
        };
        let asked = repeats(args.repeats, &workload, &[&subject])?;
        subject.take(&asked).await?;
        let length = if is_random { format!("{len} tokens, ") } else { String::new() };
        let name = format!("{length}{n} at once");
        settings.push((name, *n as usize, asked));
    }
    let mut all = vec![];
    for width in widths {
        let label = width.map_or_else(|| "server".to_owned(), |k| subject.drafts_label(k));
        let mut server = subject.server.clone();
        server.name.clone_from(&label);
        sitting.result.add_server(server);
        for (name, concurrency, asked) in &settings {
            let load = Load::Closed { concurrency: *concurrency };
            let asked = asked.iter().map(|asked| asked.with_drafts(width)).collect();
            let runs = runs(&subject, name, load, asked).into_iter();
            all.extend(runs.map(|run| Run { label: label.clone(), ..run }));
        }
    }
    sitting.measure_all(&all).await;
    sitting.end()
}

pub(super) async fn latency(args: &LatencyArgs, context: Context) -> Result<()> {
    let stop = context.stop.clone();
    let mut sitting = Sitting::new(context, &args.output, "Latency of a batch")?;
    let mut engine = args.engine.clone();
    // A batch is a batch: none of it waits or is refused.
    engine.max_num_seqs = engine.max_num_seqs.max(args.batch_size);
    let mut subject = Subject::in_process(&engine, &stop).await?;
    let lens = (args.input_len, args.output_len);
    let mut asked = Asked::random((args.batch_size, args.seed), 0, lens, &subject.vocabulary);
    asked.warm_up = vec![&*asked.requests; args.num_iters_warmup as usize].concat().into();
    subject.take(std::slice::from_ref(&asked)).await?;
    sitting.result.add_server(subject.server.clone());
    let n = args.batch_size as usize;
    let run = run(&subject, format!("batches of {n}"), Load::Closed { concurrency: n }, asked);
    let batches = Batches {
        requests: run.asked.requests.clone(),
        n_warmup: args.num_iters_warmup as usize,
        n: args.num_iters as usize,
    };
    sitting.measure_batches(&run, batches).await?;
    sitting.end()
}

pub(super) async fn throughput(args: &ThroughputArgs, context: Context) -> Result<()> {
    asked::check(&args.workload)?;
    let stop = context.stop.clone();
    let mut sitting = Sitting::new(context, &args.output, "Throughput")?;
    sitting.slo = args.workload.slo();
    let n = args.workload.num_prompts;
    let mut engine = args.engine.clone();
    // All prompts are known and wait here anyway: nothing is refused for the length of the queue.
    engine.max_queued_requests = engine.max_queued_requests.max(n);
    let mut subject = Subject::in_process(&engine, &stop).await?;
    let asked = repeats(args.repeats, &args.workload, &[&subject])?;
    subject.take(&asked).await?;
    sitting.result.add_server(subject.server.clone());
    let load = Load::Closed { concurrency: n as usize };
    sitting.measure_all(&runs(&subject, &format!("{n} at once"), load, asked)).await;
    sitting.end()
}

/// The first run of a setting.
pub(super) fn run(subject: &Subject, name: String, load: Load, asked: Asked) -> Run<'_> {
    Run { name, label: subject.server.name.clone(), subject, load, repeat: 0, asked }
}

/// The runs of a setting, each of which asks its own.
fn runs<'a>(subject: &'a Subject, name: &str, load: Load, asked: Vec<Asked>) -> Vec<Run<'a>> {
    let runs = (0..).zip(asked);
    runs.map(|(repeat, asked)| Run { repeat, ..run(subject, name.to_owned(), load, asked) })
        .collect()
}

/// What the repeats of a setting ask.
fn repeats(n: u32, args: &WorkloadArgs, subjects: &[&Subject]) -> Result<Vec<Asked>> {
    let vocabulary = vocabulary(args, subjects);
    (0..n).map(|repeat| Asked::new(args, &vocabulary, repeat)).collect()
}

/// Refuses a setting that is named twice: its runs could not be told apart.
fn ensure_once(flag: &str, values: &[u32]) -> Result<()> {
    for (idx, value) in values.iter().enumerate() {
        ensure!(!values[..idx].contains(value), "{flag}: {value} is there twice");
    }
    Ok(())
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

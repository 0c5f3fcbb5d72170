//! Outputs that keep to a grammar, with drafts and without: whether all are valid, and how fast.
//!
//! `cargo bench -p integration-tests --bench constrained -- --help` tells the options. Two JSON
//! schemas, a regular expression and a Lark grammar take turns, behind prompts of the reference
//! cases; half of the requests are greedy, half sampled at temperature 0.8. The settings take
//! turns, each run in an engine of its own. It prints a Markdown table; any invalid output is an
//! error.

#![expect(clippy::print_stdout, reason = "the table is what this is for")]

use std::time::Instant;

use anyhow::Result;
use clap::Parser;
use integration_tests::bench::{Options, limit_threads};
use integration_tests::constrained::Constrained;
use integration_tests::harness;
use integration_tests::oracle::Checkpoint;
use integration_tests::table::median;
use model_runner::RunnerOptions;

/// Measures constrained outputs of tiny-glm52.
#[derive(Debug, Parser)]
struct Args {
    /// Requests of a run.
    #[arg(long, default_value_t = 500, value_parser = clap::value_parser!(u32).range(1..))]
    requests: u32,
    /// Requests that run at once.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..))]
    concurrency: u32,
    #[command(flatten)]
    options: Options,
}

/// What a run did.
struct Run {
    n_tokens: usize,
    tokens_per_s: f64,
    acceptance_length: f64,
}

fn main() -> Result<()> {
    let args = Args::parse();
    limit_threads(args.options.threads)?;
    let constrained = Constrained::new(Checkpoint::TinyGlm52)?;
    println!(
        "{} requests, {} at once, {}; all outputs valid\n",
        args.requests,
        args.concurrency,
        args.options.describe()
    );
    println!("| k | tokens | tokens/s (min to max) | acceptance length |\n|---|---|---|---|");
    let mut runs = [vec![], vec![]];
    let widths = [0, args.options.k];
    for _ in 0..args.options.repeats {
        for (runs, k) in runs.iter_mut().zip(widths) {
            runs.push(run(&args, &constrained, k)?);
        }
    }
    let mut medians = [0.0; 2];
    for ((runs, k), of_k) in runs.iter().zip(widths).zip(&mut medians) {
        let mut speeds: Vec<f64> = runs.iter().map(|run| run.tokens_per_s).collect();
        speeds.sort_by(f64::total_cmp);
        *of_k = median(&speeds);
        let (min, max) = (speeds[0], speeds[speeds.len() - 1]);
        let Run { n_tokens, acceptance_length, .. } = runs[0];
        println!(
            "| {k} | {n_tokens} | {of_k:.0} ({min:.0} to {max:.0}) | {acceptance_length:.2} |"
        );
    }
    println!("\nratio of the medians: {:.2}", medians[1] / medians[0]);
    Ok(())
}

/// Submits all requests at once, and checks every output.
fn run(args: &Args, constrained: &Constrained, k: u32) -> Result<Run> {
    let options = RunnerOptions {
        num_speculative_tokens: k,
        max_num_seqs: args.concurrency,
        ..RunnerOptions::default()
    };
    let checkpoint = Checkpoint::TinyGlm52;
    let (engine, _thread) = harness::start(checkpoint, args.options.dtype.into(), &options)?;
    let prompts: Vec<_> = checkpoint
        .cases()?
        .into_iter()
        .map(|case| case.prompt_ids)
        .filter(|p| p.len() < 100)
        .collect();
    let started = Instant::now();
    let (mut done, mut running) = (vec![], std::collections::VecDeque::new());
    for idx in 0..args.requests as usize {
        // Twice as many as run, so that one always waits.
        if running.len() as u32 >= 2 * args.concurrency {
            done.extend(running.pop_front().map(harness::collect).transpose()?);
        }
        let seed = (idx / Constrained::N % 2 == 1).then_some(idx as u64);
        running.push_back(constrained.submit(&engine, &prompts[idx % prompts.len()], idx, seed)?);
    }
    for events in running {
        done.push(harness::collect(events)?);
    }
    let seconds = started.elapsed().as_secs_f64();
    for (idx, done) in done.iter().enumerate() {
        constrained.check(idx, done)?;
    }
    let n_tokens: usize = done.iter().map(|done| done.token_ids.len()).sum();
    let acceptance_length = if k == 0 { 1.0 } else { harness::acceptance_length(&done) };
    Ok(Run { n_tokens, tokens_per_s: n_tokens as f64 / seconds, acceptance_length })
}

//! What drafts bring at a temperature, and that they do not change what is generated: the same
//! prompts without drafts, with greedy drafts and with sampled ones, taking turns.
//!
//! `cargo bench -p integration-tests --bench sampling -- --help` tells the options. It prints a
//! Markdown table; `docs/perf/README.md` says how to read it.

#![expect(clippy::print_stdout, clippy::print_stderr, reason = "the table is what this is for")]

mod counts;

use std::time::Instant;

use anyhow::{Result, ensure};
use clap::Parser;
use engine_types::{SamplingParams, TokenId};
use integration_tests::bench::{Options, limit_threads};
use integration_tests::harness::{Generation, acceptance_length, generate, params, start};
use integration_tests::oracle::Checkpoint;
use integration_tests::table::median;
use model_runner::{DraftSampling, RunnerOptions};

use crate::counts::{Counts, POSITIONS};

/// Requests that wait or run at once.
const N_WAVE: usize = 128;

/// Compares sampled generation with and without drafts on tiny-glm52.
#[derive(Debug, Parser)]
struct Args {
    /// Temperature of all requests but the control's.
    #[arg(long, default_value_t = 0.8)]
    temperature: f32,
    /// Temperature of the control, which is to show what the statistics can tell.
    #[arg(long, default_value_t = 0.75)]
    control: f32,
    /// Different prompts: as many of the short reference cases.
    #[arg(long, default_value_t = 4)]
    prompts: usize,
    /// Requests for each prompt and run, each with a seed of its own.
    #[arg(long, default_value_t = 192)]
    seeds: u32,
    /// Tokens that each request generates.
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u32).range(8..))]
    output_len: u32,
    /// Requests that run at once.
    #[arg(long, default_value_t = 16)]
    concurrency: u32,
    #[command(flatten)]
    options: Options,
}

/// How a run generates.
#[derive(Clone, Copy)]
struct Setting {
    name: &'static str,
    k: u32,
    draft_sampling: DraftSampling,
    temperature: f32,
}

/// What the runs of a setting measured.
#[derive(Default)]
struct Measured {
    tokens_per_s: Vec<f64>,
    acceptance_length: Vec<f64>,
    counts: Counts,
}

fn main() -> Result<()> {
    let args = Args::parse();
    limit_threads(args.options.threads)?;
    ensure!(args.options.k > 0, "--k: without drafts there is nothing to compare");
    let cases = Checkpoint::TinyGlm52.cases()?;
    ensure!((1..=12).contains(&args.prompts), "--prompts: from 1 to 12");
    let prompts: Vec<Vec<TokenId>> =
        cases.into_iter().map(|case| case.prompt_ids).take(args.prompts).collect();
    let (k, temperature) = (args.options.k, args.temperature);
    let direct = Setting { name: "none", k: 0, draft_sampling: DraftSampling::Greedy, temperature };
    let settings = [
        direct,
        Setting { name: "greedy", k, ..direct },
        Setting { name: "sampled", k, draft_sampling: DraftSampling::Sampled, ..direct },
        Setting { name: "none, other seeds", ..direct },
        Setting { name: "none, control", temperature: args.control, ..direct },
    ];
    // The first run warms caches and clocks up, and is not counted.
    run(&args, &prompts, settings[0], u64::MAX >> 32, &mut Measured::default())?;
    let mut measured: [Measured; 5] = Default::default();
    for repeat in 0..u64::from(args.options.repeats) {
        for (idx, (setting, measured)) in settings.iter().zip(&mut measured).enumerate() {
            run(&args, &prompts, *setting, repeat * 5 + idx as u64, measured)?;
            let speed = measured.tokens_per_s.last().copied().unwrap_or_default();
            eprintln!("{}: {speed:.0} tokens/s", setting.name);
        }
    }
    report(&args, &settings, &measured);
    Ok(())
}

/// Generates once with every seed of `sample` behind every prompt.
fn run(
    args: &Args,
    prompts: &[Vec<TokenId>],
    setting: Setting,
    sample: u64,
    measured: &mut Measured,
) -> Result<()> {
    let options = RunnerOptions {
        num_speculative_tokens: setting.k,
        draft_sampling: setting.draft_sampling,
        max_num_seqs: args.concurrency,
        ..RunnerOptions::default()
    };
    let (engine, _thread) = start(Checkpoint::TinyGlm52, args.options.dtype.into(), &options)?;
    let request = |idx: usize| {
        let (seed, temperature) = (Some(sample << 32 | idx as u64), setting.temperature);
        let plain = params(args.output_len);
        let params = SamplingParams { temperature, seed, ignore_eos: true, ..plain };
        (&prompts[idx % prompts.len()][..], params)
    };
    generate(&engine, [request(0)])?;
    let requests: Vec<_> = (0..prompts.len() * args.seeds as usize).map(request).collect();
    let mut done: Vec<Generation> = vec![];
    let started = Instant::now();
    for wave in requests.chunks(N_WAVE) {
        done.extend(generate(&engine, wave.iter().cloned())?);
    }
    let elapsed = started.elapsed().as_secs_f64();
    let n_tokens: usize = done.iter().map(|found| found.token_ids.len()).sum();
    ensure!(n_tokens == done.len() * args.output_len as usize, "{n_tokens} tokens");
    measured.tokens_per_s.push(n_tokens as f64 / elapsed);
    measured.acceptance_length.push(acceptance_length(&done));
    for (idx, found) in done.iter().enumerate() {
        measured.counts.add(idx % prompts.len(), &found.token_ids);
    }
    Ok(())
}

fn report(args: &Args, settings: &[Setting], measured: &[Measured]) {
    println!(
        "tiny-glm52, {}: temperature {}, {} prompts, {} seeds a prompt and run, {} tokens each, \
         {} at once; minimum / **median** / maximum\n",
        args.options.describe(),
        args.temperature,
        args.prompts,
        args.seeds,
        args.output_len,
        args.concurrency
    );
    let positions = POSITIONS.map(|at| format!(" token {at}: chi-square, degrees, deviate |"));
    println!("| drafts | tokens/s | by none | acceptance length |{}", positions.concat());
    println!("|---|---|---|---|{}", "---|".repeat(POSITIONS.len()));
    for (idx, (setting, found)) in settings.iter().zip(measured).enumerate() {
        let by_none = found.tokens_per_s.iter().zip(&measured[0].tokens_per_s).map(|(a, b)| a / b);
        let mut line = format!(
            "| {} | {} | {} | {} |",
            setting.name,
            spread(found.tokens_per_s.clone(), 0),
            spread(by_none.collect(), 2),
            spread(found.acceptance_length.clone(), 3)
        );
        for at in 0..POSITIONS.len() {
            line += &match idx {
                0 => " |".to_owned(),
                _ => format!(" {} |", measured[0].counts.compare(&found.counts, at)),
            };
        }
        println!("{line}");
    }
}

fn spread(mut values: Vec<f64>, digits: usize) -> String {
    values.sort_by(f64::total_cmp);
    let (min, max) = (values[0], values[values.len() - 1]);
    format!("{min:.digits$} / **{:.digits$}** / {max:.digits$}", median(&values))
}

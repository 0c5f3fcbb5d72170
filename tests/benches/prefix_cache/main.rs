//! What the prefix cache brings to requests that begin alike: the same prompts through the gRPC
//! port of one process, with the cache off, on, off, on and so forth. The texts must be equal.
//!
//! `cargo bench -p integration-tests --bench prefix_cache -- --help` tells the options. It prints
//! a Markdown table: prompt tokens computed and served from the cache, and the time to the first
//! token (TTFT), from the request to the first message, as mean and median over the requests.

#![expect(clippy::print_stdout, clippy::print_stderr, reason = "the table is what this is for")]

mod measure;
mod prompts;

use anyhow::{Result, ensure};
use clap::Parser;
use integration_tests::bench::{Options, limit_threads};
use integration_tests::table::{self, Column, LEGEND};

use crate::measure::{Load, Run};

/// Compares serving with and without the prefix cache on tiny-glm52.
#[derive(Debug, Parser)]
struct Args {
    /// Requests.
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..))]
    requests: u32,
    /// Tokens with which each prompt begins.
    #[arg(long, default_value_t = 1000)]
    prefix_len: usize,
    /// Tokens of its own behind them.
    #[arg(long, default_value_t = 24)]
    suffix_len: usize,
    /// Requests that run at once; each client sends its next one when it has the last one's text.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..))]
    concurrency: u32,
    /// Tokens that each request generates.
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..))]
    output_len: u32,
    #[command(flatten)]
    options: Options,
}

fn main() -> Result<()> {
    let args = Args::parse();
    limit_threads(args.options.threads)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let prompts = prompts::with_prefix(args.prefix_len, args.suffix_len, args.requests as usize)?;
    let load = Load {
        prompts,
        concurrency: args.concurrency,
        output_len: args.output_len,
        k: args.options.k,
        dtype: args.options.dtype.into(),
    };
    let measure = |caching| {
        let run = runtime.block_on(measure::run(&load, caching))?;
        eprintln!("cache {caching}: median TTFT {:.1} ms", run.median_ttft_ms);
        anyhow::Ok(run)
    };
    // The first run warms caches and clocks up, and only its texts count.
    let texts = measure(false)?.texts;
    let mut runs: [Vec<Run>; 2] = [vec![], vec![]];
    for _ in 0..args.options.repeats {
        for (caching, runs) in [false, true].into_iter().zip(&mut runs) {
            let run = measure(caching)?;
            for (idx, (found, expected)) in run.texts.iter().zip(&texts).enumerate() {
                ensure!(found == expected, "request {idx}, cache {caching}: another text");
            }
            runs.push(run);
        }
    }
    println!("{}", header(&args));
    print!("{}", table::rows("", &columns(), &runs));
    Ok(())
}

fn columns() -> Vec<Column<Run>> {
    let column = |title: &str, digits, value: fn(&Run) -> f64| Column::new(title, digits, value);
    vec![
        column("prompt tokens computed", 0, |run| run.n_computed as f64),
        column("saved", 0, |run| run.n_cached as f64),
        column("saved, %", 2, |run| {
            100.0 * run.n_cached as f64 / (run.n_cached + run.n_computed) as f64
        }),
        column("mean TTFT, ms", 2, |run| run.mean_ttft_ms),
        column("median TTFT, ms", 2, |run| run.median_ttft_ms),
        column("output tokens/s", 0, |run| run.tokens_per_s),
    ]
}

/// What was run, and the head of the table.
fn header(args: &Args) -> String {
    let Args { requests, prefix_len, suffix_len, concurrency, output_len, options } = args;
    let head = table::head(&["prefix cache"], &columns());
    format!(
        "tiny-glm52, {}: {requests} requests, {concurrency} at once, prompts of {prefix_len} \
         common and {suffix_len} own tokens, {output_len} output tokens each; equal texts; \
         {LEGEND}\n\n{head}",
        options.describe()
    )
}

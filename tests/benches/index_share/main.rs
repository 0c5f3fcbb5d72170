//! What sharing the selection of keys between draft steps brings: the same prompts through the
//! gRPC port of one process, with sharing off, on, off, on and so forth. The prefix cache is off.
//!
//! `cargo bench -p integration-tests --bench index_share -- --help` tells the options. It prints a
//! Markdown table; `docs/perf/README.md` says how to read it.

#![expect(clippy::print_stdout, clippy::print_stderr, reason = "the table is what this is for")]

mod measure;
mod prompts;
mod report;

use anyhow::{Result, ensure};
use clap::Parser;
use integration_tests::bench::{Options, limit_threads};
use spec_decode::IndexShare;

use crate::measure::{Load, Run};

/// Compares drafting with and without `index_share_for_mtp_iteration` on tiny-glm52.
#[derive(Debug, Parser)]
struct Args {
    /// Prompt lengths, in tokens.
    #[arg(long, value_delimiter = ',', default_values_t = [256, 1024, 1900])]
    lengths: Vec<usize>,
    /// Tokens that each request generates.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(2..))]
    output_len: u32,
    /// Requests, all running at once.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..))]
    concurrency: u32,
    #[command(flatten)]
    options: Options,
}

fn main() -> Result<()> {
    let args = Args::parse();
    limit_threads(args.options.threads)?;
    ensure!(args.options.k > 0, "--k: without drafts there is nothing to share");
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    println!("{}", report::header(&args));
    for &length in &args.lengths {
        ensure!(length > 0, "--lengths: 0 is no length");
        let prompts = prompts::of_length(length, args.concurrency as usize)?;
        let load = Load {
            prompts,
            output_len: args.output_len,
            k: args.options.k,
            dtype: args.options.dtype.into(),
        };
        let measure = |index_share| {
            let run = runtime.block_on(measure::run(&load, index_share))?;
            eprintln!("{length} tokens, sharing {index_share}: {:.0} tokens/s", run.tokens_per_s);
            anyhow::Ok(run)
        };
        // The first run of a length warms caches and clocks up, and is not counted.
        measure(IndexShare::Off)?;
        let mut runs: [Vec<Run>; 2] = [vec![], vec![]];
        for _ in 0..args.options.repeats {
            runs[0].push(measure(IndexShare::Off)?);
            runs[1].push(measure(IndexShare::On)?);
        }
        print!("{}", report::rows(length, args.options.k, &runs));
    }
    Ok(())
}

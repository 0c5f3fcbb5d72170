//! What a decode step costs by its requests and drafts: the model's runner, given the same step
//! again and again. The defaults of adaptive drafting come from such a table.
//!
//! `cargo bench -p integration-tests --bench step_cost -- --help` tells the options. Each request
//! verifies the drafts that the model proposed for it, so that about as many are accepted as in
//! real decoding. It prints a Markdown table in microseconds a step: `no MTP` runs the target
//! alone; `v, p` verifies `v` drafts a request and proposes `p`. The shapes take turns. Below, the
//! costs that are exact for the minima of the first and last batch with no drafts and with three.

#![expect(clippy::print_stdout, reason = "the table is what this is for")]

use std::fmt;
use std::time::Instant;

use anyhow::{Context, Result};
use clap::Parser;
use engine_types::{
    BlockId, RequestId, RowSpec, RowTable, StepExecutor, StepOutcome, StepPlan, TokenId,
};
use integration_tests::bench::{Dtype, limit_threads};
use integration_tests::oracle::Checkpoint;
use integration_tests::table::median;
use model_runner::{Runner, RunnerOptions};
use models::LoadOptions;
use scheduler::DraftingCosts;

const BLOCK_SIZE: u32 = 16;

/// Largest number of drafts.
const K: u32 = 8;

/// Drafts verified and proposed; `None` does not run the MTP layer at all.
const SHAPES: [Option<(u32, u32)>; 9] = [
    None,
    Some((0, 0)),
    Some((0, 1)),
    Some((1, 1)),
    Some((2, 2)),
    Some((3, 3)),
    Some((5, 5)),
    Some((8, 8)),
    Some((8, 0)),
];

/// Measures decode steps of tiny-glm52.
#[derive(Debug, Parser)]
struct Args {
    /// Tokens before the step.
    #[arg(long, value_delimiter = ',', default_values_t = [64, 512])]
    contexts: Vec<u32>,
    /// Requests of a step.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 4, 16, 64])]
    batches: Vec<u32>,
    /// Steps of each shape.
    #[arg(long, default_value_t = 40, value_parser = clap::value_parser!(u32).range(1..))]
    repeats: u32,
    /// What the model computes in.
    #[arg(long, value_enum, default_value_t = Dtype::Bfloat16)]
    dtype: Dtype,
    /// CPU threads of the kernels [default: one a core]
    #[arg(long)]
    threads: Option<usize>,
    /// `cargo bench` passes it.
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> Result<()> {
    let args = Args::parse();
    limit_threads(args.threads)?;
    println!("tiny-glm52, {:?}; microseconds a step, minimum / **median**\n", args.dtype);
    let names = SHAPES.map(|shape| match shape {
        None => "no MTP".to_owned(),
        Some((n_draft, n_propose)) => format!("{n_draft}, {n_propose}"),
    });
    println!("| context | requests | {} |", names.join(" | "));
    println!("|---|---|{}", "---|".repeat(SHAPES.len()));
    let mut costs = vec![];
    for &context in &args.contexts {
        let mut cells = vec![];
        for &batch in &args.batches {
            let times = measure(context, batch, &args)?;
            let shown = times.map(|times| times.to_string());
            println!("| {context} | {batch} | {} |", shown.join(" | "));
            cells.push((batch, times));
        }
        if let [first, .., last] = &cells[..] {
            costs.push(format!("{context} tokens of context: {:?}", drafting_costs(first, last)));
        }
    }
    println!("\n{}", costs.join("\n"));
    Ok(())
}

/// The costs of which the shortest steps of two batches consist, without drafts and with three.
/// Other work on the machine only adds to a time.
fn drafting_costs(
    (n_first, first): &(u32, [Times; SHAPES.len()]),
    (n_last, last): &(u32, [Times; SHAPES.len()]),
) -> DraftingCosts {
    let without = |times: &[Times]| times[1].min;
    let a_draft = |times: &[Times]| (times[5].min - times[1].min) / 3.0;
    let n_more = f64::from(n_last - n_first);
    let request = (without(last) - without(first)) / n_more;
    let draft = (a_draft(last) - a_draft(first)) / n_more;
    let n_first = f64::from(*n_first);
    let rounded = |us: f64| us.round() as u32;
    DraftingCosts {
        step: rounded(without(first) - n_first * request),
        request: rounded(request),
        draft_step: rounded(a_draft(first) - n_first * draft),
        draft: rounded(draft),
    }
}

/// What a step took, in microseconds.
#[derive(Clone, Copy)]
struct Times {
    min: f64,
    median: f64,
}

impl fmt::Display for Times {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.0} / **{:.0}**", self.min, self.median)
    }
}

/// Times of each shape; the shapes take turns.
fn measure(context: u32, batch: u32, args: &Args) -> Result<[Times; SHAPES.len()]> {
    let blocks_each = (context + 2 * K).div_ceil(BLOCK_SIZE);
    let checkpoint = Checkpoint::TinyGlm52;
    let load = LoadOptions { dtype: args.dtype.into(), drafting: true, ..LoadOptions::default() };
    let mut runner = Runner::new(
        models::load(&checkpoint.dir()?, load)?,
        &RunnerOptions {
            block_size: BLOCK_SIZE,
            num_blocks: Some(batch * blocks_each),
            max_num_seqs: batch,
            max_num_batched_tokens: batch * context.max(K + 1),
            num_speculative_tokens: K,
            ..RunnerOptions::default()
        },
    )?;
    let starts = prefill(&mut runner, context, batch, blocks_each, &checkpoint.text()?)?;
    let plans = SHAPES.map(|shape| plan(shape, context, blocks_each, &starts));
    let mut outcome = StepOutcome::default();
    let mut times = SHAPES.map(|_| vec![]);
    for repeat in 0..=args.repeats {
        for (plan, times) in plans.iter().zip(&mut times) {
            let start = Instant::now();
            runner.execute(plan, &mut outcome)?;
            // The first round warms up.
            if repeat > 0 {
                times.push(start.elapsed().as_secs_f64() * 1e6);
            }
        }
    }
    Ok(times.map(|mut times| {
        times.sort_by(f64::total_cmp);
        Times { min: times[0], median: median(&times) }
    }))
}

/// Computes the prompts, and returns for each its first output and the drafts behind it.
fn prefill(
    runner: &mut Runner,
    context: u32,
    batch: u32,
    blocks_each: u32,
    text: &[TokenId],
) -> Result<Vec<Vec<TokenId>>> {
    let spec = RowSpec {
        samples: true,
        prefill: true,
        drafting: true,
        n_propose: K,
        ..RowSpec::default()
    };
    let (mut plan, mut outcome) = (StepPlan::default(), StepOutcome::default());
    for request in 0..batch {
        let start = request as usize * text.len() / batch as usize;
        let prompt = text.iter().cycle().skip(start).take(context as usize);
        let prompt: Vec<TokenId> = prompt.copied().collect();
        let id = RequestId(u64::from(request));
        let blocks = request * blocks_each..(request + 1) * blocks_each;
        let blocks: Vec<BlockId> = blocks.map(BlockId).collect();
        let table = plan.update_table(request, 0, &blocks);
        plan.push_row(id, spec, &prompt, &[], table);
    }
    runner.execute(&plan, &mut outcome)?;
    let row = |request| outcome.row(RequestId(u64::from(request))).context("a row is missing");
    (0..batch)
        .map(|request| {
            let row = row(request)?;
            Ok([outcome.tokens(row), outcome.drafts(row)].concat())
        })
        .collect()
}

fn plan(
    shape: Option<(u32, u32)>,
    context: u32,
    blocks_each: u32,
    starts: &[Vec<TokenId>],
) -> StepPlan {
    let (n_draft, n_propose) = shape.unwrap_or((0, 0));
    let drafting = shape.is_some();
    let spec = RowSpec {
        n_computed: context,
        n_draft,
        samples: true,
        drafting,
        n_propose,
        ..RowSpec::default()
    };
    let mut plan = StepPlan::default();
    for (request, tokens) in (0..).zip(starts) {
        let id = RequestId(u64::from(request));
        let table = RowTable { slot: request, n_blocks: blocks_each };
        plan.push_row(id, spec, &tokens[..=n_draft as usize], &[], table);
    }
    plan
}

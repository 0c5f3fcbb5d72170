//! Where the time of a speculative step goes: `step_anatomy CONFIG_FOLDER`, a Markdown table for
//! each batch and context.
//!
//! Dummy weights in bfloat16, three drafts, two of them accepted whatever the target says. Events
//! on the device's stream part the steps. What is not measured is the idle time between the
//! kernels of a graph.

#![expect(clippy::print_stdout, reason = "a program that prints its outcome")]

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result};
use gpu_model::{
    CapturedStep, DecodeOptions, GpuModel, PassLimits, SlotRecord, StepGraphs, StepPart, StepTimes,
    TableUpdate,
};
use gpu_runtime::{DeviceChoice, Gpu};
use half::bf16;
use model_config::ModelConfig;
use weights::LoadFormat;

const DRAFTS: usize = 3;
const ACCEPTED: u32 = 2;
const BLOCK_SIZE: usize = 16;
const CONTEXTS: [usize; 2] = [1024, 8192];
const SLOTS: [usize; 2] = [1, 16];
const N_WARM: usize = 5;
const N_STEPS: usize = 31;
/// Positions that a run can reach.
const MARGIN: usize = (N_WARM + N_STEPS + 2) * (DRAFTS + 1);

/// One way of running steps: its name, its graphs, and whether a step is launched before the one
/// before is collected.
type Way = (&'static str, StepGraphs, bool);

const WAYS: [Way; 4] = [
    ("launch by launch", StepGraphs::None, true),
    ("a graph a part", StepGraphs::Parts, true),
    ("one graph", StepGraphs::Whole, true),
    ("one graph, immediate", StepGraphs::Whole, false),
];

/// Medians of a way, in milliseconds.
struct Anatomy {
    period: f64,
    gap: f64,
    upload: f64,
    /// Of each part, or of all together.
    parts: Vec<f64>,
    download: f64,
}

fn main() -> Result<()> {
    let dir = PathBuf::from(std::env::args().nth(1).context("give the folder of a config")?);
    let gpu = Gpu::open(&DeviceChoice::Cuda(0))?.context("there is no GPU")?;
    let config = ModelConfig::load(&dir)?;
    let start = Instant::now();
    let mut model = load(&gpu, &dir, &config)?;
    println!(
        "{}, {}: medians of {N_STEPS} steps with {DRAFTS} drafts, ms. Loaded in {:.1} s.",
        gpu.info().name,
        dir.display(),
        start.elapsed().as_secs_f64()
    );
    let cells = || SLOTS.iter().flat_map(|&n_slots| CONTEXTS.map(|context| (n_slots, context)));
    let mut found = vec![];
    for (name, graphs, is_deferred) in WAYS {
        let captured = model.prepare_decode(DecodeOptions {
            num_speculative_tokens: DRAFTS,
            index_share: true,
            sizes: SLOTS.to_vec(),
            graphs,
            is_forced: true,
        })?;
        for CapturedStep { n_slots, n_launches, n_bytes } in captured {
            println!("{name}, {n_slots} slots: {n_launches} launches, {} KiB", n_bytes >> 10);
        }
        model.time_parts()?;
        for (n_slots, context) in cells() {
            found.push(anatomy(run(&mut model, is_deferred, n_slots, context)?));
        }
    }
    for (cell, (n_slots, context)) in cells().enumerate() {
        println!("\n**{n_slots} slots, context {context}**\n");
        let ways: Vec<&Anatomy> = found.iter().skip(cell).step_by(cells().count()).collect();
        print_table(&ways);
    }
    println!("\n{:.1} s in all", start.elapsed().as_secs_f64());
    Ok(())
}

fn load(gpu: &Gpu, dir: &std::path::Path, config: &ModelConfig) -> Result<GpuModel<bf16>> {
    let target = (tch::Device::Cpu, tch::Kind::BFloat16);
    let tensors = weights::load(dir, config, LoadFormat::Dummy, true, target)?;
    let (most, longest) = (SLOTS[SLOTS.len() - 1], CONTEXTS[CONTEXTS.len() - 1] + MARGIN);
    let limits = PassLimits {
        max_rows: most * (DRAFTS + 1),
        max_seqs: most,
        max_len: longest,
        max_window: DRAFTS + 1,
        block_size: BLOCK_SIZE,
        num_blocks: 0,
    };
    let mut model = GpuModel::load(gpu, config.clone(), tensors, (true, limits))?;
    model.allocate_caches(most * longest.div_ceil(BLOCK_SIZE))?;
    Ok(model)
}

/// The times of steps, those of the first few left out.
fn run(
    model: &mut GpuModel<bf16>,
    is_deferred: bool,
    n_slots: usize,
    context: usize,
) -> Result<Vec<StepTimes>> {
    let n_blocks = (context + MARGIN).div_ceil(BLOCK_SIZE);
    let tables: Vec<Vec<i32>> = (0..n_slots)
        .map(|slot| (0..n_blocks).map(|block| (slot * n_blocks + block) as i32).collect())
        .collect();
    let updates: Vec<TableUpdate<'_>> =
        (0..).zip(&tables).map(|(table, blocks)| TableUpdate { table, blocks }).collect();
    let record = |slot: usize, is_first: bool| SlotRecord {
        source: (!is_first).then_some(slot as u32),
        table: slot as u32,
        valid_len: context as u32,
        last_token: 5 + slot as u32,
        n_drafts: DRAFTS as u32,
        n_wanted: DRAFTS as u32,
        forced: ACCEPTED,
        drafts: if is_first { &[7; DRAFTS] } else { &[] },
    };
    let records = |is_first| (0..n_slots).map(|slot| record(slot, is_first)).collect::<Vec<_>>();
    let (first, others) = (records(true), records(false));
    let mut times = vec![];
    model.launch_step(&updates, &first)?;
    for _ in 0..N_WARM + N_STEPS {
        if is_deferred {
            model.launch_step(&[], &others)?;
        }
        model.collect_step(n_slots, &mut |_, result| {
            assert_eq!(result.tokens.len(), ACCEPTED as usize + 1, "a slot failed");
        })?;
        if !is_deferred {
            // As an engine does: the next step first, then the bookkeeping.
            model.launch_step(&[], &others)?;
        }
        times.push(model.collected_times()?);
    }
    model.collect_step(n_slots, &mut |_, _| {})?;
    Ok(times.split_off(N_WARM))
}

fn anatomy(times: Vec<StepTimes>) -> Anatomy {
    let median = |of: &dyn Fn(&StepTimes) -> f32| {
        let mut values: Vec<f32> = times.iter().map(of).collect();
        values.sort_by(f32::total_cmp);
        f64::from(values[values.len() / 2])
    };
    let gap = |step: &StepTimes| step.gap.unwrap_or(0.0);
    Anatomy {
        period: median(&|step| {
            gap(step) + step.upload + step.parts.iter().sum::<f32>() + step.download
        }),
        gap: median(&gap),
        upload: median(&|step| step.upload),
        parts: (0..times[0].parts.len()).map(|part| median(&|step| step.parts[part])).collect(),
        download: median(&|step| step.download),
    }
}

fn print_table(ways: &[&Anatomy]) {
    let row = |name: &str, cell: &dyn Fn(&Anatomy) -> String| {
        let cells: Vec<String> = ways.iter().map(|way| cell(way)).collect();
        println!("| {name} | {} |", cells.join(" | "));
    };
    println!("| | {} |", WAYS.map(|(name, ..)| name).join(" | "));
    println!("|---{}|", "|---".repeat(WAYS.len()));
    row("step", &|way| format!("{:.3}", way.period));
    row("gap before it", &|way| format!("{:.4}", way.gap));
    row("gap, share", &|way| format!("{:.2} %", 100.0 * way.gap / way.period));
    row("records to the device", &|way| format!("{:.4}", way.upload));
    for (idx, part) in StepPart::all(DRAFTS).iter().enumerate() {
        let is_split = |way: &Anatomy| way.parts.len() > 1;
        row(&format!("{part:?}"), &|way| match is_split(way) {
            true => format!("{:.4}", way.parts[idx]),
            false => String::new(),
        });
    }
    row("all parts", &|way| format!("{:.3}", way.parts.iter().sum::<f64>()));
    row("result to the host", &|way| format!("{:.4}", way.download));
    // The same kernels in one graph are the device's work with the least between them.
    let busy = ways[2].parts[0];
    row("no kernel runs, at least", &|way| {
        format!("{:.1} %", 100.0 * (1.0 - busy / way.period).max(0.0))
    });
}

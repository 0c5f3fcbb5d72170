//! How long a decode step takes, without a server: `step_time CONFIG_FOLDER`.
//!
//! Dummy weights in bfloat16. Every slot accepts two of three drafts, whatever the target says.

#![expect(clippy::print_stdout, reason = "a program that prints its outcome")]

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result};
use gpu_model::{DecodeOptions, GpuModel, PassLimits, SlotRecord, StepGraphs, TableUpdate};
use gpu_runtime::{DeviceChoice, Gpu};
use half::bf16;
use model_config::ModelConfig;
use weights::LoadFormat;

const BLOCK_SIZE: usize = 16;
const CONTEXTS: [usize; 2] = [1024, 8192];
const SLOTS: [usize; 4] = [1, 4, 16, 64];
const N_WARM: usize = 10;
const N_STEPS: usize = 60;
/// Positions that a run can reach.
const MARGIN: usize = (N_WARM + N_STEPS + 2) * 4;

/// One way of running steps.
#[derive(Clone, Copy)]
struct Way {
    drafts: usize,
    shares: bool,
    graphs: bool,
    /// Whether a step is launched before the one before is collected.
    is_deferred: bool,
}

fn main() -> Result<()> {
    let dir = PathBuf::from(std::env::args().nth(1).context("give the folder of a config")?);
    let gpu = Gpu::open(&DeviceChoice::Cuda(0))?.context("there is no GPU")?;
    let config = ModelConfig::load(&dir)?;
    let is_sparse = config.dsa.is_some();
    println!("{}, {}: median ms a step (5th to 95th percentile)", gpu.info().name, dir.display());
    let way = |drafts, shares, graphs, is_deferred| Way { drafts, shares, graphs, is_deferred };
    let ways = [
        ("k = 0, graph, deferred", way(0, false, true, true)),
        ("k = 3, graph, deferred", way(3, true, true, true)),
        ("k = 3, graph, immediate", way(3, true, true, false)),
        ("k = 3, launch by launch", way(3, true, false, true)),
        ("k = 3, graph, not shared", way(3, false, true, true)),
    ];
    for (name, way) in ways {
        if name.ends_with("not shared") && !is_sparse {
            continue;
        }
        let mut model = load(&gpu, &dir, &config, way)?;
        for n_slots in SLOTS {
            for context in CONTEXTS {
                let mut times = run(&mut model, way, n_slots, context)?;
                times.sort_by(f64::total_cmp);
                let at = |share: f64| times[(share * (times.len() - 1) as f64) as usize];
                let (low, median, high) = (at(0.05), at(0.5), at(0.95));
                println!(
                    "{name:26} {n_slots:3} slots, context {context:5}: {median:7.3} ({low:.3} to \
                     {high:.3})"
                );
            }
        }
    }
    Ok(())
}

fn load(
    gpu: &Gpu,
    dir: &std::path::Path,
    config: &ModelConfig,
    way: Way,
) -> Result<GpuModel<bf16>> {
    let target = (tch::Device::Cpu, tch::Kind::BFloat16);
    let with_mtp = way.drafts > 0;
    let tensors = weights::load(dir, config, LoadFormat::Dummy, with_mtp, target)?;
    let most = SLOTS[SLOTS.len() - 1];
    let longest = CONTEXTS[CONTEXTS.len() - 1] + MARGIN;
    let limits = PassLimits {
        max_rows: most * (way.drafts + 1),
        max_seqs: most,
        max_len: longest,
        max_window: way.drafts + 1,
        block_size: BLOCK_SIZE,
        num_blocks: 0,
    };
    let mut model = GpuModel::load(gpu, config.clone(), tensors, (with_mtp, limits))?;
    model.allocate_caches(most * longest.div_ceil(BLOCK_SIZE))?;
    model.prepare_decode(DecodeOptions {
        num_speculative_tokens: way.drafts,
        index_share: way.shares,
        sizes: SLOTS.to_vec(),
        graphs: if way.graphs { StepGraphs::Whole } else { StepGraphs::None },
        is_forced: true,
    })?;
    Ok(model)
}

/// Milliseconds between the ends of steps.
fn run(model: &mut GpuModel<bf16>, way: Way, n_slots: usize, context: usize) -> Result<Vec<f64>> {
    let n_blocks = (context + MARGIN).div_ceil(BLOCK_SIZE);
    let tables: Vec<Vec<i32>> = (0..n_slots)
        .map(|slot| (0..n_blocks).map(|block| (slot * n_blocks + block) as i32).collect())
        .collect();
    let updates: Vec<TableUpdate<'_>> =
        (0..).zip(&tables).map(|(table, blocks)| TableUpdate { table, blocks }).collect();
    let drafts = vec![7; way.drafts];
    let record = |slot: usize, is_first: bool| SlotRecord {
        source: (!is_first).then_some(slot as u32),
        table: slot as u32,
        valid_len: context as u32,
        last_token: 5 + slot as u32,
        n_drafts: way.drafts as u32,
        n_wanted: way.drafts as u32,
        forced: way.drafts.min(2) as u32,
        drafts: if is_first { &drafts } else { &[] },
    };
    let records = |is_first| (0..n_slots).map(|slot| record(slot, is_first)).collect::<Vec<_>>();
    let (first, others) = (records(true), records(false));
    let mut ends = vec![];
    model.launch_step(&updates, &first)?;
    for _ in 0..N_WARM + N_STEPS {
        if way.is_deferred {
            model.launch_step(&[], &others)?;
        }
        model.collect_step(n_slots, &mut |_, result| {
            assert_eq!(result.tokens.len(), way.drafts.min(2) + 1, "a slot failed");
        })?;
        ends.push(Instant::now());
        if !way.is_deferred {
            model.launch_step(&[], &others)?;
        }
    }
    model.collect_step(n_slots, &mut |_, _| {})?;
    let times = ends[N_WARM..].windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64() * 1e3);
    Ok(times.collect())
}

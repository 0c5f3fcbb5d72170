//! How long passes over prompts take, without a server:
//! `prompt_time CONFIG_FOLDER [SEQUENCES ROWS START]`, all shapes below or one.
//!
//! Dummy weights in bfloat16. A pass is the target over all rows and, where the model has one, its
//! MTP layer up to the KV of them.

#![expect(clippy::print_stdout, reason = "a program that prints its outcome")]

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use batch_layout::{BatchLayout, SeqSpec};
use gpu_model::{DraftPass, GpuModel, HiddenRows, PassLimits};
use gpu_runtime::{DeviceChoice, Gpu};
use half::bf16;
use model_config::ModelConfig;
use weights::LoadFormat;

const BLOCK_SIZE: usize = 16;
const ROWS_MAX: usize = 8192;
const LONGEST: usize = 16_384;
const SEQS_MAX: usize = 64;
const N_WARM: usize = 2;
const N_TIMED: usize = 7;

/// Sequences, rows of each, and tokens before them.
const SHAPES: [(usize, usize, usize); 12] = [
    (1, 2048, 0),
    (1, 2048, 2048),
    (1, 2048, 4096),
    (1, 2048, 6144),
    (1, 2048, 8192),
    (2, 1024, 0),
    (64, 32, 0),
    (1, 8192, 0),
    (1, 8192, 8192),
    (8, 1024, 0),
    (1, 1024, 0),
    (1, 256, 8192),
];

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let dir = PathBuf::from(args.next().context("give the folder of a config")?);
    let shape = args.map(|arg| arg.parse()).collect::<Result<Vec<usize>, _>>()?;
    let shapes = match shape[..] {
        [] => SHAPES.to_vec(),
        [n_seqs, n_rows, start] => vec![(n_seqs, n_rows, start)],
        _ => bail!("give sequences, rows of each and tokens before them, or nothing"),
    };
    let gpu = Gpu::open(&DeviceChoice::Cuda(0))?.context("there is no GPU")?;
    let config = ModelConfig::load(&dir)?;
    println!("{}, {}: median ms (least to most)", gpu.info().name, dir.display());
    let mut model = load(&gpu, &dir, &config)?;
    println!(
        "{:24} {:>24} {:>9} {:>9} {:>9} {:>10}",
        "sequences x rows @ start", "target alone", "with MTP", "in a row", "queueing", "tokens/s"
    );
    for (n_seqs, n_rows, start) in shapes {
        let prompt = Prompt::new(n_seqs, n_rows, start);
        let mut target = repeat(N_TIMED, || prompt.run(&mut model, false))?;
        let mut both = repeat(N_TIMED, || prompt.run(&mut model, true))?;
        let (queueing, in_a_row) = prompt.run_in_a_row(&mut model)?;
        let median = middle(&mut target);
        let spread = format!("{median:.3} ({:.3} to {:.3})", target[0], target[target.len() - 1]);
        println!(
            "{:24} {spread:>24} {:9.3} {in_a_row:9.3} {:9.3} {:10.0}",
            format!("{n_seqs:2} x {n_rows:4} @ {start:5}"),
            middle(&mut both),
            queueing,
            1e3 * (n_seqs * n_rows) as f64 / in_a_row,
        );
    }
    Ok(())
}

fn load(gpu: &Gpu, dir: &Path, config: &ModelConfig) -> Result<GpuModel<bf16>> {
    let target = (tch::Device::Cpu, tch::Kind::BFloat16);
    let with_mtp = config.num_mtp_layers > 0;
    let tensors = weights::load(dir, config, LoadFormat::Dummy, with_mtp, target)?;
    let limits = PassLimits {
        max_rows: ROWS_MAX,
        max_seqs: SEQS_MAX,
        max_len: LONGEST,
        max_window: 4,
        block_size: BLOCK_SIZE,
        num_blocks: 0,
    };
    let mut model = GpuModel::load(gpu, config.clone(), tensors, (with_mtp, limits))?;
    model.allocate_caches(LONGEST / BLOCK_SIZE)?;
    Ok(model)
}

/// A chunk of each of some sequences.
struct Prompt {
    ids: Vec<i32>,
    rows: Vec<i32>,
    layout: BatchLayout,
}

impl Prompt {
    fn new(n_seqs: usize, n_rows: usize, start: usize) -> Self {
        let mut layout = BatchLayout::new(BLOCK_SIZE as u32);
        let n_blocks = (start + n_rows).div_ceil(BLOCK_SIZE);
        for seq in 0..n_seqs {
            let blocks: Vec<u32> = (0..n_blocks).map(|idx| (seq * n_blocks + idx) as u32).collect();
            let spec = SeqSpec { n_computed: start as u32, n_query: n_rows as u32 };
            layout.push(spec, &blocks);
        }
        layout.finish();
        let rows: Vec<i32> = (0..(n_seqs * n_rows) as i32).collect();
        // Tokens that repeat late, so that experts differ from row to row.
        let ids = rows.iter().map(|row| 3 + row * 7919 % 30_000).collect();
        Self { ids, rows, layout }
    }

    fn queue(&self, model: &mut GpuModel<bf16>, with_mtp: bool) -> Result<()> {
        model.forward(&self.ids, &self.layout)?;
        if with_mtp && model.num_mtp_layers() > 0 {
            model.draft(DraftPass {
                layer: 0,
                ids: &self.ids,
                hidden: HiddenRows { of_draft: false, rows: &self.rows },
                layout: &self.layout,
                output: Some((&[], &BatchLayout::new(BLOCK_SIZE as u32))),
                selection: None,
            })?;
        }
        Ok(())
    }

    /// Milliseconds of a pass.
    fn run(&self, model: &mut GpuModel<bf16>, with_mtp: bool) -> Result<f64> {
        let start = Instant::now();
        self.queue(model, with_mtp)?;
        model.synchronize()?;
        Ok(ms_since(start))
    }

    /// What the host takes to queue a pass, and a pass's share of the time of several that are
    /// queued behind each other.
    fn run_in_a_row(&self, model: &mut GpuModel<bf16>) -> Result<(f64, f64)> {
        let start = Instant::now();
        self.queue(model, true)?;
        // Later ones may wait for room in the queue.
        let queueing = ms_since(start);
        for _ in 1..N_TIMED {
            self.queue(model, true)?;
        }
        model.synchronize()?;
        Ok((queueing, ms_since(start) / N_TIMED as f64))
    }
}

/// What `n` calls say behind some whose answers do not count.
fn repeat(n: usize, mut run: impl FnMut() -> Result<f64>) -> Result<Vec<f64>> {
    for _ in 0..N_WARM {
        run()?;
    }
    (0..n).map(|_| run()).collect()
}

fn ms_since(start: Instant) -> f64 {
    start.elapsed().as_secs_f64() * 1e3
}

/// The median of values, which are sorted.
fn middle(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

//! Times attention, the indexer and greedy sampling at the sizes of the `lite` configurations, each
//! beside its floor: the bytes that must be read at 4.3 TB/s, or the operations at 790 TFLOP/s.
//!
//! `time_attention [DEVICE]`, `cuda` by default. A launch is one of a graph that walks through
//! caches larger than the L2 cache; a time is the median of 9 replays.
#![expect(clippy::print_stdout, reason = "its result goes to standard output")]

use anyhow::{Context, Result};
use gpu_kernels::{
    IndexBatch, IndexSizes, Indexer, KeyGroup, Mla, MlaBatch, MlaSizes, PagedRows, PromptAttention,
    PromptBatch, PromptSizes, Sampling, SelectedKeys, SelectionMut, Splits,
};
use gpu_runtime::{Buffer, Gpu, GpuError, Pod, Stream, elapsed_ms};
use half::bf16;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

const MLA: MlaSizes = MlaSizes { n_heads: 16, kv_lora_rank: 512, rope_dim: 64, scale: 0.0625 };
const INDEX: IndexSizes = IndexSizes { n_heads: 32, head_dim: 128, topk: 2048 };
const VOCAB: usize = 32_768;
const BLOCK_SIZE: usize = 64;
/// The most rows of a sequence that are no chunk of a prompt.
const WINDOW: usize = 4;
const BYTES_PER_S: f64 = 4.3e12;
const FLOP_PER_S: f64 = 790e12;
/// Caches are walked through until this much was read.
const L2_BYTES: usize = 160 << 20;

/// A pass of `n_seqs` windows of `width` rows at the end of `context` tokens.
#[derive(Clone, Copy)]
struct Pass {
    n_seqs: usize,
    width: usize,
    context: usize,
    /// What grids are made for.
    longest: usize,
}

impl Pass {
    fn n_rows(self) -> usize {
        self.n_seqs * self.width
    }
    fn n_slots(self) -> usize {
        self.n_seqs * self.context
    }
    /// Copies of a cache of rows of `width` values that a graph walks through.
    fn n_copies(self, width: usize) -> usize {
        L2_BYTES.div_ceil(self.n_slots() * width * 2).clamp(1, 64)
    }
}

struct Arrays {
    row_pos: Buffer<i32>,
    row_seq: Buffer<i32>,
    row_start: Buffer<i32>,
    kv_len: Buffer<i32>,
    tables: Buffer<i32>,
}

impl Arrays {
    fn new(stream: &Stream, pass: Pass) -> Result<Self> {
        let Pass { n_seqs, width, context, .. } = pass;
        let n_rows = pass.n_rows();
        let pos = |row| (context - width + row % width) as i32;
        let n_blocks = pass.n_slots() / BLOCK_SIZE;
        // A stride through all blocks, so that neighbours lie apart.
        let block = |at| (at * 7919 % n_blocks) as i32;
        Ok(Self {
            row_pos: upload(stream, (0..n_rows).map(pos))?,
            row_seq: upload(stream, (0..n_rows).map(|row| (row / width) as i32))?,
            row_start: upload(stream, (0..=n_seqs).map(|seq| (seq * width) as i32))?,
            kv_len: upload(stream, (0..n_seqs).map(|_| context as i32))?,
            tables: upload(stream, (0..n_blocks).map(block))?,
        })
    }

    fn rows(&self) -> PagedRows<'_> {
        PagedRows {
            row_pos: self.row_pos.view(),
            row_seq: self.row_seq.view(),
            row_start: self.row_start.view(),
            kv_len: self.kv_len.view(),
            block_tables: self.tables.view(),
            block_size: BLOCK_SIZE,
        }
    }
}

fn main() -> Result<()> {
    let choice = std::env::args().nth(1).unwrap_or_else(|| "cuda".into());
    let gpu = Gpu::open(&choice.parse()?)?.context("no GPU")?;
    let stream = gpu.stream()?;
    println!("{}: medians in us, floor in us, ratio", gpu.info().name);
    for (n_seqs, width) in [(1, 1), (1, 4), (16, 1), (16, 4), (64, 1), (64, 4), (1, 2048)] {
        for context in [1024, 8192].into_iter().filter(|&context| context > width) {
            let pass = Pass { n_seqs, width, context, longest: context };
            let all_keys: &[usize] = if width > WINDOW { &[256] } else { &[128, 256, 512, 1024] };
            for &keys in all_keys {
                time_mla(&stream, pass, keys, false)?;
            }
            if width <= WINDOW {
                // As in a graph, which is made for longer sequences.
                time_mla(&stream, Pass { longest: 12_288, ..pass }, 256, false)?;
            }
            if width > WINDOW {
                time_prompt(&stream, pass)?;
            }
            if context > INDEX.topk {
                for &keys in all_keys {
                    time_mla(&stream, pass, keys, true)?;
                }
                time_indexer(&stream, pass)?;
            }
            if width <= WINDOW {
                time_argmax(&stream, pass)?;
            }
        }
    }
    Ok(())
}

fn time_mla(stream: &Stream, pass: Pass, keys: usize, is_selected: bool) -> Result<()> {
    let gpu = stream.gpu();
    let mla = Mla::<bf16>::new(gpu, MLA, Splits { window: WINDOW, keys, most: 32 })?;
    let (n_rows, width) = (pass.n_rows(), MLA.kv_lora_rank + MLA.rope_dim);
    let arrays = Arrays::new(stream, pass)?;
    let n_copies = pass.n_copies(width);
    let cache = random(stream, n_copies * pass.n_slots() * width)?;
    let q_latent = random(stream, n_rows * MLA.n_heads * MLA.kv_lora_rank)?;
    let q_pe = random(stream, n_rows * MLA.n_heads * MLA.rope_dim)?;
    let mut out = gpu.alloc::<bf16>(q_latent.len())?;
    let mut scratch = gpu.alloc::<f32>(mla.scratch_len(pass.n_seqs, pass.longest))?;
    // What a row sees on average.
    let n_keys = if is_selected { INDEX.topk } else { pass.context - (pass.width - 1) / 2 };
    // Every fourth key, moved on by the row.
    let chosen = (0..n_rows).flat_map(|row| (0..INDEX.topk).map(move |i| (4 * i + row % 4) as i32));
    let indices = upload(stream, chosen)?;
    let counts = upload(stream, (0..n_rows).map(|_| INDEX.topk as i32))?;
    let us = time(stream, n_copies, |stream, copy| {
        let batch = MlaBatch {
            q_latent: q_latent.view(),
            q_pe: q_pe.view(),
            cache: cache.slice(copy * pass.n_slots() * width..(copy + 1) * pass.n_slots() * width),
            rows: arrays.rows(),
            selection: is_selected
                .then(|| SelectedKeys { indices: indices.view(), counts: counts.view() }),
            skipped: None,
            max_kv_len: pass.longest,
            max_split_len: if pass.width <= WINDOW { pass.longest } else { 0 },
            rows_per_seq: pass.width,
        };
        mla.attend(stream, &batch, scratch.view_mut(), out.view_mut())
    })?;
    let n_reads = if is_selected { n_rows * n_keys } else { pass.n_slots() };
    let n_bytes = 2 * (n_reads * width + 2 * q_latent.len());
    let n_flop = 2 * n_rows * MLA.n_heads * n_keys * (width + MLA.kv_lora_rank);
    let name = if is_selected { "mla selected" } else { "mla" };
    let grid = if pass.longest > pass.context { ", long grid" } else { "" };
    report(&format!("{name}, split {keys}{grid}"), pass, us, (n_bytes, n_flop));
    Ok(())
}

/// Attention of the chunk over expanded keys, without their expansion.
fn time_prompt(stream: &Stream, pass: Pass) -> Result<()> {
    let sizes = PromptSizes { n_heads: 16, nope_dim: 128, rope_dim: 64, v_dim: 128, scale: 0.07 };
    let Some(attention) = PromptAttention::<bf16>::new(stream.gpu(), sizes)? else { return Ok(()) };
    let arrays = Arrays::new(stream, pass)?;
    let (n_rows, n_keys) = (pass.n_rows(), pass.context);
    let q = random(stream, n_rows * 16 * 192)?;
    let q_pe = random(stream, n_rows * 16 * 64)?;
    let expanded = random(stream, n_keys * 16 * 256)?;
    let k_pe = random(stream, n_keys * 576)?;
    let zero = upload(stream, [0].into_iter())?;
    let mut out = stream.gpu().alloc::<bf16>(n_rows * 16 * 128)?;
    let us = time(stream, 1, |stream, _| {
        let batch = PromptBatch {
            q: q.view(),
            q_stride: 16 * 192,
            q_pe: q_pe.view(),
            expanded: expanded.view(),
            k_pe: k_pe.view(),
            k_pe_stride: 576,
            group: KeyGroup { group_of: zero.view(), group: 0, first_key: zero.view() },
            rows: arrays.rows(),
        };
        attention.attend(stream, &batch, out.view_mut())
    })?;
    let n_bytes = 2 * (q.len() + q_pe.len() + expanded.len() + n_keys * 64 + out.len());
    let n_flop = 2 * n_rows * 16 * (pass.context - (pass.width - 1) / 2) * (192 + 128);
    report("expanded keys", pass, us, (n_bytes, n_flop));
    Ok(())
}

fn time_indexer(stream: &Stream, pass: Pass) -> Result<()> {
    let gpu = stream.gpu();
    let indexer = Indexer::<bf16>::new(gpu, INDEX)?;
    let (n_rows, width) = (pass.n_rows(), INDEX.head_dim);
    let arrays = Arrays::new(stream, pass)?;
    let n_copies = pass.n_copies(width);
    let cache = random(stream, n_copies * pass.n_slots() * width)?;
    let q = random(stream, n_rows * INDEX.n_heads * width)?;
    let mut rng = ChaCha8Rng::seed_from_u64(6);
    let weights = (0..n_rows * INDEX.n_heads).map(|_| rng.random::<f32>());
    let weights = upload(stream, weights)?;
    let mut scratch = gpu.alloc::<f32>(Indexer::<bf16>::scratch_len(n_rows, pass.context))?;
    let mut indices = gpu.alloc::<i32>(n_rows * INDEX.topk)?;
    let mut counts = gpu.alloc::<i32>(n_rows)?;
    let us = time(stream, n_copies, |stream, copy| {
        let batch = IndexBatch {
            q: q.view(),
            weights: weights.view(),
            cache: cache.slice(copy * pass.n_slots() * width..(copy + 1) * pass.n_slots() * width),
            rows: arrays.rows(),
            max_kv_len: pass.context,
        };
        let out = SelectionMut { indices: indices.view_mut(), counts: counts.view_mut() };
        indexer.select(stream, &batch, scratch.view_mut(), out)
    })?;
    let n_bytes = 2 * (pass.n_slots() * width + q.len()) + 4 * n_rows * INDEX.topk;
    let n_flop = 2 * n_rows * INDEX.n_heads * width * pass.context;
    report("indexer and top-k", pass, us, (n_bytes, n_flop));
    Ok(())
}

fn time_argmax(stream: &Stream, pass: Pass) -> Result<()> {
    let gpu = stream.gpu();
    let (sampling, n_rows) = (Sampling::new::<bf16>(gpu)?, pass.n_rows());
    let logits = random(stream, n_rows * VOCAB)?;
    let mut ids = gpu.alloc::<i32>(n_rows)?;
    let mut scratch = gpu.alloc::<u64>(Sampling::scratch_len(n_rows, VOCAB))?;
    let us = time(stream, 8, |stream, _| {
        sampling.argmax(stream, logits.view(), None, scratch.view_mut(), ids.view_mut())
    })?;
    report("argmax of bf16", pass, us, (2 * logits.len(), 0));
    Ok(())
}

/// Microseconds of a launch: the median of 9 replays of a graph of `n_launches`.
fn time(
    stream: &Stream,
    n_launches: usize,
    mut launch: impl FnMut(&Stream, usize) -> Result<(), GpuError>,
) -> Result<f64> {
    let n_rounds = 8usize.div_ceil(n_launches);
    let graph = stream.capture(|stream| {
        (0..n_launches * n_rounds).try_for_each(|at| launch(stream, at % n_launches))
    })?;
    let (start, end) = (stream.gpu().event()?, stream.gpu().event()?);
    stream.replay(&graph)?;
    let mut times = Vec::new();
    for _ in 0..9 {
        stream.record(&start)?;
        stream.replay(&graph)?;
        stream.record(&end)?;
        let us = f64::from(elapsed_ms(&start, &end)?) * 1e3;
        times.push(us / (n_launches * n_rounds) as f64);
    }
    times.sort_by(f64::total_cmp);
    Ok(times[4])
}

fn report(name: &str, pass: Pass, us: f64, (n_bytes, n_flop): (usize, usize)) {
    let Pass { n_seqs, width, context, .. } = pass;
    let floor = 1e6 * (n_bytes as f64 / BYTES_PER_S).max(n_flop as f64 / FLOP_PER_S);
    println!(
        "B {n_seqs:2} W {width} context {context:4}  {name:26} {us:8.1} {floor:8.1} {:6.1}",
        us / floor
    );
}

fn upload<T: Pod>(stream: &Stream, values: impl Iterator<Item = T>) -> Result<Buffer<T>> {
    let values: Vec<T> = values.collect();
    let mut buffer = stream.gpu().alloc(values.len())?;
    stream.upload(&values, &mut buffer)?;
    Ok(buffer)
}

/// `n` random numbers in `-1..1`, the same pattern again and again.
fn random(stream: &Stream, n: usize) -> Result<Buffer<bf16>> {
    let mut rng = ChaCha8Rng::seed_from_u64(5);
    let number = |_| bf16::from_f32(rng.random_range(-1.0f32..1.0));
    let pattern = upload(stream, (0..n.min(1 << 22)).map(number))?;
    let mut buffer = stream.gpu().alloc(n)?;
    for begin in (0..n).step_by(1 << 22) {
        let end = n.min(begin + (1 << 22));
        stream.copy(pattern.slice(..end - begin), buffer.slice_mut(begin..end))?;
    }
    stream.synchronize()?;
    Ok(buffer)
}

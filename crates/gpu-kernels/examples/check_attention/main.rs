//! Checks attention, indexer, sampling and step state on the GPU against plain definitions: ragged
//! random batches, caches that are NaN where nothing valid is, poisoned outputs.
//!
//! `check_attention [DEVICE [quick]]`, `cuda` by default; `quick` leaves out large sizes and long
//! prompts. Ends with an error at the first fault.

#![expect(clippy::print_stdout, reason = "its result goes to standard output")]

mod batch;
mod index;
mod mla;
mod prompt;
mod sample;
mod steps;

use anyhow::{Context, Result};
use gpu_kernels::{IndexSizes, MlaSizes};
use gpu_runtime::{Gpu, Stream};
use half::bf16;

use batch::Elem;

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let (choice, is_quick) = (args.next().unwrap_or_else(|| "cuda".into()), args.next().is_some());
    let gpu = Gpu::open(&choice.parse()?)?.context("no GPU")?;
    println!("{} ({})", gpu.info().name, gpu.info().arch);
    let stream = gpu.stream()?;
    check::<bf16>(&stream, is_quick)?;
    check::<f32>(&stream, is_quick)?;
    println!("everything holds");
    Ok(())
}

fn check<E: Elem>(stream: &Stream, is_quick: bool) -> Result<()> {
    sample::check::<E>(stream)?;
    steps::check::<E>(stream)?;
    prompt::check::<E>(stream)?;
    let index_sizes = [
        IndexSizes { n_heads: 4, head_dim: 32, topk: 64 },
        IndexSizes { n_heads: 32, head_dim: 128, topk: 2048 },
        IndexSizes { n_heads: 64, head_dim: 128, topk: 512 },
    ];
    let mla_sizes = [(4, 64, 16, 64), (16, 512, 64, 2048), (128, 512, 64, 300)];
    for sizes in &index_sizes[..if is_quick { 1 } else { 3 }] {
        index::check::<E>(stream, *sizes)?;
    }
    for &(n_heads, kv_lora_rank, rope_dim, topk) in &mla_sizes[..if is_quick { 2 } else { 3 }] {
        let scale = 1.0 / ((kv_lora_rank + rope_dim) as f32).sqrt();
        let sizes = MlaSizes { n_heads, kv_lora_rank, rope_dim, scale };
        mla::check::<E>(stream, sizes, topk, is_quick)?;
    }
    Ok(())
}

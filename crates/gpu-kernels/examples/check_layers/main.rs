//! Checks every layer kernel on the GPU against plain references: random ragged batches, poisoned
//! outputs, padding rows, two runs and rows alone bit for bit. Exits with an error on a fault.

#![expect(clippy::print_stdout, reason = "a program that prints its outcome")]

#[path = "../layers/mod.rs"]
mod layers;
mod moe;
mod report;
mod router;
mod rows;

use anyhow::Result;
use half::bf16;
use layers::{DSV3_LITE, Device, GLM52_LITE, Sizes};
use report::{Checked, Report};

/// Rows of a batch, without its padding.
const ROW_COUNTS: [usize; 7] = [1, 2, 7, 16, 64, 257, 2048];

const TINY_GLM52: Sizes = Sizes {
    name: "tiny-glm52",
    hidden: 256,
    vocab: 4096,
    q_lora_rank: Some(128),
    kv_lora_rank: 64,
    rope_dim: 16,
    nope_dim: 32,
    n_heads: 4,
    indexer: (4, 32),
    n_experts: 16,
    top_k: 4,
    groups: (1, 1),
    inner: 64,
    shared_inner: 64,
};
const TINY_DSV3: Sizes = Sizes { name: "tiny-dsv3", groups: (4, 2), ..TINY_GLM52 };
fn main() -> Result<()> {
    let mut report = Report::default();
    check::<f32>(&mut report)?;
    check::<bf16>(&mut report)?;
    report.finish()
}

fn check<E: Checked>(report: &mut Report) -> Result<()> {
    let device = Device::<E>::open()?;
    for sizes in [TINY_GLM52, TINY_DSV3, GLM52_LITE, DSV3_LITE] {
        report.begin(format!("{} {}", E::NAME, sizes.name), E::NAME);
        rows::check(report, &device, &sizes)?;
        rows::check_caches(report, &device, &sizes)?;
        router::check(report, &device, &sizes)?;
        moe::check(report, &device, &sizes)?;
    }
    Ok(())
}

//! The experts: grouping, products, and their sum, alone and with the norm behind it.

use anyhow::Result;
use gpu_kernels::{ExpertSum, Experts, MoeScratch, Norm, Routing};
use gpu_runtime::Buffer;
use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

use crate::layers::{Device, Sizes, noise};
use crate::report::{Batch, Case, Checked, Output, Report, row_noise, row_values, values};

const EPS: f32 = 1e-5;

/// How often experts are chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Spread {
    /// Some far more often than others.
    Skewed,
    /// The last one by every row, the first one by none.
    Extreme,
}

/// The experts of a row, none twice.
fn choice(row: usize, sizes: &Sizes, spread: Spread) -> (Vec<i32>, Vec<f32>) {
    let mut rng = ChaCha8Rng::seed_from_u64(30 << 32 | row as u64);
    let is_extreme = spread == Spread::Extreme;
    let mut ids: Vec<i32> = Vec::new();
    if is_extreme {
        ids.push(sizes.n_experts as i32 - 1);
    }
    while ids.len() < sizes.top_k {
        let id = (rng.random::<f32>().powi(2) * sizes.n_experts as f32) as i32;
        if is_extreme && id == 0 {
            continue;
        }
        if !ids.contains(&id) {
            ids.push(id);
        }
    }
    (ids, noise(31 << 32 | row as u64, sizes.top_k, 1.0))
}

struct HostExperts<E> {
    sizes: Sizes,
    spread: Spread,
    gate_up: Vec<E>,
    down: Vec<E>,
    norm: Vec<f32>,
}

impl<E: Checked> HostExperts<E> {
    fn new(sizes: &Sizes, spread: Spread) -> Self {
        let Sizes { hidden, inner, n_experts, .. } = *sizes;
        let scale = |n: usize| (n as f32).powf(-0.5);
        Self {
            sizes: *sizes,
            spread,
            gate_up: noise(32, n_experts * 2 * inner * hidden, 2.0 * scale(hidden)),
            down: noise(33, n_experts * inner * hidden, 2.0 * scale(inner)),
            norm: noise(34, hidden, 1.0),
        }
    }

    /// One expert's output, rounded where the kernels round.
    fn expert(&self, id: usize, x: &[f64]) -> Vec<f64> {
        let Sizes { hidden, inner, .. } = self.sizes;
        let dot = |w: &[E], x: &[f64]| w.iter().zip(x).map(|(w, x)| f64::from(w.value()) * x).sum();
        let rounded = |x: f64| f64::from(E::of(x as f32).value());
        let gate_up = &self.gate_up[id * 2 * inner * hidden..][..2 * inner * hidden];
        let both: Vec<f64> = gate_up.chunks_exact(hidden).map(|w| dot(w, x)).collect();
        let silu = |gate: f64| gate / (1.0 + (-gate).exp());
        let act: Vec<f64> = (0..inner).map(|i| rounded(silu(both[i]) * both[inner + i])).collect();
        let down = &self.down[id * inner * hidden..][..inner * hidden];
        down.chunks_exact(inner).map(|w| rounded(dot(w, &act))).collect()
    }

    fn reference(&self, row: usize) -> Vec<Vec<f64>> {
        let hidden = self.sizes.hidden;
        let (ids, weights) = choice(row, &self.sizes, self.spread);
        let x = row_values::<E>(35, row, hidden);
        let mut sum = row_values::<E>(36, row, hidden);
        for (&id, &weight) in ids.iter().zip(&weights) {
            let output = self.expert(id as usize, &x);
            for (sum, value) in sum.iter_mut().zip(output) {
                *sum += f64::from(weight) * value;
            }
        }
        let old = values(&row_noise::<f32>(37, row, hidden));
        let residual: Vec<f64> = old.iter().zip(&sum).map(|(old, sum)| old + sum).collect();
        let mean = residual.iter().map(|x| x * x).sum::<f64>() / hidden as f64;
        let scale = 1.0 / (mean + f64::from(EPS)).sqrt();
        let normed = residual.iter().zip(&self.norm).map(|(x, &w)| x * scale * f64::from(w));
        vec![sum, normed.collect(), residual]
    }
}

pub(crate) fn check<E: Checked>(
    report: &mut Report,
    device: &Device<E>,
    sizes: &Sizes,
) -> Result<()> {
    check_one(report, device, &HostExperts::new(sizes, Spread::Skewed), "moe")?;
    // Widths that end inside of every tile.
    let odd = Sizes { hidden: sizes.hidden / 4 + 8, inner: sizes.inner / 2 + 8, ..*sizes };
    check_one(report, device, &HostExperts::new(&odd, Spread::Extreme), "moe (extreme)")
}

fn check_one<E: Checked>(
    report: &mut Report,
    device: &Device<E>,
    host: &HostExperts<E>,
    name: &'static str,
) -> Result<()> {
    let weights = [device.upload(&host.gate_up)?, device.upload(&host.down)?];
    let norm = device.upload(&host.norm)?;
    report.check(
        device,
        &Case {
            name,
            run: &|batch| run(batch, host, &weights, &norm),
            reference: &|row| host.reference(row),
            // Two roundings in the middle fall otherwise where sums differ in their last bits.
            tolerance: 2.0 * E::ROUNDING + 4e-6,
        },
    )
}

fn run<E: Checked>(
    batch: &Batch<'_, E>,
    host: &HostExperts<E>,
    [gate_up, down]: &[Buffer<E>; 2],
    norm: &Buffer<f32>,
) -> Result<Vec<Output>> {
    let (sizes, spread) = (&host.sizes, host.spread);
    let Sizes { hidden, inner, n_experts, top_k, .. } = *sizes;
    let (device, n_rows, pass) = (batch.device, batch.rows.len(), batch.pass());
    // An id in a padding row, which nobody may follow.
    let ids = batch.input(top_k, 0, |row| choice(row, sizes, spread).0)?;
    let weights = batch.input(top_k, f32::NAN, |row| choice(row, sizes, spread).1)?;
    let (x, shared) = (batch.noise::<E>(35, hidden)?, batch.noise::<E>(36, hidden)?);
    let routing = Routing { top_k, ids: ids.view(), weights: weights.view() };
    let (gate_up, down) = (gate_up.view(), down.view());
    let experts = Experts { n_experts, hidden, inner, gate_up, down };
    let mut scratch = MoeScratch::new(&device.gpu, n_rows, top_k, &experts)?;
    device.kernels.moe_experts(pass, x.view(), routing, experts, &mut scratch)?;
    let sum = ExpertSum { routing, scratch: &scratch, shared: Some(shared.view()) };
    let mut out = batch.poisoned::<E>(n_rows * hidden)?;
    device.kernels.moe_combine(pass, &sum, out.view_mut())?;
    let mut normed = batch.poisoned::<E>(n_rows * hidden)?;
    let mut residual = batch.noise::<f32>(37, hidden)?;
    let norm = Norm { weight: norm.view(), eps: EPS };
    device.kernels.moe_combine_rms_norm(
        pass,
        &sum,
        residual.view_mut(),
        norm,
        normed.view_mut(),
    )?;
    [Output::new(batch, &out, n_rows), Output::new(batch, &normed, n_rows)]
        .into_iter()
        .chain([Output::new(batch, &residual, n_rows)])
        .collect()
}

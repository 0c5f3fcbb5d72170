//! Embedding, norms, rotary embedding, cache entries and the small operations.

use anyhow::Result;
use gpu_kernels::{Heads, IndexKeys, MlaLatents, MtpInput, Norm, RopeTable};
use gpu_runtime::Buffer;

use crate::layers::{Device, Sizes, noise};
use crate::report::{
    Batch, Case, Checked, N_POSITIONS, Output, Report, position, row_noise, row_values, values,
};

const EPS: f32 = 1e-5;

/// A norm on the device and its weight.
struct HostNorm {
    weight: Vec<f32>,
    buffer: Buffer<f32>,
}

impl HostNorm {
    fn new<E: Checked>(device: &Device<E>, seed: u64, n: usize) -> Result<Self> {
        let weight: Vec<f32> = noise(seed, n, 1.0);
        Ok(Self { buffer: device.upload(&weight)?, weight })
    }

    fn norm(&self) -> Norm<'_> {
        Norm { weight: self.buffer.view(), eps: EPS }
    }

    fn reference(&self, x: &[f64]) -> Vec<f64> {
        let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
        let scale = 1.0 / (mean + f64::from(EPS)).sqrt();
        x.iter().zip(&self.weight).map(|(x, &w)| x * scale * f64::from(w)).collect()
    }
}

fn one_rounding<E: Checked>() -> f64 {
    E::ROUNDING + 2e-6
}

fn sum(a: &[f64], b: &[f64]) -> Vec<f64> {
    a.iter().zip(b).map(|(a, b)| f64::from(*a as f32 + *b as f32)).collect()
}

fn token(row: usize, vocab: usize) -> usize {
    row * 7919 % vocab
}

fn ids<E: Checked>(batch: &Batch<'_, E>, vocab: usize) -> Result<Buffer<i32>> {
    batch.input(1, -1, |row| vec![token(row, vocab) as i32])
}

pub(crate) fn check<E: Checked>(
    report: &mut Report,
    device: &Device<E>,
    sizes: &Sizes,
) -> Result<()> {
    check_embeddings(report, device, sizes)?;
    check_norms(report, device, sizes.hidden)?;
    check_small(report, device, sizes.inner)
}

fn check_embeddings<E: Checked>(
    report: &mut Report,
    device: &Device<E>,
    sizes: &Sizes,
) -> Result<()> {
    let (n, vocab) = (sizes.hidden, sizes.vocab);
    let kernels = &device.kernels;
    let (norm, hnorm) = (HostNorm::new(device, 1, n)?, HostNorm::new(device, 2, n)?);
    let host_table: Vec<E> = noise(3, vocab * n, 1.0);
    let table = device.upload(&host_table)?;
    let embedding = |row| values(&host_table[token(row, vocab) * n..][..n]);
    let out_of = |batch: &Batch<'_, E>, out: &Buffer<E>| Output::new(batch, out, batch.rows.len());
    let f32_of =
        |batch: &Batch<'_, E>, out: &Buffer<f32>| Output::new(batch, out, batch.rows.len());
    report.check(
        device,
        &Case {
            name: "embed",
            run: &|batch| {
                let mut out = batch.poisoned::<f32>(batch.rows.len() * n)?;
                let ids = ids(batch, vocab)?;
                kernels.embed(batch.pass(), ids.view(), table.view(), n, out.view_mut())?;
                Ok(vec![f32_of(batch, &out)?])
            },
            reference: &|row| vec![embedding(row)],
            tolerance: 0.0,
        },
    )?;
    report.check(
        device,
        &Case {
            name: "mtp_input",
            run: &|batch| {
                let mut out = batch.poisoned::<E>(batch.rows.len() * 2 * n)?;
                let (hidden, ids) = (batch.noise::<E>(6, n)?, ids(batch, vocab)?);
                let input = MtpInput {
                    ids: ids.view(),
                    table: table.view(),
                    hidden: hidden.view(),
                    enorm: norm.norm(),
                    hnorm: hnorm.norm(),
                };
                kernels.mtp_input(batch.pass(), &input, out.view_mut())?;
                Ok(vec![out_of(batch, &out)?])
            },
            reference: &|row| {
                let hidden = hnorm.reference(&row_values::<E>(6, row, n));
                vec![[norm.reference(&embedding(row)), hidden].concat()]
            },
            tolerance: one_rounding::<E>(),
        },
    )
}

fn check_norms<E: Checked>(report: &mut Report, device: &Device<E>, n: usize) -> Result<()> {
    let (kernels, norm) = (&device.kernels, HostNorm::new(device, 1, n)?);
    let out_of = |batch: &Batch<'_, E>, out: &Buffer<E>| Output::new(batch, out, batch.rows.len());
    report.check(
        device,
        &Case {
            name: "rms_norm",
            run: &|batch| {
                let mut out = batch.poisoned::<E>(batch.rows.len() * n)?;
                let x = batch.noise::<f32>(4, n)?;
                kernels.rms_norm(batch.pass(), x.view(), norm.norm(), out.view_mut())?;
                Ok(vec![out_of(batch, &out)?])
            },
            reference: &|row| vec![norm.reference(&row_values::<f32>(4, row, n))],
            tolerance: one_rounding::<E>(),
        },
    )?;
    report.check(
        device,
        &Case {
            name: "add_rms_norm",
            run: &|batch| {
                let mut out = batch.poisoned::<E>(batch.rows.len() * n)?;
                let (x, mut sum) = (batch.noise::<E>(5, n)?, batch.noise::<f32>(4, n)?);
                let residual = sum.view_mut();
                let (x, norm) = (x.view(), norm.norm());
                kernels.add_rms_norm(batch.pass(), x, residual, norm, out.view_mut())?;
                Ok(vec![out_of(batch, &out)?, Output::new(batch, &sum, batch.rows.len())?])
            },
            reference: &|row| {
                let sum = sum(&row_values::<E>(5, row, n), &row_values::<f32>(4, row, n));
                vec![norm.reference(&sum), sum]
            },
            tolerance: one_rounding::<E>(),
        },
    )
}

/// The operations on one value.
fn check_small<E: Checked>(report: &mut Report, device: &Device<E>, n: usize) -> Result<()> {
    let kernels = &device.kernels;
    report.check(
        device,
        &Case {
            name: "silu_and_mul",
            run: &|batch| {
                let mut out = batch.poisoned::<E>(batch.rows.len() * n)?;
                let x = batch.noise::<E>(7, 2 * n)?;
                kernels.silu_and_mul(batch.pass(), x.view(), n, out.view_mut())?;
                Ok(vec![Output::new(batch, &out, batch.rows.len())?])
            },
            reference: &|row| {
                let x = row_values::<E>(7, row, 2 * n);
                let (gates, ups) = x.split_at(n);
                let pairs = gates.iter().zip(ups);
                vec![pairs.map(|(gate, up)| gate / (1.0 + (-gate).exp()) * up).collect()]
            },
            tolerance: one_rounding::<E>(),
        },
    )?;
    report.check(
        device,
        &Case {
            name: "add, cast, gather",
            run: &|batch| {
                let n_rows = batch.rows.len();
                let (x, mut sum) = (batch.noise::<E>(8, n)?, batch.noise::<f32>(9, n)?);
                let mut cast = batch.poisoned::<E>(n_rows * n)?;
                let mut gathered = batch.poisoned::<E>(n_rows * n)?;
                kernels.cast(batch.pass(), sum.view(), n, cast.view_mut())?;
                kernels.add(batch.pass(), x.view(), n, sum.view_mut())?;
                let from = |at: usize| batch.rows[at].map_or(-1, |_| at as i32);
                let rows = device.upload(&(0..n_rows).map(from).collect::<Vec<i32>>())?;
                kernels.gather_rows(rows.view(), x.view(), n, gathered.view_mut())?;
                let sum = Output::new(batch, &sum, n_rows)?;
                let (cast, gathered) =
                    (Output::new(batch, &cast, n_rows)?, Output::new(batch, &gathered, n_rows)?);
                Ok(vec![sum, cast, gathered])
            },
            reference: &|row| {
                let (x, old) = (row_values::<E>(8, row, n), row_noise::<f32>(9, row, n));
                let cast: Vec<E> = old.iter().map(|&x| E::of(x)).collect();
                vec![sum(&x, &values(&old)), values(&cast), x]
            },
            tolerance: 0.0,
        },
    )
}

/// Cosines and sines of `N_POSITIONS`.
struct HostTable {
    cos: Vec<f32>,
    sin: Vec<f32>,
    on_device: (Buffer<f32>, Buffer<f32>),
    rope_dim: usize,
    interleaved: bool,
}

impl HostTable {
    fn new<E: Checked>(device: &Device<E>, rope_dim: usize, interleaved: bool) -> Result<Self> {
        let angles: Vec<f32> = noise(10, N_POSITIONS * rope_dim / 2, 3.0);
        let cos: Vec<f32> = angles.iter().map(|angle| angle.cos()).collect();
        let sin: Vec<f32> = angles.iter().map(|angle| angle.sin()).collect();
        let on_device = (device.upload(&cos)?, device.upload(&sin)?);
        Ok(Self { cos, sin, on_device, rope_dim, interleaved })
    }

    fn table(&self) -> RopeTable<'_> {
        let (cos, sin) = (self.on_device.0.view(), self.on_device.1.view());
        RopeTable { cos, sin, rope_dim: self.rope_dim, interleaved: self.interleaved }
    }

    /// Rotates the beginning of a head of a row.
    fn rotate(&self, row: usize, head: &mut [f64]) {
        let half = self.rope_dim / 2;
        for i in 0..half {
            let (cos, sin) =
                (self.cos[position(row) * half + i], self.sin[position(row) * half + i]);
            let (cos, sin) = (f64::from(cos), f64::from(sin));
            let (first, second) = if self.interleaved { (2 * i, 2 * i + 1) } else { (i, i + half) };
            let (a, b) = (head[first], head[second]);
            (head[first], head[second]) = (a * cos - b * sin, b * cos + a * sin);
        }
    }
}

pub(crate) fn check_caches<E: Checked>(
    report: &mut Report,
    device: &Device<E>,
    sizes: &Sizes,
) -> Result<()> {
    for interleaved in [true, false] {
        let table = HostTable::new(device, sizes.rope_dim, interleaved)?;
        check_rope(report, device, &table, sizes.query_heads())?;
        check_rope(report, device, &table, sizes.index_heads())?;
        check_latent(report, device, &table, sizes)?;
        check_index_key(report, device, &table, sizes.indexer.1)?;
    }
    Ok(())
}

fn check_rope<E: Checked>(
    report: &mut Report,
    device: &Device<E>,
    table: &HostTable,
    heads: Heads,
) -> Result<()> {
    let (kernels, width) = (&device.kernels, heads.row_stride);
    let apart = Heads {
        start: 0,
        row_stride: heads.n_heads * table.rope_dim,
        head_stride: table.rope_dim,
        ..heads
    };
    report.check(
        device,
        &Case {
            name: "rope",
            run: &|batch| {
                let n_rows = batch.rows.len();
                let mut x = batch.noise::<E>(11, width)?;
                let mut out = batch.poisoned::<E>(n_rows * apart.row_stride)?;
                let (from, to) = ((x.view(), heads), (out.view_mut(), apart));
                kernels.rope(batch.pass(), table.table(), from, to)?;
                kernels.rope_in_place(batch.pass(), table.table(), x.view_mut(), heads)?;
                let (x, out) = (Output::new(batch, &x, n_rows)?, Output::new(batch, &out, n_rows)?);
                Ok(vec![x, out])
            },
            reference: &|row| {
                let mut x = row_values::<E>(11, row, width);
                let mut rotated = Vec::new();
                for head in x.chunks_exact_mut(heads.head_stride) {
                    table.rotate(row, &mut head[heads.start..]);
                    rotated.extend_from_slice(&head[heads.start..][..table.rope_dim]);
                }
                vec![x, rotated]
            },
            tolerance: one_rounding::<E>(),
        },
    )
}

fn check_latent<E: Checked>(
    report: &mut Report,
    device: &Device<E>,
    table: &HostTable,
    sizes: &Sizes,
) -> Result<()> {
    let (q_width, kv_rank) = (sizes.q_width(), sizes.kv_lora_rank);
    let entry = kv_rank + sizes.rope_dim;
    // Eight values of something else behind each row.
    let row_stride = q_width + entry + 8;
    let q_norm = HostNorm::new(device, 12, q_width)?;
    let kv_norm = HostNorm::new(device, 13, kv_rank)?;
    let has_q_norm = sizes.q_lora_rank.is_some();
    report.check(
        device,
        &Case {
            name: "mla_latent",
            run: &|batch| {
                let qkv = batch.noise::<E>(14, row_stride)?;
                let mut q_a = batch.poisoned::<E>(batch.rows.len() * q_width)?;
                let mut cache = batch.poisoned::<E>(batch.n_slots() * entry)?;
                let latents = MlaLatents {
                    qkv: qkv.view(),
                    row_stride,
                    q_width,
                    q_norm: has_q_norm.then(|| (q_norm.norm(), q_a.view_mut())),
                    kv_norm: kv_norm.norm(),
                };
                device.kernels.mla_latent(
                    batch.pass(),
                    table.table(),
                    latents,
                    cache.view_mut(),
                )?;
                Ok(vec![batch.of_slots(&cache)?, Output::new(batch, &q_a, batch.rows.len())?])
            },
            reference: &|row| {
                let qkv = row_values::<E>(14, row, row_stride);
                let mut key = qkv[q_width + kv_rank..][..sizes.rope_dim].to_vec();
                table.rotate(row, &mut key);
                let latent = kv_norm.reference(&qkv[q_width..][..kv_rank]);
                let mut outputs = vec![[latent, key].concat()];
                if has_q_norm {
                    outputs.push(q_norm.reference(&qkv[..q_width]));
                }
                outputs
            },
            tolerance: one_rounding::<E>(),
        },
    )
}

fn check_index_key<E: Checked>(
    report: &mut Report,
    device: &Device<E>,
    table: &HostTable,
    n: usize,
) -> Result<()> {
    let (weight, bias) = (HostNorm::new(device, 15, n)?, HostNorm::new(device, 16, n)?);
    let row_stride = n + 8;
    report.check(
        device,
        &Case {
            name: "index_key",
            run: &|batch| {
                let keys = batch.noise::<E>(17, row_stride)?;
                let mut cache = batch.poisoned::<E>(batch.n_slots() * n)?;
                let keys = IndexKeys {
                    keys: keys.view(),
                    row_stride,
                    weight: weight.buffer.view(),
                    bias: bias.buffer.view(),
                    eps: EPS,
                };
                device.kernels.index_key(batch.pass(), table.table(), &keys, cache.view_mut())?;
                Ok(vec![batch.of_slots(&cache)?])
            },
            reference: &|row| {
                let x = &row_values::<E>(17, row, row_stride)[..n];
                let mean = x.iter().sum::<f64>() / n as f64;
                let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n as f64;
                let scale = 1.0 / (variance + f64::from(EPS)).sqrt();
                let affine = weight.weight.iter().zip(&bias.weight);
                let normed = x.iter().zip(affine);
                let normed =
                    normed.map(|(x, (&w, &b))| (x - mean) * scale * f64::from(w) + f64::from(b));
                let mut key: Vec<f64> = normed.collect();
                table.rotate(row, &mut key);
                vec![key]
            },
            tolerance: one_rounding::<E>(),
        },
    )
}

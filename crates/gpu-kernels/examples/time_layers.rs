//! Times the layer kernels beside the time that their bytes or their operations take at least.
//!
//! A time is that of a launch inside a graph of many, as in a captured step: the median of replays.
//! Weights come from memory (launches take turns over copies of them), activations from the cache,
//! where the launch before leaves them.

#![expect(clippy::print_stdout, reason = "a program that prints its outcome")]

mod layers;

use anyhow::Result;
use gpu_kernels::{
    ExpertSum, Experts, IndexKeys, MlaLatents, MoeScratch, MtpInput, Norm, PassRows, RopeTable,
    RouterScratch, RouterWeights, Routing, RoutingMut,
};
use gpu_runtime::{Buffer, GpuError, elapsed_ms};
use half::bf16;
use layers::{DSV3_LITE, Device, GLM52_LITE, Sizes, noise};
use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

const ROW_COUNTS: [usize; 7] = [1, 4, 16, 64, 256, 2048, 8192];
/// Launches in a graph.
const N_LAUNCHES: usize = 32;
const N_REPLAYS: usize = 15;
/// Copies of a router's weights, more than the cache holds.
const N_GATES: usize = 256;
const N_POSITIONS: usize = 1024;
/// Measured on an H200: bytes of a copy, bf16 products of random data.
const BYTES_PER_S: f64 = 4.3e12;
const FLOPS: f64 = 790e12;

fn main() -> Result<()> {
    let device = Device::<bf16>::open()?;
    println!("{}, bf16; us a launch (times the floor)", device.gpu.info().name);
    let columns: String = ROW_COUNTS.iter().map(|n| format!("{n:>15}")).collect();
    println!("{:<11}{:<16}{columns}", "sizes", "kernel, rows");
    for sizes in [GLM52_LITE, DSV3_LITE] {
        let weights = Weights::new(&device, &sizes)?;
        let mut table: Vec<(&str, String)> = Vec::new();
        for n_rows in ROW_COUNTS {
            for (at, time) in
                Pass::new(&device, &sizes, &weights, n_rows)?.time()?.iter().enumerate()
            {
                if at == table.len() {
                    table.push((time.name, String::new()));
                }
                table[at].1 += &time.cell();
            }
        }
        for (name, cells) in table {
            println!("{:<11}{name:<16}{cells}", sizes.name);
        }
    }
    Ok(())
}

struct Time {
    name: &'static str,
    us: f64,
    /// What must be moved once.
    bytes: f64,
    flops: f64,
}

impl Time {
    fn cell(&self) -> String {
        let floor_us = (self.bytes / BYTES_PER_S).max(self.flops / FLOPS) * 1e6;
        format!("{:>8.1} ({:>4.1})", self.us, self.us / floor_us)
    }
}

struct Weights {
    table: Buffer<bf16>,
    norm: Buffer<f32>,
    angles: Buffer<f32>,
    gates: Buffer<f32>,
    /// Two copies each.
    gate_up: [Buffer<bf16>; 2],
    down: [Buffer<bf16>; 2],
}

impl Weights {
    fn new(device: &Device<bf16>, sizes: &Sizes) -> Result<Self> {
        let Sizes { hidden, vocab, n_experts, inner, .. } = *sizes;
        let twice = |seed: u64, n: usize| -> Result<[Buffer<bf16>; 2]> {
            let first = device.upload(&noise::<bf16>(seed, n, 0.02))?;
            let mut second = device.gpu.alloc(n)?;
            device.stream.copy(&first, &mut second)?;
            Ok([first, second])
        };
        let gate: Vec<f32> = noise(1, n_experts * hidden, 0.02);
        Ok(Self {
            table: device.upload(&noise(2, vocab * hidden, 1.0))?,
            norm: device.upload(&noise(3, 4096, 1.0))?,
            angles: device.upload(&noise(4, N_POSITIONS * sizes.rope_dim / 2, 1.0))?,
            gates: device.upload(&gate.repeat(N_GATES))?,
            gate_up: twice(5, n_experts * 2 * inner * hidden)?,
            down: twice(6, n_experts * inner * hidden)?,
        })
    }
}

/// The buffers of a pass of `n_rows` rows.
struct Pass<'a> {
    device: &'a Device<bf16>,
    sizes: &'a Sizes,
    weights: &'a Weights,
    n_rows: usize,
    /// Sequence, position and slot of each row: all its number.
    rows: Buffer<i32>,
    /// For each launch, a token a row, and the experts of each row.
    tokens: Buffer<i32>,
    ids: Buffer<i32>,
    /// Rows of the widest input.
    input: Buffer<bf16>,
    residual: Buffer<f32>,
    out: Buffer<bf16>,
    cache: Buffer<bf16>,
    choice: Buffer<i32>,
    choice_weights: Buffer<f32>,
    router: RouterScratch,
    moe: MoeScratch<bf16>,
    /// Experts that a row chose, on average over the launches.
    n_active: f64,
}

impl<'a> Pass<'a> {
    fn new(
        device: &'a Device<bf16>,
        sizes: &'a Sizes,
        weights: &'a Weights,
        n_rows: usize,
    ) -> Result<Self> {
        let Sizes { hidden, vocab, n_experts, top_k, .. } = *sizes;
        let mut rng = ChaCha8Rng::seed_from_u64(n_rows as u64);
        let mut tokens = Vec::new();
        let (mut ids, mut n_active) = (Vec::new(), 0);
        for _ in 0..N_LAUNCHES {
            let mut is_active = vec![false; n_experts];
            for _ in 0..n_rows {
                tokens.push(rng.random_range(0..vocab as i32));
                let mut experts: Vec<i32> = (0..n_experts as i32).collect();
                for choice in 0..top_k {
                    experts.swap(choice, rng.random_range(choice..n_experts));
                    is_active[experts[choice] as usize] = true;
                }
                ids.extend_from_slice(&experts[..top_k]);
            }
            n_active += is_active.iter().filter(|&&is_active| is_active).count();
        }
        let widest = (2 * sizes.shared_inner).max(sizes.q_width() + 1024).max(4 * hidden);
        let moe = MoeScratch::new(&device.gpu, n_rows, top_k, &experts(sizes, weights, 0))?;
        Ok(Self {
            rows: device.upload(&(0..n_rows as i32).map(|row| row % 1000).collect::<Vec<i32>>())?,
            tokens: device.upload(&tokens)?,
            ids: device.upload(&ids)?,
            input: device.upload(&noise(7, n_rows * widest, 1.0))?,
            residual: device.upload(&noise(8, n_rows * hidden, 1.0))?,
            out: device.gpu.alloc(n_rows * widest)?,
            cache: device.gpu.alloc(1000 * (sizes.kv_lora_rank + sizes.rope_dim))?,
            choice: device.gpu.alloc(n_rows * top_k)?,
            choice_weights: device.upload(&noise(9, n_rows * top_k, 1.0))?,
            router: RouterScratch::new(&device.gpu, n_rows, n_experts)?,
            moe,
            n_active: n_active as f64 / N_LAUNCHES as f64,
            device,
            sizes,
            weights,
            n_rows,
        })
    }

    /// All kernels. Bytes are those of what a kernel reads and writes, once.
    fn time(&mut self) -> Result<Vec<Time>> {
        let Sizes { hidden, inner, kv_lora_rank, rope_dim, n_heads, .. } = *self.sizes;
        let Sizes { n_experts, top_k, shared_inner, .. } = *self.sizes;
        let q_width = self.sizes.q_width();
        let (index_heads, index_dim) = self.sizes.indexer;
        let n = self.n_rows;
        // Values a row of bfloat16 and of float32, and bytes whatever the rows.
        let bytes =
            |bf16: usize, f32: usize, fixed: usize| (n * (2 * bf16 + 4 * f32) + fixed) as f64;
        let has_q_norm = usize::from(self.sizes.q_lora_rank.is_some());
        let entry = kv_lora_rank + rope_dim;
        let q_pe = n_heads * rope_dim;
        let index_pe = index_heads * rope_dim;
        let pairs = n * top_k;
        let moe_bytes = self.n_active * (3 * inner * hidden * 2) as f64
            + bytes(hidden + top_k * (2 * inner + hidden), 0, 0);
        let moe_flops = (pairs * 6 * inner * hidden) as f64;
        let gate_bytes = n_experts * hidden * 4;
        Ok(vec![
            self.one("embed", bytes(hidden, hidden, 0), Self::embed)?,
            self.one("add_rms_norm", bytes(2 * hidden, 2 * hidden, 4 * hidden), Self::norm)?,
            self.one("mtp_input", bytes(4 * hidden, 0, 8 * hidden), Self::mtp_input)?,
            self.one("rope (query)", bytes(2 * q_pe, rope_dim, 0), Self::rope)?,
            self.one("rope (index)", bytes(2 * index_pe, rope_dim, 0), Self::index_rope)?,
            self.one(
                "mla_latent",
                bytes(2 * (has_q_norm * q_width + entry), rope_dim, 0),
                Self::latent,
            )?,
            self.one("index_key", bytes(2 * index_dim, rope_dim, 0), Self::index_key)?,
            self.one("silu_and_mul", bytes(3 * shared_inner, 0, 0), Self::silu)?,
            self.one("route", bytes(hidden, 2 * top_k, gate_bytes), Self::route)?,
            Time { flops: moe_flops, ..self.one("moe_experts", moe_bytes, Self::experts)? },
            self.one(
                "moe_combine_norm",
                bytes((top_k + 2) * hidden, 2 * hidden, 4 * hidden),
                Self::combine,
            )?,
        ])
    }

    /// The time of a launch. `launch` takes its number in the graph.
    fn one(
        &mut self,
        name: &'static str,
        bytes: f64,
        launch: impl Fn(&mut Self, usize) -> Result<(), GpuError>,
    ) -> Result<Time> {
        let device = self.device;
        launch(self, 0)?;
        let graph =
            device.stream.capture(|_| (0..N_LAUNCHES).try_for_each(|at| launch(self, at)))?;
        let (start, end) = (device.gpu.event()?, device.gpu.event()?);
        let mut times = Vec::new();
        for _ in 0..N_REPLAYS + 2 {
            device.stream.record(&start)?;
            device.stream.replay(&graph)?;
            device.stream.record(&end)?;
            times.push(elapsed_ms(&start, &end)?);
        }
        let times = &mut times[2..];
        times.sort_by(f32::total_cmp);
        let us = f64::from(times[N_REPLAYS / 2]) * 1e3 / N_LAUNCHES as f64;
        Ok(Time { name, us, bytes, flops: 0.0 })
    }

    fn pass(rows: &Buffer<i32>, n_rows: usize) -> PassRows<'_> {
        PassRows { n_rows, seq: rows.view(), pos: rows.view(), slot: rows.view() }
    }

    fn norm_of(weights: &Weights, n: usize) -> Norm<'_> {
        Norm { weight: weights.norm.slice(..n), eps: 1e-5 }
    }

    fn table(weights: &'a Weights, sizes: &Sizes) -> RopeTable<'a> {
        let angles = weights.angles.view();
        RopeTable { cos: angles, sin: angles, rope_dim: sizes.rope_dim, interleaved: true }
    }

    fn embed(&mut self, at: usize) -> Result<(), GpuError> {
        let (pass, n) = (Self::pass(&self.rows, self.n_rows), self.sizes.hidden);
        let ids = self.tokens.slice(at * self.n_rows..);
        let (table, residual) = (self.weights.table.view(), self.residual.view_mut());
        self.device.kernels.embed(pass, ids, table, n, residual)
    }

    fn norm(&mut self, _: usize) -> Result<(), GpuError> {
        let pass = Self::pass(&self.rows, self.n_rows);
        let norm = Self::norm_of(self.weights, self.sizes.hidden);
        let (x, residual) = (self.input.view(), self.residual.view_mut());
        self.device.kernels.add_rms_norm(pass, x, residual, norm, self.out.view_mut())
    }

    fn mtp_input(&mut self, at: usize) -> Result<(), GpuError> {
        let pass = Self::pass(&self.rows, self.n_rows);
        let norm = Self::norm_of(self.weights, self.sizes.hidden);
        let input = MtpInput {
            ids: self.tokens.slice(at * self.n_rows..),
            table: self.weights.table.view(),
            hidden: self.input.view(),
            enorm: norm,
            hnorm: norm,
        };
        self.device.kernels.mtp_input(pass, &input, self.out.view_mut())
    }

    fn rope(&mut self, _: usize) -> Result<(), GpuError> {
        let pass = Self::pass(&self.rows, self.n_rows);
        let table = Self::table(self.weights, self.sizes);
        let heads = self.sizes.query_heads();
        self.device.kernels.rope_in_place(pass, table, self.input.view_mut(), heads)
    }

    fn index_rope(&mut self, _: usize) -> Result<(), GpuError> {
        let pass = Self::pass(&self.rows, self.n_rows);
        let table = Self::table(self.weights, self.sizes);
        let heads = self.sizes.index_heads();
        self.device.kernels.rope_in_place(pass, table, self.input.view_mut(), heads)
    }

    fn latent(&mut self, _: usize) -> Result<(), GpuError> {
        let pass = Self::pass(&self.rows, self.n_rows);
        let table = Self::table(self.weights, self.sizes);
        let Sizes { kv_lora_rank, rope_dim, q_lora_rank, .. } = *self.sizes;
        let q_width = self.sizes.q_width();
        let q_norm = |rank| Self::norm_of(self.weights, rank);
        let latents = MlaLatents {
            qkv: self.input.view(),
            row_stride: q_width + kv_lora_rank + rope_dim,
            q_width,
            q_norm: q_lora_rank.map(|rank| (q_norm(rank), self.out.view_mut())),
            kv_norm: Self::norm_of(self.weights, kv_lora_rank),
        };
        self.device.kernels.mla_latent(pass, table, latents, self.cache.view_mut())
    }

    fn index_key(&mut self, _: usize) -> Result<(), GpuError> {
        let pass = Self::pass(&self.rows, self.n_rows);
        let table = Self::table(self.weights, self.sizes);
        let n = self.sizes.indexer.1;
        let weight = self.weights.norm.slice(..n);
        let keys =
            IndexKeys { keys: self.input.view(), row_stride: n, weight, bias: weight, eps: 1e-6 };
        self.device.kernels.index_key(pass, table, &keys, self.cache.view_mut())
    }

    fn silu(&mut self, _: usize) -> Result<(), GpuError> {
        let (pass, n) = (Self::pass(&self.rows, self.n_rows), self.sizes.shared_inner);
        self.device.kernels.silu_and_mul(pass, self.input.view(), n, self.out.view_mut())
    }

    fn route(&mut self, at: usize) -> Result<(), GpuError> {
        let (pass, config) = (Self::pass(&self.rows, self.n_rows), self.sizes.moe());
        let len = self.sizes.n_experts * self.sizes.hidden;
        let copy = at * (N_GATES / N_LAUNCHES);
        let bias = Some(self.weights.norm.slice(..self.sizes.n_experts));
        let gate = self.weights.gates.slice(copy * len..(copy + 1) * len);
        let router = RouterWeights { gate, bias, config: &config };
        let weights = self.choice_weights.view_mut();
        let out = RoutingMut { ids: self.choice.view_mut(), weights };
        self.device.kernels.route(pass, self.input.view(), router, &mut self.router, out)
    }

    fn routing<'b>(ids: &'b Buffer<i32>, weights: &'b Buffer<f32>, top_k: usize) -> Routing<'b> {
        Routing { top_k, ids: ids.view(), weights: weights.view() }
    }

    fn experts(&mut self, at: usize) -> Result<(), GpuError> {
        let (pass, top_k) = (Self::pass(&self.rows, self.n_rows), self.sizes.top_k);
        let ids = self.ids.slice(at * self.n_rows * top_k..);
        let routing = Routing { ids, ..Self::routing(&self.ids, &self.choice_weights, top_k) };
        let experts = experts(self.sizes, self.weights, at);
        self.device.kernels.moe_experts(pass, self.input.view(), routing, experts, &mut self.moe)
    }

    fn combine(&mut self, _: usize) -> Result<(), GpuError> {
        let pass = Self::pass(&self.rows, self.n_rows);
        let norm = Self::norm_of(self.weights, self.sizes.hidden);
        let routing = Self::routing(&self.ids, &self.choice_weights, self.sizes.top_k);
        let shared = Some(self.input.view());
        let sum = ExpertSum { routing, scratch: &self.moe, shared };
        let (residual, out) = (self.residual.view_mut(), self.out.view_mut());
        self.device.kernels.moe_combine_rms_norm(pass, &sum, residual, norm, out)
    }
}

/// One of the two copies.
fn experts<'a>(sizes: &Sizes, weights: &'a Weights, at: usize) -> Experts<'a, bf16> {
    let Sizes { n_experts, hidden, inner, .. } = *sizes;
    let (gate_up, down) = (weights.gate_up[at % 2].view(), weights.down[at % 2].view());
    Experts { n_experts, hidden, inner, gate_up, down }
}

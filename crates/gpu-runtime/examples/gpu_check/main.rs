//! Checks this crate on the GPU of the machine, times what it adds, and prints a table.
//!
//! `cargo run --release -p gpu-runtime --example gpu_check`; exits non-zero on a fault.

#![expect(unsafe_code, reason = "launches; each site says why it is sound")]
#![expect(clippy::print_stdout, reason = "the table is what this is for")]

mod memory;
mod products;
mod work;

use std::process::ExitCode;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use gpu_runtime::{DeviceChoice, Gpu, GpuOptions, Libraries, Stream, elapsed_ms};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

/// What all checks share.
struct Bench {
    gpu: Gpu,
    stream: Stream,
    rng: ChaCha8Rng,
    n_faults: usize,
}

impl Bench {
    /// A line of the table.
    fn tell(&self, name: &str, value: impl AsRef<str>) {
        println!("{name:<44} {}", value.as_ref());
    }

    /// A line of the table, and a fault unless it is right.
    fn check(&mut self, name: &str, is_right: bool, value: impl AsRef<str>) {
        self.n_faults += usize::from(!is_right);
        let verdict = if is_right { "ok" } else { "FAULT" };
        println!("{name:<44} {verdict:<6} {}", value.as_ref());
    }

    /// Milliseconds of device time of each of `n` runs, sorted, after 3 more.
    fn device_ms(&self, n: usize, mut run: impl FnMut() -> Result<()>) -> Result<Vec<f32>> {
        let (start, end) = (self.gpu.event()?, self.gpu.event()?);
        let mut times = Vec::with_capacity(n);
        for turn in 0..n + 3 {
            self.stream.record(&start)?;
            run()?;
            self.stream.record(&end)?;
            let ms = elapsed_ms(&start, &end)?;
            if turn >= 3 {
                times.push(ms);
            }
        }
        times.sort_by(f32::total_cmp);
        Ok(times)
    }

    /// Microseconds of wall time of each of `n` runs, sorted, after 3 more.
    fn wall_us(&self, n: usize, mut run: impl FnMut() -> Result<()>) -> Result<Vec<f32>> {
        let mut times = Vec::with_capacity(n);
        for turn in 0..n + 3 {
            let start = Instant::now();
            run()?;
            if turn >= 3 {
                times.push(start.elapsed().as_secs_f32() * 1e6);
            }
        }
        times.sort_by(f32::total_cmp);
        Ok(times)
    }
}

/// Median and range of sorted numbers.
fn spread(sorted: &[f32], unit: &str) -> String {
    let (min, max) = (sorted[0], sorted[sorted.len() - 1]);
    let median = sorted[sorted.len() / 2];
    format!("{median:.3} {unit} ({min:.3} to {max:.3}, n = {})", sorted.len())
}

fn main() -> Result<ExitCode> {
    let cache = tempfile::tempdir()?;
    let kernel_cache = Some(cache.path().to_owned());
    let options = GpuOptions { libraries: Libraries::system(), kernel_cache };
    let start = Instant::now();
    let gpu = Gpu::open_with(&DeviceChoice::Auto, options)?.context("no GPU is usable here")?;
    let seed = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
    let (stream, rng) = (gpu.stream()?, ChaCha8Rng::seed_from_u64(seed));
    let mut bench = Bench { gpu, stream, rng, n_faults: 0 };
    bench.tell("opened in", format!("{:.0} ms", start.elapsed().as_secs_f32() * 1e3));
    bench.tell("device", format!("{:?}", bench.gpu.info()));
    bench.tell("memory", format!("{:?}", bench.gpu.memory()?));
    bench.tell("seed of the inputs", seed.to_string());

    let kernels = work::compile(&mut bench)?;
    work::launches(&mut bench, &kernels)?;
    work::faults(&mut bench, &kernels)?;
    work::overhead(&mut bench, &kernels)?;
    memory::bandwidth(&mut bench)?;
    memory::latency(&mut bench)?;
    memory::room(&mut bench)?;
    products::correctness(&mut bench)?;
    products::captured(&mut bench)?;
    products::rate(&mut bench)?;

    bench.gpu.synchronize()?;
    println!("{} faults", bench.n_faults);
    Ok(if bench.n_faults == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

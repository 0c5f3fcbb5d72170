//! Compilation, launches, graphs and faults.

use std::time::Instant;

use anyhow::Result;
use gpu_runtime::{Args, Buffer, Found, Kernel, Launch, Program};
use rand::RngExt;

use crate::{Bench, spread};

const SOURCE: &str = r#"
#include "ids.cuh"
extern "C" __global__ void fma_all(float *y, const float *x, float a, float b, long long n) {
    long long i = thread_id();
    if (i < n) y[i] = fmaf(a, x[i], b + OFFSET);
}
extern "C" __global__ void count_up(int *x) {
    if (thread_id() == 0) *x += 1;
}
extern "C" __global__ void reverse(float *y, const float *x, int n) {
    extern __shared__ float tile[];
    for (int i = threadIdx.x; i < n; i += blockDim.x) tile[i] = x[i];
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = tile[n - 1 - i];
}
"#;
const IDS: &str = "__device__ inline long long thread_id() {
    return (long long)blockIdx.x * blockDim.x + threadIdx.x;
}";

pub(crate) struct Kernels {
    fma_all: Kernel,
    count_up: Kernel,
    reverse: Kernel,
}

pub(crate) fn compile(bench: &mut Bench) -> Result<Kernels> {
    let sources = [("check.cu", SOURCE), ("ids.cuh", IDS)];
    let defines = [("OFFSET", "0.0f".to_owned())];
    let program = Program { name: "check", sources: &sources, defines: &defines };
    let timed = || {
        let start = Instant::now();
        let module = bench.gpu.compile(&program)?;
        anyhow::Ok((module, start.elapsed().as_secs_f32() * 1e3))
    };
    let (first, cold_ms) = timed()?;
    let (again, warm_ms) = timed()?;
    bench.check("compiled", *first.found() == Found::Compiled, format!("{cold_ms:.1} ms"));
    bench.check("from the cache", *again.found() == Found::InCache, format!("{warm_ms:.2} ms"));
    let kernel = |name| again.kernel(name);
    let kernels = Kernels {
        fma_all: kernel("fma_all")?,
        count_up: kernel("count_up")?,
        reverse: kernel("reverse")?,
    };
    let resources = kernels.fma_all.resources()?;
    bench.check("no spills", resources.local_bytes == 0, format!("{resources:?}"));
    let bad = [("bad.cu", "extern \"C\" __global__ void k() { nonsense; }")];
    let error = bench.gpu.compile(&Program { name: "bad", sources: &bad, defines: &[] });
    let log = error.err().map(|error| error.to_string()).unwrap_or_default();
    bench.check("the compiler's log", log.contains("nonsense"), log.replace('\n', " | "));
    Ok(kernels)
}

fn count_up(
    bench: &Bench,
    kernels: &Kernels,
    x: &mut Buffer<i32>,
) -> Result<(), gpu_runtime::GpuError> {
    let mut args = Args::new();
    args.view_mut(x.view_mut());
    // SAFETY: the kernel takes a pointer and writes one element.
    unsafe { bench.stream.launch(&kernels.count_up, Launch::linear(1, 32), &args) }
}

pub(crate) fn launches(bench: &mut Bench, kernels: &Kernels) -> Result<()> {
    let n = (1 << 24) + 5;
    let x: Vec<f32> = (0..n).map(|_| bench.rng.random_range(-1.0..1.0)).collect();
    let mut x_device = bench.gpu.alloc::<f32>(n)?;
    let mut y_device = bench.gpu.alloc::<f32>(n)?;
    bench.stream.upload(&x, &mut x_device)?;
    bench.stream.fill_bytes(&mut y_device, 0xff)?;
    let (a, b) = (1.7f32, -0.3f32);
    let mut args = Args::new();
    args.view_mut(y_device.view_mut()).view(x_device.view()).f32(a).f32(b).i64(n as i64);
    // SAFETY: the arguments are those of the kernel, for `n` elements of both buffers.
    unsafe {
        let launch = Launch::linear(n.div_ceil(256) as u32, 256);
        bench.stream.launch(&kernels.fma_all, launch, &args)?;
    }
    let y = bench.stream.download(&y_device)?;
    let n_wrong = x.iter().zip(&y).filter(|(x, y)| a.mul_add(**x, b) != **y).count();
    bench.check("vector kernel, exact", n_wrong == 0, format!("{n_wrong} of {n} wrong"));

    let n = (bench.gpu.info().max_shared_per_block / 4) as usize;
    kernels.reverse.allow_shared(4 * n as u32)?;
    bench.stream.fill_bytes(y_device.slice_mut(..n), 0xff)?;
    let mut args = Args::new();
    args.view_mut(y_device.slice_mut(..n)).view(x_device.slice(..n)).i32(n as i32);
    let launch = Launch { grid: [1, 1, 1], block: [512, 1, 1], shared: 4 * n as u32 };
    // SAFETY: the arguments are those of the kernel, for `n` elements of both buffers.
    unsafe { bench.stream.launch(&kernels.reverse, launch, &args)? };
    let y = bench.stream.download(y_device.slice(..n))?;
    let is_right = x[..n].iter().rev().eq(y.iter());
    bench.check("all of a block's shared memory", is_right, format!("{} bytes", 4 * n));
    Ok(())
}

pub(crate) fn faults(bench: &mut Bench, kernels: &Kernels) -> Result<()> {
    let mut x = bench.gpu.alloc_zeroed::<i32>(1)?;
    let mut args = Args::new();
    args.view_mut(x.view_mut());
    // SAFETY: the driver refuses a block of so many threads.
    let refused = unsafe { bench.stream.launch(&kernels.count_up, Launch::linear(1, 4096), &args) };
    let text = refused.err().map(|error| error.to_string()).unwrap_or_default();
    bench.check("a launch that cannot be", text.contains("aunch"), text);

    let error = bench.stream.capture(|stream| {
        count_up(bench, kernels, &mut x)?;
        stream.synchronize()
    });
    let text = error.err().map(|error| error.to_string()).unwrap_or_default();
    bench.check("a failed capture", text.contains("inside a capture"), text);
    let mut refused = String::new();
    let broken = bench.stream.capture(|_| {
        refused = bench.gpu.synchronize().err().map(|error| error.to_string()).unwrap_or_default();
        Ok(())
    });
    let text = broken.err().map(|error| error.to_string()).unwrap_or_default();
    bench.check("a wait in a capture", !refused.is_empty(), format!("{refused}; then {text}"));

    // Another thread may allocate meanwhile: the capture is of this thread.
    let graph = bench.stream.capture(|_| {
        let other = std::thread::scope(|scope| {
            scope.spawn(|| bench.gpu.alloc_zeroed::<u8>(1 << 20).map(drop)).join()
        });
        other.map_err(|_| gpu_runtime::GpuError::Invalid("a panic".into()))??;
        count_up(bench, kernels, &mut x)
    })?;
    bench.stream.replay(&graph)?;
    bench.stream.replay(&graph)?;
    let n = bench.stream.download(&x)?[0];
    bench.check("the stream after these, and its graph", n == 2, format!("{n} of 2 replays"));
    drop(x);
    bench.stream.replay(&graph)?;
    let outcome = bench.stream.synchronize();
    bench.check("a replay after its buffer's drop", outcome.is_ok(), "kept by the graph");
    Ok(())
}

pub(crate) fn overhead(bench: &mut Bench, kernels: &Kernels) -> Result<()> {
    const N: usize = 1000;
    let mut x = bench.gpu.alloc_zeroed::<i32>(1)?;
    let queue = |x: &mut Buffer<i32>| {
        (0..N).try_for_each(|_| count_up(bench, kernels, x)).map_err(anyhow::Error::from)
    };
    let mut queue_us = Vec::new();
    let eager = bench.wall_us(20, || {
        let start = Instant::now();
        queue(&mut x)?;
        queue_us.push(start.elapsed().as_secs_f32() * 1e6);
        Ok(bench.stream.synchronize()?)
    })?;
    queue_us.sort_by(f32::total_cmp);
    let start = Instant::now();
    let graph =
        bench.stream.capture(|_| (0..N).try_for_each(|_| count_up(bench, kernels, &mut x)))?;
    let capture_ms = start.elapsed().as_secs_f32() * 1e3;
    let replay = bench.wall_us(20, || {
        bench.stream.replay(&graph)?;
        Ok(bench.stream.synchronize()?)
    })?;
    let replay_device = bench.device_ms(20, || Ok(bench.stream.replay(&graph)?))?;
    let n = bench.stream.download(&x)?[0];
    let expected = (23 * 3 * N) as i32;
    bench.check("1,000 kernels, all ran", n == expected, format!("{n} of {expected}"));
    bench.tell("  eager, wall", spread(&eager, "us"));
    bench.tell("  eager, host time to queue", spread(&queue_us, "us"));
    bench.tell("  graph, wall", spread(&replay, "us"));
    bench.tell("  graph, device", spread(&replay_device, "ms"));
    bench.tell("  graph, capture and instantiate", format!("{capture_ms:.2} ms"));
    let faster = eager[10] / replay[10];
    bench.check("  graph faster than eager", faster > 1.0, format!("{faster:.2} times"));
    Ok(())
}

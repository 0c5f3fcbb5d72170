//! Matrix products against plain loops in float64.

use anyhow::Result;
use gpu_runtime::{Blas, Buffer, Gemm, GemmElement, GpuError, Matrix, MatrixMut, WeightLayout};
use half::bf16;
use rand::RngExt;

use crate::{Bench, spread};

/// `n_batches` products of `[n_rows, n_in]`, with gaps between rows and batches.
const N_BATCHES: usize = 3;
const N_ROWS: usize = 37;
const N_OUT: usize = 136;
const N_IN: usize = 520;
const X_ROW: usize = N_IN + 8;
const X_BATCH: usize = N_ROWS * X_ROW + 16;
const OUT_ROW: usize = N_OUT + 24;
const OUT_BATCH: usize = N_ROWS * OUT_ROW + 32;

fn w_row(layout: WeightLayout) -> usize {
    match layout {
        WeightLayout::OutIn => N_IN + 16,
        WeightLayout::InOut => N_OUT + 16,
    }
}

/// Large enough for either layout.
const W_BATCH: usize = (N_IN + 16) * (N_OUT + 16);

fn random<T: GemmElement>(
    bench: &mut Bench,
    n: usize,
    from: fn(f32) -> T,
) -> Result<(Vec<T>, Buffer<T>)> {
    let values: Vec<T> = (0..n).map(|_| from(bench.rng.random_range(-1.0..1.0))).collect();
    let mut buffer = bench.gpu.alloc(n)?;
    bench.stream.upload(&values, &mut buffer)?;
    Ok((values, buffer))
}

fn reference<T: GemmElement + Into<f32>>(x: &[T], w: &[T], layout: WeightLayout) -> Vec<f64> {
    let f64_of = |value: T| f64::from(value.into());
    let mut out = Vec::with_capacity(N_BATCHES * N_ROWS * N_OUT);
    for b in 0..N_BATCHES {
        for r in 0..N_ROWS {
            let x = &x[b * X_BATCH + r * X_ROW..][..N_IN];
            for o in 0..N_OUT {
                let at = |i| match layout {
                    WeightLayout::OutIn => o * w_row(layout) + i,
                    WeightLayout::InOut => i * w_row(layout) + o,
                };
                let w = &w[b * W_BATCH..];
                out.push(x.iter().enumerate().map(|(i, &x)| f64_of(x) * f64_of(w[at(i)])).sum());
            }
        }
    }
    out
}

/// The error in the Frobenius norm, relative; infinite where a gap was written.
fn error_of<O: GemmElement + Into<f32>>(out: &[O], expected: &[f64]) -> f64 {
    let (mut difference, mut norm) = (0.0, 0.0);
    let mut expected = expected.iter();
    for (at, &value) in out.iter().enumerate() {
        let (b, inside) = (at / OUT_BATCH, at % OUT_BATCH);
        let value: f32 = value.into();
        let is_gap = inside / OUT_ROW >= N_ROWS || inside % OUT_ROW >= N_OUT || b >= N_BATCHES;
        if is_gap {
            // What the buffer was filled with is a NaN.
            if !value.is_nan() {
                return f64::INFINITY;
            }
        } else {
            let expected = expected.next().expect("as many as elements that are no gap");
            difference += (f64::from(value) - expected).powi(2);
            norm += expected.powi(2);
        }
    }
    (difference / norm).sqrt()
}

struct Types<T, O> {
    name: &'static str,
    from: fn(f32) -> T,
    /// Only to name the type of the output.
    out: std::marker::PhantomData<O>,
    error_max: f64,
}

fn check<T, O>(bench: &mut Bench, blas: &Blas, types: &Types<T, O>) -> Result<()>
where
    T: GemmElement + Into<f32>,
    O: GemmElement + Into<f32>,
{
    for layout in [WeightLayout::OutIn, WeightLayout::InOut] {
        let (x, x_device) = random(bench, N_BATCHES * X_BATCH, types.from)?;
        let (w, w_device) = random(bench, N_BATCHES * W_BATCH, types.from)?;
        let mut out = bench.gpu.alloc::<O>(N_BATCHES * OUT_BATCH)?;
        bench.stream.fill_bytes(&mut out, 0xff)?;
        blas.gemm(&Gemm {
            n_rows: N_ROWS,
            n_out: N_OUT,
            n_in: N_IN,
            n_batches: N_BATCHES,
            x: Matrix::new(&x_device, X_ROW, X_BATCH),
            w: Matrix::new(&w_device, w_row(layout), W_BATCH),
            layout,
            out: MatrixMut::new(&mut out, OUT_ROW, OUT_BATCH),
            alpha: 1.0,
            beta: 0.0,
        })?;
        let error = error_of(&bench.stream.download(&out)?, &reference(&x, &w, layout));
        let name = format!("product {} {layout:?}", types.name);
        bench.check(&name, error < types.error_max, format!("relative error {error:.2e}"));
    }
    Ok(())
}

pub(crate) fn correctness(bench: &mut Bench) -> Result<()> {
    let blas = Blas::new(&bench.gpu, &bench.stream)?;
    let out = std::marker::PhantomData;
    // TF32 would be near 3e-4; a rounding to bfloat16 is 1.7e-3 on average.
    let types = Types::<f32, f32> { name: "f32", from: |x| x, out, error_max: 1e-5 };
    check(bench, &blas, &types)?;
    let out = std::marker::PhantomData;
    let from = bf16::from_f32;
    let types = Types::<bf16, f32> { name: "bf16 to f32", from, out, error_max: 1e-5 };
    check(bench, &blas, &types)?;
    let out = std::marker::PhantomData;
    let types = Types::<bf16, bf16> { name: "bf16 to bf16", from, out, error_max: 4e-3 };
    check(bench, &blas, &types)
}

/// One product of square matrices.
fn square<'a>(
    n: usize,
    x: &'a Buffer<bf16>,
    w: &'a Buffer<bf16>,
    out: &'a mut Buffer<bf16>,
) -> Gemm<'a> {
    Gemm {
        n_rows: n,
        n_out: n,
        n_in: n,
        n_batches: 1,
        x: Matrix::new(x, n, 0),
        w: Matrix::new(w, n, 0),
        layout: WeightLayout::OutIn,
        out: MatrixMut::new(out, n, 0),
        alpha: 1.0,
        beta: 0.0,
    }
}

pub(crate) fn captured(bench: &mut Bench) -> Result<()> {
    let n = 512;
    let blas = Blas::new(&bench.gpu, &bench.stream)?;
    let (_, x) = random(bench, n * n, bf16::from_f32)?;
    let (_, w) = random(bench, n * n, bf16::from_f32)?;
    let mut out = bench.gpu.alloc::<bf16>(n * n)?;
    blas.gemm(&square(n, &x, &w, &mut out))?;
    let eager = bench.stream.download(&out)?;
    let graph = bench
        .stream
        .capture(|_| -> Result<(), GpuError> { blas.gemm(&square(n, &x, &w, &mut out)) })?;
    drop((blas, x, w));
    bench.stream.fill_bytes(&mut out, 0xff)?;
    bench.stream.replay(&graph)?;
    let is_same = bench.stream.download(&out)? == eager;
    bench.check("a captured product, bit for bit", is_same, format!("{} nodes", graph.n_nodes()));
    Ok(())
}

pub(crate) fn rate(bench: &mut Bench) -> Result<()> {
    let n = 8192;
    let blas = Blas::new(&bench.gpu, &bench.stream)?;
    let (_, x) = random(bench, n * n, bf16::from_f32)?;
    let (_, w) = random(bench, n * n, bf16::from_f32)?;
    let mut out = bench.gpu.alloc::<bf16>(n * n)?;
    let times = bench.device_ms(20, || Ok(blas.gemm(&square(n, &x, &w, &mut out))?))?;
    let rate = 2.0 * (n as f32).powi(3) / (times[10] * 1e-3) / 1e12;
    bench.tell("bf16 product of 8192 cubed", spread(&times, "ms"));
    bench.tell("  rate", format!("{rate:.0} TFLOP/s"));
    Ok(())
}

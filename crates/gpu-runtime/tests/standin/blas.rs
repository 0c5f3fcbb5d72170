//! Matrix products against plain loops.

use gpu_runtime::{
    Api, Blas, Buffer, Gemm, GemmElement, Gpu, GpuError, Matrix, MatrixMut, Stream, WeightLayout,
};
use half::bf16;

use crate::BOTH;
use crate::libraries::Standin;

/// Small whole numbers, exact in every type.
fn numbers(n: usize, salt: usize) -> Vec<f32> {
    (0..n).map(|i| ((i * 7 + salt * 3) % 11) as f32 - 5.0).collect()
}

struct Setup {
    gpu: Gpu,
    stream: Stream,
    blas: Blas,
}

fn setup(standin: &Standin) -> Setup {
    let gpu = standin.open();
    let stream = gpu.stream().unwrap();
    let blas = Blas::new(&gpu, &stream).unwrap();
    Setup { gpu, stream, blas }
}

impl Setup {
    fn put<T: GemmElement>(&self, values: &[f32], from: fn(f32) -> T) -> Buffer<T> {
        let values: Vec<T> = values.iter().map(|&x| from(x)).collect();
        let mut buffer = self.gpu.alloc(values.len()).unwrap();
        self.stream.upload(&values, &mut buffer).unwrap();
        buffer
    }
}

#[test]
fn batches_may_lie_side_by_side_but_not_on_each_other() {
    let standin = Standin::new(Api::Cuda).with_room_for_blas();
    let setup = setup(&standin);
    let (x, w) = (setup.put(&[1.0; 6], |x| x), setup.put(&[1.0; 6], |x| x));
    for (row, batch, is_fine) in [(4, 2, true), (2, 4, true), (2, 2, false), (3, 2, false)] {
        let mut out = setup.put(&[0.0; 8], |x| x);
        let gemm = Gemm {
            n_rows: 2,
            n_out: 2,
            n_in: 3,
            n_batches: 2,
            x: Matrix::new(&x, 3, 0),
            w: Matrix::new(&w, 3, 0),
            layout: WeightLayout::OutIn,
            out: MatrixMut::new(&mut out, row, batch),
            alpha: 1.0,
            beta: 0.0,
        };
        assert_eq!(setup.blas.gemm(&gemm).is_ok(), is_fine, "strides {row} and {batch}");
        let expected = if is_fine { 3.0 } else { 0.0 };
        assert_eq!(setup.stream.download(&out).unwrap(), [expected; 8]);
    }
}

/// A product of 2 batches of `[3, 4]` by 5 outputs, with gaps between rows and batches.
fn check<T: GemmElement>(
    setup: &Setup,
    layout: WeightLayout,
    n_batches: usize,
    from: fn(f32) -> T,
) {
    let (n_rows, n_out, n_in) = (3, 5, 4);
    let (x_row, x_batch, w_row, w_batch, o_row, o_batch) = (6, 20, 7, 40, 8, 30);
    let (x, w, before) = (numbers(60, 1), numbers(90, 2), numbers(70, 3));
    let (x_buffer, w_buffer) = (setup.put(&x, from), setup.put(&w, from));
    let mut out = setup.put(&before, |value| value);
    let gemm = Gemm {
        n_rows,
        n_out,
        n_in,
        n_batches,
        x: Matrix::new(&x_buffer, x_row, x_batch),
        w: Matrix::new(&w_buffer, w_row, w_batch),
        layout,
        out: MatrixMut::new(&mut out, o_row, o_batch),
        alpha: 2.0,
        beta: -1.0,
    };
    setup.blas.gemm(&gemm).unwrap();
    let mut expected = before;
    for b in 0..n_batches {
        for r in 0..n_rows {
            for o in 0..n_out {
                let sum: f32 = (0..n_in)
                    .map(|i| {
                        let at = match layout {
                            WeightLayout::OutIn => o * w_row + i,
                            WeightLayout::InOut => i * w_row + o,
                        };
                        x[b * x_batch + r * x_row + i] * w[b * w_batch + at]
                    })
                    .sum();
                let at = b * o_batch + r * o_row + o;
                expected[at] = 2.0 * sum - expected[at];
            }
        }
    }
    assert_eq!(setup.stream.download(&out).unwrap(), expected);
}

#[test]
fn products_are_those_of_the_documentation() {
    for api in BOTH {
        let standin = Standin::new(api).with_room_for_blas();
        let setup = setup(&standin);
        for layout in [WeightLayout::OutIn, WeightLayout::InOut] {
            for n_batches in [1, 2] {
                check(&setup, layout, n_batches, |value| value);
                check(&setup, layout, n_batches, bf16::from_f32);
            }
        }
        drop(setup);
        assert_eq!(standin.live(), 0);
    }
}

fn fault(setup: &Setup, change: impl FnOnce(&mut Gemm<'_>)) -> String {
    let x = setup.put(&[1.0; 6], |x| x);
    fault_of(setup, Matrix::new(&x, 3, 0), change)
}

fn fault_of(setup: &Setup, x: Matrix<'_>, change: impl FnOnce(&mut Gemm<'_>)) -> String {
    let w = setup.put(&[1.0; 6], |x| x);
    let mut out = setup.put(&[0.0; 4], |x| x);
    let mut gemm = Gemm {
        n_rows: 2,
        n_out: 2,
        n_in: 3,
        n_batches: 1,
        x,
        w: Matrix::new(&w, 3, 0),
        layout: WeightLayout::OutIn,
        out: MatrixMut::new(&mut out, 2, 0),
        alpha: 1.0,
        beta: 0.0,
    };
    change(&mut gemm);
    setup.blas.gemm(&gemm).map_or_else(|error| error.to_string(), |()| "fine".to_owned())
}

#[test]
fn matrices_outside_their_memory_are_refused() {
    let standin = Standin::new(Api::Cuda).with_room_for_blas();
    let setup = setup(&standin);
    let spare = setup.put(&[1.0; 6], bf16::from_f32);
    let f32s = setup.put(&[1.0; 6], |x| x);
    assert_eq!(fault(&setup, |_| ()), "fine");
    assert!(fault(&setup, |gemm| gemm.n_rows = 3).starts_with("x: "));
    assert!(fault(&setup, |gemm| gemm.n_out = 3).starts_with("w: "));
    assert!(fault(&setup, |gemm| gemm.n_in = 4).starts_with("x: "));
    assert!(fault(&setup, |gemm| gemm.layout = WeightLayout::InOut).starts_with("w: "));
    assert!(fault(&setup, |gemm| gemm.n_batches = 2).starts_with("the outputs"));
    assert!(fault_of(&setup, Matrix::new(&f32s, 2, 0), |_| ()).starts_with("x: "));
    assert!(fault_of(&setup, Matrix::new(&f32s, usize::MAX, 0), |_| ()).starts_with("x: "));
    assert!(fault_of(&setup, Matrix::new(&spare, 3, 0), |_| ()).contains("Bf16 by F32"));
    assert_eq!(fault(&setup, |gemm| gemm.n_in = 0), "a product over no input");
    let before = standin.calls("cublasGemmEx");
    assert_eq!(fault(&setup, |gemm| gemm.n_rows = 0), "fine");
    assert_eq!(fault(&setup, |gemm| gemm.n_batches = 0), "fine");
    assert_eq!(standin.calls("cublasGemmEx"), before);
}

#[test]
fn a_graph_keeps_the_library_that_it_was_captured_with() {
    let standin = Standin::new(Api::Cuda).with_room_for_blas();
    let setup = setup(&standin);
    let (x, w) = (setup.put(&[1.0; 6], |x| x), setup.put(&[1.0; 6], |x| x));
    let mut out = setup.put(&[0.0; 4], |x| x);
    let gemm = Gemm {
        n_rows: 2,
        n_out: 2,
        n_in: 3,
        n_batches: 1,
        x: Matrix::new(&x, 3, 0),
        w: Matrix::new(&w, 3, 0),
        layout: WeightLayout::OutIn,
        out: MatrixMut::new(&mut out, 2, 0),
        alpha: 1.0,
        beta: 0.0,
    };
    let graph = setup.stream.capture(|_| setup.blas.gemm(&gemm)).unwrap();
    drop((setup, x, w, out));
    assert_eq!((standin.calls("cublasDestroy_v2"), standin.calls("cuMemFree_v2")), (0, 0));
    drop(graph);
    assert_eq!((standin.calls("cublasDestroy_v2"), standin.live()), (1, 0));
}

#[test]
fn failures_of_the_library_are_told() {
    let standin = Standin::new(Api::Cuda).with_room_for_blas();
    let setup = setup(&standin);
    standin.fail("cublasGemmEx", 13);
    assert_eq!(fault(&setup, |_| ()), "cublasGemmEx failed: stand-in: BLAS (code 13)");
    for name in
        ["cublasCreate_v2", "cublasSetStream_v2", "cublasSetWorkspace_v2", "cublasSetMathMode"]
    {
        standin.fail(name, 3);
        let error = Blas::new(&setup.gpu, &setup.stream).unwrap_err().to_string();
        assert_eq!(error, format!("{name} failed: stand-in: BLAS (code 3)"));
    }
    let other = standin.open().stream().unwrap();
    let error = Blas::new(&setup.gpu, &other).unwrap_err().to_string();
    assert_eq!(error, "the stream is of another device");
    drop((setup, other));
    assert_eq!(standin.live(), 0);

    let gpu = Standin::new(Api::Cuda).without("blas").open();
    let error = Blas::new(&gpu, &gpu.stream().unwrap()).unwrap_err();
    assert!(matches!(error, GpuError::MissingLibrary { .. }));
    assert_eq!(error.to_string().lines().count(), 1);
}

#[test]
fn a_workspace_that_does_not_fit_is_no_room() {
    let standin = Standin::new(Api::Cuda);
    let gpu = standin.open();
    let error = Blas::new(&gpu, &gpu.stream().unwrap()).unwrap_err();
    assert!(matches!(error, GpuError::OutOfMemory { .. }));
    drop(gpu);
    assert_eq!(standin.live(), 0);
}

//! Matrix products by the vendor's BLAS library.

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::fmt;
use std::marker::PhantomData;
use std::mem::size_of;
use std::ptr;
use std::sync::Arc;

use half::bf16;

use crate::driver::Handle;
use crate::error::invalid;
use crate::library::{Entry, Loaded, Wanted, c_table};
use crate::memory::{Allocation, Kept};
use crate::{Api, Buffer, Gpu, GpuError, Pod, Stream, View, ViewMut};

/// Bytes of the workspace of a [`Blas`]: what cuBLAS recommends for Hopper.
const WORKSPACE_BYTES: usize = 32 << 20;

/// The type of a matrix's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DType {
    /// bfloat16.
    Bf16,
    /// float32.
    F32,
}

impl DType {
    /// Bytes of an element.
    #[must_use]
    pub fn bytes(self) -> usize {
        match self {
            Self::Bf16 => size_of::<bf16>(),
            Self::F32 => size_of::<f32>(),
        }
    }

    /// `cudaDataType` and `hipDataType` agree.
    fn code(self) -> c_int {
        match self {
            Self::Bf16 => 14,
            Self::F32 => 0,
        }
    }
}

/// An element of a matrix.
pub trait GemmElement: Pod {
    /// Its type.
    const DTYPE: DType;
}

impl GemmElement for bf16 {
    const DTYPE: DType = DType::Bf16;
}

impl GemmElement for f32 {
    const DTYPE: DType = DType::F32;
}

/// A batch of row-major matrices on the device, to be read. Strides are in elements.
#[derive(Clone, Copy)]
pub struct Matrix<'a>(Operand<'a>);

/// A batch of row-major matrices on the device, to be written. Strides are in elements.
pub struct MatrixMut<'a>(Operand<'a>);

#[derive(Clone, Copy)]
struct Operand<'a> {
    memory: &'a Arc<Allocation>,
    address: u64,
    len: usize,
    dtype: DType,
    row_stride: usize,
    batch_stride: usize,
}

impl<'a> Matrix<'a> {
    /// Element `c` of row `r` of matrix `b` is `view[b * batch_stride + r * row_stride + c]`.
    pub fn new<T: GemmElement>(
        view: impl Into<View<'a, T>>,
        row_stride: usize,
        batch_stride: usize,
    ) -> Self {
        let view = view.into();
        let (memory, address) = (view.memory(), view.ptr().address());
        let (len, dtype) = (view.len(), T::DTYPE);
        Self(Operand { memory, address, len, dtype, row_stride, batch_stride })
    }
}

impl<'a> MatrixMut<'a> {
    /// As [`Matrix::new`].
    pub fn new<T: GemmElement>(
        view: impl Into<ViewMut<'a, T>>,
        row_stride: usize,
        batch_stride: usize,
    ) -> Self {
        let view = view.into();
        let (memory, address) = (view.memory(), view.ptr().address());
        let (len, dtype) = (view.len(), T::DTYPE);
        Self(Operand { memory, address, len, dtype, row_stride, batch_stride })
    }
}

impl Operand<'_> {
    /// Checks that `n_batches` matrices of `n_rows` rows of `n_columns` lie inside.
    fn check(&self, name: &str, n_batches: usize, shape: [usize; 2]) -> Result<(), GpuError> {
        let [n_rows, n_columns] = shape;
        let last = |n: usize, stride: usize| (n - 1).checked_mul(stride);
        let end = last(n_batches, self.batch_stride)
            .zip(last(n_rows, self.row_stride))
            .and_then(|(batch, row)| batch.checked_add(row)?.checked_add(n_columns));
        if self.row_stride < n_columns || end.is_none_or(|end| end > self.len) {
            return invalid(format!(
                "{name}: {n_batches} matrices of {n_rows} rows of {n_columns}, strides {} and {}, \
                 do not lie in {} elements",
                self.batch_stride, self.row_stride, self.len
            ));
        }
        Ok(())
    }
}

/// How the weights of a product lie in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightLayout {
    /// `w [n_out, n_in]`, a row for each output, as checkpoints have them: `out = x · wᵀ`.
    OutIn,
    /// `w [n_in, n_out]`: `out = x · w`.
    InOut,
}

/// A batch of products, all of one shape.
///
/// For each batch `b`, row `r` and output `o`, with `x [n_rows, n_in]` and `out [n_rows, n_out]`:
///
/// ```text
/// out[b][r][o] = alpha * Σ_i x[b][r][i] * w[b][o][i]  +  beta * out[b][r][o]     (OutIn)
/// out[b][r][o] = alpha * Σ_i x[b][r][i] * w[b][i][o]  +  beta * out[b][r][o]     (InOut)
/// ```
///
/// `x` and `w` have one type, and `out` has that or float32. Sums are float32; with float32 inputs
/// no product is rounded to TF32. With `beta == 0`, what was in `out` is not read. A batch stride
/// of 0 gives all batches the same matrix (not in `out`).
pub struct Gemm<'a> {
    /// Rows of `x` and `out`.
    pub n_rows: usize,
    /// Columns of `out`.
    pub n_out: usize,
    /// Columns of `x`.
    pub n_in: usize,
    /// Products.
    pub n_batches: usize,
    /// `[n_batches, n_rows, n_in]`.
    pub x: Matrix<'a>,
    /// `[n_batches, n_out, n_in]` or `[n_batches, n_in, n_out]`.
    pub w: Matrix<'a>,
    /// Which of them.
    pub layout: WeightLayout,
    /// `[n_batches, n_rows, n_out]`.
    pub out: MatrixMut<'a>,
    /// Factor of the product.
    pub alpha: f32,
    /// Factor of what is in `out`.
    pub beta: f32,
}

c_table! {
    struct BlasTable(status_string = "cublasGetStatusString", "hipblasStatusToString");
    create(handle: *mut Handle) = "cublasCreate_v2", "hipblasCreate";
    destroy(handle: Handle) = "cublasDestroy_v2", "hipblasDestroy";
    set_stream(handle: Handle, stream: Handle) = "cublasSetStream_v2", "hipblasSetStream";
}

type SetWorkspace = unsafe extern "C" fn(Handle, *mut c_void, usize) -> c_int;
type SetMathMode = unsafe extern "C" fn(Handle, c_int) -> c_int;
/// `m n k`, then `alpha A type lda B type ldb beta C type ldc`, computation, algorithm.
type GemmEx = unsafe extern "C" fn(
    Handle,
    c_int,
    c_int,
    c_int,
    c_int,
    c_int,
    *const f32,
    u64,
    c_int,
    c_int,
    u64,
    c_int,
    c_int,
    *const f32,
    u64,
    c_int,
    c_int,
    c_int,
    c_int,
) -> c_int;
/// As [`GemmEx`], with a stride behind each leading dimension, and the number of batches.
type GemmStridedBatchedEx = unsafe extern "C" fn(
    Handle,
    c_int,
    c_int,
    c_int,
    c_int,
    c_int,
    *const f32,
    u64,
    c_int,
    c_int,
    i64,
    u64,
    c_int,
    c_int,
    i64,
    *const f32,
    u64,
    c_int,
    c_int,
    i64,
    c_int,
    c_int,
    c_int,
) -> c_int;

/// The numbers by which the vendors' libraries name the same things.
struct Codes {
    no_transpose: c_int,
    transpose: c_int,
    compute_f32: c_int,
    default_algorithm: c_int,
    math_mode: c_int,
}

/// Default math computes float32 in float32; the flag (16) also forbids sums of bfloat16 products
/// in less than float32.
const CUDA: Codes =
    Codes { no_transpose: 0, transpose: 1, compute_f32: 68, default_algorithm: -1, math_mode: 16 };
/// Default math: without the reduced precision XF32.
const ROCM: Codes = Codes {
    no_transpose: 111,
    transpose: 112,
    compute_f32: 2,
    default_algorithm: 160,
    math_mode: 0,
};

/// The BLAS library on one stream, with a workspace of its own, so that its products can be
/// captured.
///
/// The library chooses its algorithm by the shape: a row's result may depend on the number of rows
/// in its last bits. It may be sent to another thread, but one thread at a time uses it.
pub struct Blas {
    open: Arc<Open>,
    stream: Stream,
    _not_sync: PhantomData<Cell<()>>,
}

/// The library's state, which captured products use as well.
struct Open {
    gpu: Gpu,
    table: BlasTable,
    gemm: Entry<GemmEx>,
    gemm_batched: Entry<GemmStridedBatchedEx>,
    handle: Handle,
    workspace: Option<Buffer<u8>>,
}

impl fmt::Debug for Blas {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Blas({:?})", self.stream)
    }
}

impl Blas {
    pub(crate) fn wanted(api: Api) -> Wanted {
        match api {
            Api::Cuda => Wanted {
                what: "the BLAS library of CUDA",
                names: &["libcublas.so.13", "libcublas.so.12"],
                help: "install CUDA 12 or 13, or the package nvidia-cublas, and put its lib \
                       folder on LD_LIBRARY_PATH",
            },
            Api::Rocm => Wanted {
                what: "the BLAS library of ROCm",
                names: &["libhipblas.so.3", "libhipblas.so.2", "libhipblas.so"],
                help: "install ROCm 6 or later (package hipblas; Debian: libhipblas2) or a ROCm \
                       build of PyTorch, and put its lib folder on LD_LIBRARY_PATH",
            },
        }
    }

    /// Loads the library and ties it to a stream of the device.
    ///
    /// hipBLAS before release 3 takes no workspace; there the library allocates its own, which a
    /// capture may refuse.
    ///
    /// # Errors
    ///
    /// [`GpuError::MissingLibrary`] where it is not installed; a failure of the library; no room
    /// for the workspace.
    pub fn new(gpu: &Gpu, stream: &Stream) -> Result<Self, GpuError> {
        if !gpu.is(stream.gpu()) {
            return invalid("the stream is of another device");
        }
        let api = gpu.info().api;
        let library = gpu.options().libraries.load(&Self::wanted(api))?;
        let table = BlasTable::fill(&library, api)?;
        // hipBLAS 2 has the interface of release 3 under names of its own.
        let (gemm, gemm_batched) = match api {
            Api::Cuda => (["cublasGemmEx"; 2], ["cublasGemmStridedBatchedEx"; 2]),
            Api::Rocm => (
                ["hipblasGemmEx_v2", "hipblasGemmEx"],
                ["hipblasGemmStridedBatchedEx_v2", "hipblasGemmStridedBatchedEx"],
            ),
        };
        // SAFETY: the type is that of the vendor's header for these names.
        let gemm = unsafe { library.first_function(gemm)? };
        // SAFETY: the type is that of the vendor's header for these names.
        let gemm_batched = unsafe { library.first_function(gemm_batched)? };
        gpu.enter()?;
        let mut handle = Handle::NULL;
        // SAFETY: the handle is written where it points.
        unsafe { table.create(&mut handle) }?;
        let (gpu, workspace) = (gpu.clone(), None);
        let mut open = Open { gpu, table, gemm, gemm_batched, handle, workspace };
        open.prepare(&library, api, stream)?;
        let stream = stream.clone();
        Ok(Self { open: Arc::new(open), stream, _not_sync: PhantomData })
    }

    /// Queues products on the stream. Without a row, an output or a batch there is nothing to do.
    ///
    /// # Errors
    ///
    /// Matrices that do not lie in their memory, types that do not go together, no input
    /// (`n_in == 0`), numbers beyond the library's; a failure of the library.
    pub fn gemm(&self, gemm: &Gemm<'_>) -> Result<(), GpuError> {
        let Gemm { n_rows, n_out, n_in, n_batches, .. } = *gemm;
        if n_rows == 0 || n_out == 0 || n_batches == 0 {
            return Ok(());
        }
        check(gemm)?;
        let int = |what: &str, value: usize| {
            c_int::try_from(value)
                .or_else(|_| invalid(format!("{what} = {value} is too large for the library")))
        };
        let (m, n, k) = (int("n_out", n_out)?, int("n_rows", n_rows)?, int("n_in", n_in)?);
        let (x, w, out) = (&gemm.x.0, &gemm.w.0, &gemm.out.0);
        let [ld_x, ld_w, ld_out] = [x, w, out].map(|operand| int("row stride", operand.row_stride));
        let (ld_x, ld_w, ld_out) = (ld_x?, ld_w?, ld_out?);
        let open = &*self.open;
        let codes = codes(open.gpu.info().api);
        // The library is column-major: it sees the transpose of each row-major matrix. So it
        // computes outᵀ = wᵀ-or-w · xᵀ, where `out` and `x` need nothing done.
        let op_w = match gemm.layout {
            WeightLayout::OutIn => codes.transpose,
            WeightLayout::InOut => codes.no_transpose,
        };
        let (h, op_x, alpha, beta) = (open.handle, codes.no_transpose, &gemm.alpha, &gemm.beta);
        let (wa, wt, xa, xt) = (w.address, w.dtype.code(), x.address, x.dtype.code());
        let (oa, ot) = (out.address, out.dtype.code());
        let (f32_sums, algorithm) = (codes.compute_f32, codes.default_algorithm);
        self.stream.enter()?;
        let (name, status) = if n_batches == 1 {
            let f = open.gemm;
            // SAFETY: the matrices lie in their memory, which is freed after its use on the stream.
            let status = unsafe {
                (f.call)(
                    h, op_w, op_x, m, n, k, alpha, wa, wt, ld_w, xa, xt, ld_x, beta, oa, ot,
                    ld_out, f32_sums, algorithm,
                )
            };
            (f.name, status)
        } else {
            let f = open.gemm_batched;
            let n_batches = int("n_batches", n_batches)?;
            let [sw, sx, so] = [w, x, out].map(|operand| operand.batch_stride as i64);
            // SAFETY: as above.
            let status = unsafe {
                (f.call)(
                    h, op_w, op_x, m, n, k, alpha, wa, wt, ld_w, sw, xa, xt, ld_x, sx, beta, oa,
                    ot, ld_out, so, n_batches, f32_sums, algorithm,
                )
            };
            (f.name, status)
        };
        open.table.check(name, status)?;
        self.stream.keep(|| {
            let used = [x.memory, w.memory, out.memory].map(|memory| memory.clone() as Kept);
            used.into_iter().chain([self.open.clone() as Kept])
        });
        Ok(())
    }
}

impl Open {
    fn prepare(&mut self, library: &Loaded, api: Api, stream: &Stream) -> Result<(), GpuError> {
        // SAFETY: both live, and `Blas` keeps the stream.
        unsafe { self.table.set_stream(self.handle, stream.0.raw) }?;
        let name = ["cublasSetMathMode", "hipblasSetMathMode"][api as usize];
        // SAFETY: the type is that of the vendor's header for this name.
        let set: SetMathMode = unsafe { library.function(name)? };
        // SAFETY: the handle lives.
        self.table.check(name, unsafe { set(self.handle, codes(api).math_mode) })?;
        // After the stream, which takes a workspace away.
        let name = ["cublasSetWorkspace_v2", "hipblasSetWorkspace"][api as usize];
        // SAFETY: the type is that of the vendor's header for this name.
        let set: SetWorkspace = match unsafe { library.function(name) } {
            Ok(set) => set,
            Err(_) if api == Api::Rocm => return Ok(()),
            Err(error) => return Err(error),
        };
        let workspace = self.gpu.alloc::<u8>(WORKSPACE_BYTES)?;
        let at = ptr::without_provenance_mut(workspace.ptr().address() as usize);
        // SAFETY: the handle lives, and `self` keeps the workspace as long.
        self.table.check(name, unsafe { set(self.handle, at, WORKSPACE_BYTES) })?;
        self.workspace = Some(workspace);
        Ok(())
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        if self.gpu.enter().is_ok() {
            // SAFETY: created in `Blas::new` and destroyed here alone.
            let _ = unsafe { self.table.destroy(self.handle) };
        }
    }
}

fn codes(api: Api) -> Codes {
    match api {
        Api::Cuda => CUDA,
        Api::Rocm => ROCM,
    }
}

fn check(gemm: &Gemm<'_>) -> Result<(), GpuError> {
    let Gemm { n_rows, n_out, n_in, n_batches, layout, .. } = *gemm;
    let (x, w, out) = (&gemm.x.0, &gemm.w.0, &gemm.out.0);
    if n_in == 0 {
        return invalid("a product over no input");
    }
    if x.dtype != w.dtype || (out.dtype != x.dtype && out.dtype != DType::F32) {
        let (x, w, out) = (x.dtype, w.dtype, out.dtype);
        return invalid(format!("a product of {x:?} by {w:?} to {out:?}"));
    }
    let w_shape = match layout {
        WeightLayout::OutIn => [n_out, n_in],
        WeightLayout::InOut => [n_in, n_out],
    };
    x.check("x", n_batches, [n_rows, n_in])?;
    w.check("w", n_batches, w_shape)?;
    out.check("out", n_batches, [n_rows, n_out])?;
    // One batch behind another, or the batches side by side in each row.
    let end = |n: usize, stride: usize| (n - 1) * stride + n_out;
    let is_behind = out.batch_stride >= end(n_rows, out.row_stride);
    let is_beside = out.batch_stride >= n_out && out.row_stride >= end(n_batches, out.batch_stride);
    if n_batches > 1 && !is_behind && !is_beside {
        return invalid("the outputs of the batches overlap");
    }
    Ok(())
}

//! A GPU through its vendor's own libraries, loaded at run time by name.
//!
//! **Owns** the driver of CUDA and of ROCm behind one table, the run-time compilers with their
//! cache on disk, device and page-locked memory, streams, events, graphs, kernel launches, and
//! matrix products by the vendor's BLAS. One program serves machines with either vendor's GPU and
//! with none; nothing of theirs is needed to build it. **Must not know** tensors, models, requests,
//! or what a kernel computes.
//!
//! Invariants:
//! * Whatever lives on a device holds its [`Gpu`], so that it may be dropped in any order.
//! * A graph keeps alive what it was captured with, so that a replay never touches freed memory.
//! * A call that fails leaves no half of its effect: a failed capture leaves its stream usable.
//! * No failure passes unseen: each is an error with the vendor's name of the call and the vendor's
//!   text. `Drop` alone ignores failures, since those are of earlier launches.
//!
//! On AMD hardware nothing of this has run: the table for ROCm was tested against a stand-in.
//!
//! # Example
//!
//! ```
//! use gpu_runtime::{DeviceChoice, Gpu, Launch, Args, Program};
//!
//! const SOURCE: &str = r#"
//! extern "C" __global__ void twice(float *x, int n) {
//!     int i = blockIdx.x * blockDim.x + threadIdx.x;
//!     if (i < n) x[i] *= 2.0f;
//! }"#;
//!
//! let Some(gpu) = Gpu::open(&DeviceChoice::Auto)? else { return Ok(()) };
//! let stream = gpu.stream()?;
//! let sources = [("twice.cu", SOURCE)];
//! let module = gpu.compile(&Program { name: "twice", sources: &sources, defines: &[] })?;
//! let twice = module.kernel("twice")?;
//! let mut x = gpu.alloc::<f32>(1000)?;
//! stream.upload(&[1.5; 1000], &mut x)?;
//! let mut args = Args::new();
//! args.view_mut(x.view_mut()).i32(1000);
//! // SAFETY: the arguments are a pointer to 1000 elements and their number, as `twice` takes them.
//! unsafe { stream.launch(&twice, Launch::linear(4, 256), &args)? };
//! assert_eq!(stream.download(&x)?, [3.0; 1000]);
//! # Ok::<(), gpu_runtime::GpuError>(())
//! ```

#![expect(unsafe_code, reason = "foreign functions; each site says why it is sound")]

mod blas;
mod cache;
mod choice;
mod compiler;
mod driver;
mod error;
mod gpu;
mod graph;
mod library;
mod mailbox;
mod memory;
mod module;
mod stream;
mod tensor_map;

pub use blas::{Blas, DType, Gemm, GemmElement, Matrix, MatrixMut, WeightLayout};
pub use cache::{Found, kernel_cache_dir};
pub use choice::{DeviceChoice, ParseChoiceError};
pub use compiler::{Compiler, Program, compile_only};
pub use driver::Api;
pub use error::GpuError;
pub use gpu::{DeviceInfo, Gpu, GpuOptions, Memory};
pub use graph::Graph;
pub use library::Libraries;
pub use mailbox::{Inbox, Outbox};
pub use memory::{Buffer, Pinned, Pod, Ptr, View, ViewMut};
pub use module::{Args, Kernel, KernelResources, Launch, Module};
pub use stream::{Event, Stream, elapsed_ms};
pub use tensor_map::TensorMap;

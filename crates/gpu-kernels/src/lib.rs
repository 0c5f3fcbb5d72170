//! GPU kernels of DeepSeek and GLM layers, from one source for CUDA and ROCm.
//!
//! **Owns** the kernel sources (`src/cu`), which the vendor's compiler builds at run time for the
//! very device, and one shape-checked function for each kernel, a method of [`Kernels`]. **Must not
//! know** models, names of weights, requests or block ownership; large dense products are those of
//! [`gpu_runtime::Blas`].
//!
//! Invariants (numbered in `ARCHITECTURE.md`):
//! * A row's result does not depend on its batch mates, bit for bit \[INV-11]: each sum has one
//!   order, which the number of rows does not change, and nothing is added atomically.
//! * Sums are float32; what is stored is the element type of [`Kernels`]. Weights of norms, routers
//!   and the residual stream are float32: the stream's bytes are few beside the weights' (at 256
//!   rows of 2048 values, 1 MB more of 500 MB), and it is what rounding would hurt most.
//! * A padding row, whose `seq` is -1, computes nothing and writes nothing.
//! * Nothing is read back: every launch can be part of a captured graph. So what only the device
//!   knows is checked there: an index out of range writes nothing, or NaN where a function says so.
//!
//! To add a source of layer kernels: put it into `src/cu`, add it to `LAYERS` in `unit.rs`, name
//! its kernels in a `kernel_table!` of a module of its own, give [`Kernels`] the table as a field,
//! and write the functions as methods of [`Kernels`] in that module. These sources are one
//! translation unit behind `portable.cuh`: what a source does not share lies in a namespace of its
//! own, and kernels, which are `extern "C"`, have names that are unique there. A source whose sizes
//! the compiler must know (attention, indexer) is a unit of its own, built for those sizes by a
//! type of its own. `cargo xtask test rocm` compiles every unit for AMD's devices.
//!
//! # Example
//!
//! ```
//! use gpu_kernels::{Kernels, Norm, PassRows};
//! use gpu_runtime::{DeviceChoice, Gpu};
//!
//! let Some(gpu) = Gpu::open(&DeviceChoice::Auto)? else { return Ok(()) };
//! let stream = gpu.stream()?;
//! let kernels = Kernels::<f32>::new(&gpu, &stream)?;
//! let upload = |values: &[f32]| {
//!     let mut buffer = gpu.alloc::<f32>(values.len())?;
//!     stream.upload(values, &mut buffer).map(|()| buffer)
//! };
//! let (x, weight) = (upload(&[3.0; 8])?, upload(&[0.5; 8])?);
//! let (mut out, index) = (gpu.alloc::<f32>(8)?, gpu.alloc_zeroed::<i32>(1)?);
//! let index = index.view();
//! let rows = PassRows { n_rows: 1, seq: index, pos: index, slot: index };
//! kernels.rms_norm(rows, x.view(), Norm { weight: weight.view(), eps: 0.0 }, out.view_mut())?;
//! assert_eq!(stream.download(&out)?, [0.5; 8]);
//! # Ok::<(), gpu_runtime::GpuError>(())
//! ```

#![expect(unsafe_code, reason = "kernel launches; each site says what was checked before")]

use std::marker::PhantomData;

use gpu_runtime::{GemmElement, Gpu, GpuError, Module, Stream};

/// A struct of kernels, each named as in the source, and its `load` from a module.
macro_rules! kernel_table {
    ($table:ident { $($kernel:ident),* $(,)? }) => {
        #[derive(Debug)]
        pub(crate) struct $table {
            $($kernel: gpu_runtime::Kernel,)*
        }

        impl $table {
            #[cfg(test)]
            pub(crate) const NAMES: &[&str] = &[$(stringify!($kernel)),*];

            pub(crate) fn load(
                module: &gpu_runtime::Module,
            ) -> Result<Self, gpu_runtime::GpuError> {
                Ok(Self { $($kernel: module.kernel(stringify!($kernel))?,)* })
            }
        }
    };
}

mod attention;
mod begin;
mod check;
mod elementwise;
mod indexer;
mod moe;
mod norms;
mod prompt;
mod rope;
mod router;
mod sampling;
mod step;
mod unit;

pub use attention::{Mla, MlaBatch, MlaSizes, PagedRows, SelectedKeys, Splits};
pub use begin::{Begin, BeginState, OldState, SlotRecord};
pub use check::PassRows;
pub use indexer::{IndexBatch, IndexSizes, Indexer, SelectionMut};
pub use moe::{ExpertSum, Experts, MoeScratch, Routing};
pub use norms::{MtpInput, Norm};
pub use prompt::{KeyGroup, PromptAttention, PromptBatch, PromptSizes};
pub use rope::{Heads, IndexKeys, MlaLatents, RopeTable};
pub use router::{RouterScratch, RouterWeights, RoutingMut};
pub use sampling::{AcceptedRuns, Sampling, Windows};
pub use step::{Emitted, NextState, RowsMut, Slots, Step};

/// The kernels for weights, activations and caches of type `E`, on one stream.
///
/// Functions queue their work and return. Views may be longer than the shapes that a function
/// states; rows begin at multiples of 16 bytes, so that widths are multiples of 8.
#[derive(Debug)]
pub struct Kernels<E> {
    stream: Stream,
    norms: norms::Table,
    rope: rope::Table,
    elementwise: elementwise::Table,
    router: router::Table,
    moe: moe::Table,
    tiles: Vec<moe::Tile>,
    _element: PhantomData<E>,
}

impl<E: GemmElement> Kernels<E> {
    /// Compiles the sources for the device, or takes them from the kernel cache.
    ///
    /// # Errors
    ///
    /// As [`Gpu::compile`].
    pub fn new(gpu: &Gpu, stream: &Stream) -> Result<Self, GpuError> {
        let module = unit::LAYERS.build::<E>(gpu, &[])?;
        Self::load(gpu, stream, &module)
    }

    fn load(gpu: &Gpu, stream: &Stream, module: &Module) -> Result<Self, GpuError> {
        Ok(Self {
            stream: stream.clone(),
            norms: norms::Table::load(module)?,
            rope: rope::Table::load(module)?,
            elementwise: elementwise::Table::load(module)?,
            router: router::Table::load::<E>(gpu, module)?,
            moe: moe::Table::load(module)?,
            tiles: moe::Tile::load_all::<E>(gpu, module)?,
            _element: PhantomData,
        })
    }
}

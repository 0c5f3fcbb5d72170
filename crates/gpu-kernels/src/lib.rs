//! GPU kernels of DeepSeek and GLM layers, from one source for CUDA and ROCm.
//!
//! **Owns** the kernel sources (`src/cu`), which the vendor's compiler builds at run time for the
//! very device, and one shape-checked function for each kernel, a method of [`Kernels`]. **Must not
//! know** models, weights' names, requests or block ownership; large dense products are
//! [`gpu_runtime`]'s BLAS.
//!
//! Invariants (numbered in `ARCHITECTURE.md`):
//! * A row's result does not depend on its batch mates, bit for bit \[INV-11]: each sum has one
//!   order, which the number of rows does not change, and nothing is added atomically.
//! * Sums are float32; what is stored is the module's [`Element`].
//! * A padding row, whose `row_seq` is -1, computes nothing and writes nothing.
//! * Nothing is read back: every launch can be part of a captured graph. So an index that only the
//!   device knows is checked there, and one out of range writes nothing, or NaN where the kernel
//!   says so.
//!
//! To add a source: put it into `src/cu`, add it to `SOURCES`, and give its kernels a table with
//! `kernel_table!` in a module of their own, which [`Kernels`] holds. All sources are one
//! translation unit behind `portable.cuh`: what a source does not share lies in a namespace of its
//! own, and kernels, which are `extern "C"`, have names that are unique in the crate.

#![expect(unsafe_code, reason = "kernel launches; each site says what was checked before")]

/// The sources of a module, in their order.
const SOURCES: &[(&str, &str)] = &[("portable.cuh", include_str!("cu/portable.cuh"))];

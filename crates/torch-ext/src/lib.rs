//! The unsafe seam to libtorch: tensors as slices, threads and devices.

pub mod mmap;

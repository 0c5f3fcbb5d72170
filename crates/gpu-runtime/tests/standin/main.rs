//! The crate against stand-ins of both vendors' libraries: no GPU is needed.

#![expect(unsafe_code, reason = "launches; each site says why it is sound")]
#![expect(clippy::unwrap_used, reason = "a failure in a test's helper is a failure of the test")]

mod blas;
mod compile;
mod device;
mod graphs;
mod libraries;

/// Both vendors: the same test runs against both tables.
const BOTH: [gpu_runtime::Api; 2] = [gpu_runtime::Api::Cuda, gpu_runtime::Api::Rocm];

const SOURCE: [(&str, &str); 2] = [("add_one.cu", "kernel"), ("portable.cuh", "header")];

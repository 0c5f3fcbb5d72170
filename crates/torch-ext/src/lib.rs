//! The unsafe seam to libtorch: tensors as slices, and files as memory.
//!
//! **Owns** every unsafe line between libtorch's C++ objects and Rust: [`slice()`] and
//! [`slice_mut`] see a CPU tensor as a slice, [`mmap`] maps checkpoint files. **Must not know**
//! layers, models, requests or checkpoint formats.
//!
//! **Invariants**: a slice is handed out only for a contiguous CPU tensor of the element's dtype;
//! it covers exactly the elements of the tensor.
//!
//! A libtorch tensor shares its storage with its views and shallow clones, which the borrow
//! checker cannot see. While a slice of a tensor lives, nothing that shares its storage may be
//! written by other means.
//!
//! # Example
//!
//! ```
//! use tch::Tensor;
//! use torch_ext::{slice, slice_mut};
//!
//! let mut rows = Tensor::from_slice(&[1.0f32, 2.0, 3.0, 4.0]).view([2, 2]);
//! slice_mut::<f32>(&mut rows)?[3] = 5.0;
//! assert_eq!(slice::<f32>(&rows)?, [1.0, 2.0, 3.0, 5.0]);
//! // A transposed view is not contiguous.
//! assert!(slice::<f32>(&rows.tr()).is_err());
//! # Ok::<(), torch_ext::TensorError>(())
//! ```

mod error;
mod heap;
pub mod mmap;
mod views;

pub use error::TensorError;
pub use heap::LoadingHeap;
pub use views::{Element, empty, slice, slice_mut};

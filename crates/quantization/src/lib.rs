//! Quantised weight matrices as plain data: number formats, scales, exact values.
//!
//! **Owns** the codes of weights in E4M3 and E2M1, the layouts of their scales, and what both mean:
//! an element is `code * scale`, one product in f32. **Must not know** files, configurations or
//! tensors. No dependency.
//!
//! # Invariants
//!
//! The codes and scales of a [`QuantizedMatrix`] fit its shape, and no scale and no element is NaN
//! or infinite.
//!
//! # Example
//!
//! A block of 2 × 2 over three rows: the last one has a block row of its own.
//!
//! ```
//! use quantization::{Codes, QuantizedMatrix, Scales};
//!
//! # fn main() -> Result<(), quantization::QuantizationError> {
//! let ones = Codes::E4m3(vec![0x38; 6]);
//! let scales = Scales::Blocks { block: [2, 2], values: vec![2.0, 3.0] };
//! let matrix = QuantizedMatrix::new([3, 2], ones, scales)?;
//! let mut row = [0.0; 2];
//! matrix.dequantize_row(1, &mut row);
//! assert_eq!(row, [2.0, 2.0]);
//! matrix.dequantize_row(2, &mut row);
//! assert_eq!(row, [3.0, 3.0]);
//! # Ok(())
//! # }
//! ```

mod codecs;
mod error;
mod matrix;

pub use codecs::{E2M1, E4M3, e8m0};
pub use error::QuantizationError;
pub use matrix::{Codes, QuantizedMatrix, Scales};

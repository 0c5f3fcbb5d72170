//! Why codes and scales are not a matrix.

use std::fmt;

/// Why codes and scales are not a matrix.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum QuantizationError {
    /// The matrix is too large to address, or its number of columns is odd and two share a byte.
    Shape {
        /// `[n_out, n_in]`.
        shape: [usize; 2],
    },
    /// A block or group has no elements.
    EmptyBlock,
    /// The number of code bytes is not that of the shape.
    CodeCount {
        /// What the shape needs.
        expected: usize,
        /// What there is.
        actual: usize,
    },
    /// The number of scales is not that of the shape and the blocks.
    ScaleCount {
        /// What the shape needs.
        expected: [usize; 2],
        /// What there is.
        actual: usize,
    },
    /// A scale is NaN or infinite.
    Scale {
        /// Its place in row-major order.
        index: usize,
    },
    /// An element is NaN by its code, or its product with its scale is beyond f32.
    Value {
        /// Its row.
        row: usize,
        /// Its column.
        column: usize,
    },
}

impl fmt::Display for QuantizationError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Shape { shape: [n_out, n_in] } => {
                write!(f, "a matrix [{n_out}, {n_in}] cannot be held in these codes")
            }
            Self::EmptyBlock => write!(f, "a block of scales has no elements"),
            Self::CodeCount { expected, actual } => {
                write!(f, "{actual} bytes of codes where the shape needs {expected}")
            }
            Self::ScaleCount { expected: [rows, columns], actual } => {
                write!(f, "{actual} scales where the shape needs [{rows}, {columns}]")
            }
            Self::Scale { index } => write!(f, "scale {index} is NaN or infinite"),
            Self::Value { row, column } => {
                write!(f, "element [{row}, {column}] is NaN or infinite")
            }
        }
    }
}

impl std::error::Error for QuantizationError {}

//! A matrix of codes and their scales.

use crate::codecs::{E2M1, E4M3, e8m0};
use crate::error::QuantizationError;

/// An E4M3 code of NaN without its sign.
const E4M3_NAN: u8 = 0x7f;
/// Codes that are looked through at once.
const NAN_CHUNK: usize = 1 << 14;

/// The elements of a matrix before scaling, row by row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Codes {
    /// `[n_out, n_in]`, one byte an element.
    E4m3(Vec<u8>),
    /// `[n_out, n_in / 2]`, two elements a byte: the low nibble is the even column.
    E2m1(Vec<u8>),
}

/// What the elements are multiplied with.
#[derive(Clone, Debug, PartialEq)]
pub enum Scales {
    /// One f32 for each tile of `block` = `[rows, columns]`; the tiles at the lower and right edge
    /// may be smaller. One scale a channel is a block `[1, n_in]`, one a tensor `[n_out, n_in]`.
    Blocks {
        /// Rows and columns of a tile, both at least 1.
        block: [usize; 2],
        /// `[ceil(n_out / rows), ceil(n_in / columns)]`.
        values: Vec<f32>,
    },
    /// One E8M0 exponent for each `group` columns of a row.
    Groups {
        /// Columns that share an exponent, at least 1.
        group: usize,
        /// `[n_out, ceil(n_in / group)]`.
        exponents: Vec<u8>,
    },
}

/// A weight `[n_out, n_in]` as codes and scales; an element is `code * scale`, in f32.
#[derive(Clone, Debug, PartialEq)]
pub struct QuantizedMatrix {
    n_out: usize,
    n_in: usize,
    codes: Codes,
    scales: Scales,
}

impl QuantizedMatrix {
    /// A matrix of `shape` = `[n_out, n_in]`.
    ///
    /// # Errors
    ///
    /// If the codes or the scales do not fit the shape, or one of the scales or elements is NaN or
    /// infinite.
    pub fn new(shape: [usize; 2], codes: Codes, scales: Scales) -> Result<Self, QuantizationError> {
        let [n_out, n_in] = shape;
        let n_elements = n_out.checked_mul(n_in).ok_or(QuantizationError::Shape { shape })?;
        let (expected, actual) = match &codes {
            Codes::E4m3(codes) => (n_elements, codes.len()),
            Codes::E2m1(_) if n_in % 2 == 1 => return Err(QuantizationError::Shape { shape }),
            Codes::E2m1(codes) => (n_elements / 2, codes.len()),
        };
        if actual != expected {
            return Err(QuantizationError::CodeCount { expected, actual });
        }
        scales.check(shape)?;
        let matrix = Self { n_out, n_in, codes, scales };
        matrix.check_values()?;
        Ok(matrix)
    }

    /// Codes of NaN and products beyond f32 would make every token NaN.
    fn check_values(&self) -> Result<(), QuantizationError> {
        let (has_nan, largest) = match &self.codes {
            Codes::E4m3(codes) => (codes.chunks(NAN_CHUNK).any(has_nan), E4M3[0x7e]),
            Codes::E2m1(_) => (false, E2M1[7]),
        };
        if !has_nan && (self.scales.largest() * largest).is_finite() {
            return Ok(());
        }
        let mut values = vec![0.0; self.n_in];
        for row in 0..self.n_out {
            self.dequantize_row(row, &mut values);
            if let Some(column) = values.iter().position(|value| !value.is_finite()) {
                return Err(QuantizationError::Value { row, column });
            }
        }
        Ok(())
    }

    /// Rows of the matrix: outputs of its linear layer.
    pub fn n_out(&self) -> usize {
        self.n_out
    }

    /// Columns of the matrix: inputs of its linear layer.
    pub fn n_in(&self) -> usize {
        self.n_in
    }

    /// The elements before scaling.
    pub fn codes(&self) -> &Codes {
        &self.codes
    }

    /// What the elements are multiplied with.
    pub fn scales(&self) -> &Scales {
        &self.scales
    }

    /// The matrix in parts: its codes and its scales.
    pub fn into_parts(self) -> (Codes, Scales) {
        (self.codes, self.scales)
    }

    /// Bytes of the codes and the scales.
    pub fn n_bytes(&self) -> usize {
        let (Codes::E4m3(codes) | Codes::E2m1(codes)) = &self.codes;
        let scales = match &self.scales {
            Scales::Blocks { values, .. } => size_of_val(values.as_slice()),
            Scales::Groups { exponents, .. } => exponents.len(),
        };
        codes.len() + scales
    }

    /// Writes the values of a row `[n_in]`.
    ///
    /// # Panics
    ///
    /// If there is no such row, or `out` is not as long as one.
    pub fn dequantize_row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.n_out, "row {row} of {}", self.n_out);
        assert_eq!(out.len(), self.n_in, "out is [n_in]");
        match &self.codes {
            Codes::E4m3(codes) => {
                for (value, &code) in out.iter_mut().zip(&codes[row * self.n_in..]) {
                    *value = E4M3[usize::from(code)];
                }
            }
            Codes::E2m1(codes) => {
                let codes = &codes[row * self.n_in / 2..];
                for (pair, &code) in out.chunks_exact_mut(2).zip(codes) {
                    pair[0] = E2M1[usize::from(code & 0xf)];
                    pair[1] = E2M1[usize::from(code >> 4)];
                }
            }
        }
        match &self.scales {
            Scales::Blocks { block: [rows, columns], values } => {
                let first = row / rows * self.n_in.div_ceil(*columns);
                scale(out, *columns, values[first..].iter().copied());
            }
            Scales::Groups { group, exponents } => {
                let first = row * self.n_in.div_ceil(*group);
                scale(out, *group, exponents[first..].iter().map(|&code| e8m0(code)));
            }
        }
    }
}

impl Scales {
    /// The greatest magnitude.
    fn largest(&self) -> f32 {
        match self {
            Self::Blocks { values, .. } => {
                values.iter().fold(0.0, |max, value| max.max(value.abs()))
            }
            Self::Groups { exponents, .. } => {
                exponents.iter().max().map_or(0.0, |&code| e8m0(code))
            }
        }
    }

    fn check(&self, [n_out, n_in]: [usize; 2]) -> Result<(), QuantizationError> {
        let ([rows, columns], actual) = match self {
            Self::Blocks { block, values } => (*block, values.len()),
            Self::Groups { group, exponents } => ([1, *group], exponents.len()),
        };
        if rows == 0 || columns == 0 {
            return Err(QuantizationError::EmptyBlock);
        }
        // No more scales than elements, whose number has been found to fit.
        let expected = [n_out.div_ceil(rows), n_in.div_ceil(columns)];
        if actual != expected[0] * expected[1] {
            return Err(QuantizationError::ScaleCount { expected, actual });
        }
        let bad = match self {
            Self::Blocks { values, .. } => values.iter().position(|value| !value.is_finite()),
            Self::Groups { exponents, .. } => exponents.iter().position(|&code| code == u8::MAX),
        };
        bad.map_or(Ok(()), |index| Err(QuantizationError::Scale { index }))
    }
}

/// Without a branch for each code, so that it takes less time than reading them.
fn has_nan(codes: &[u8]) -> bool {
    codes.iter().fold(false, |found, code| found | (code & E4M3_NAN == E4M3_NAN))
}

fn scale(out: &mut [f32], n_columns: usize, scales: impl Iterator<Item = f32>) {
    for (values, scale) in out.chunks_mut(n_columns).zip(scales) {
        values.iter_mut().for_each(|value| *value *= scale);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(matrix: &QuantizedMatrix) -> Vec<Vec<f32>> {
        let row = |row| {
            let mut out = vec![f32::NAN; matrix.n_in()];
            matrix.dequantize_row(row, &mut out);
            out
        };
        (0..matrix.n_out()).map(row).collect()
    }

    fn ones(shape: [usize; 2], block: [usize; 2], values: &[f32]) -> QuantizedMatrix {
        let codes = Codes::E4m3(vec![0x38; shape[0] * shape[1]]);
        let scales = Scales::Blocks { block, values: values.to_vec() };
        QuantizedMatrix::new(shape, codes, scales).unwrap()
    }

    #[test]
    fn the_last_block_may_be_smaller() {
        let tall = ones([6, 4], [4, 4], &[2.0, 3.0]);
        assert_eq!(rows(&tall), [[2.0; 4], [2.0; 4], [2.0; 4], [2.0; 4], [3.0; 4], [3.0; 4]]);
        let wide = ones([2, 6], [4, 4], &[2.0, 3.0]);
        assert_eq!(rows(&wide), [[2.0, 2.0, 2.0, 2.0, 3.0, 3.0]; 2]);
        let both = ones([3, 3], [2, 2], &[1.0, 2.0, 3.0, 4.0]);
        assert_eq!(rows(&both), [[1.0, 1.0, 2.0], [1.0, 1.0, 2.0], [3.0, 3.0, 4.0]]);
    }

    #[test]
    fn channels_and_tensors_are_blocks() {
        let channels = ones([3, 2], [1, 2], &[1.0, 2.0, 3.0]);
        assert_eq!(rows(&channels), [[1.0; 2], [2.0; 2], [3.0; 2]]);
        assert_eq!(rows(&ones([3, 2], [3, 2], &[0.5])), [[0.5; 2]; 3]);
        assert_eq!(channels.n_bytes(), 6 + 12);
    }

    #[test]
    fn the_low_nibble_is_the_even_column() {
        // 0.5 then 6, -1.5 then 4; the second row -6 then 0, 1 then -0.
        let codes = Codes::E2m1(vec![0x71, 0x6b, 0x0f, 0x82]);
        let scales = Scales::Groups { group: 2, exponents: vec![127, 128, 0, 254] };
        let matrix = QuantizedMatrix::new([2, 4], codes, scales).unwrap();
        let smallest = 2_f32.powi(-127);
        let want = [[0.5, 6.0, -3.0, 8.0], [-6.0 * smallest, 0.0, 2_f32.powi(127), -0.0]];
        assert_eq!(rows(&matrix), want);
        assert_eq!(matrix.n_bytes(), 8);
    }

    #[test]
    fn every_product_of_a_code_and_a_scale_is_one_rounding() {
        for scale in [1.0_f32, 0.1, 3.0e-5, 1.7e-39, 7.0e35] {
            let codes: Vec<u8> = (0..=u8::MAX).filter(|code| code & 0x7f != 0x7f).collect();
            let shape = [1, codes.len()];
            let scales = Scales::Blocks { block: shape, values: vec![scale] };
            let matrix = QuantizedMatrix::new(shape, Codes::E4m3(codes.clone()), scales).unwrap();
            for (got, code) in rows(&matrix)[0].iter().zip(codes) {
                // A product of an f32 and four significant bits is exact in f64.
                let want = f64::from(E4M3[usize::from(code)]) * f64::from(scale);
                assert_eq!(*got, want as f32, "{code:#04x} * {scale}");
            }
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let new = |shape, codes, block, n_scales| {
            let scales = Scales::Blocks { block, values: vec![1.0; n_scales] };
            QuantizedMatrix::new(shape, codes, scales).unwrap_err()
        };
        let bytes = |n| Codes::E4m3(vec![0; n]);
        let expected = [2, 1];
        assert_eq!(
            new([6, 4], bytes(24), [4, 4], 1),
            QuantizationError::ScaleCount { expected, actual: 1 }
        );
        assert_eq!(
            new([6, 4], bytes(23), [4, 4], 2),
            QuantizationError::CodeCount { expected: 24, actual: 23 }
        );
        assert_eq!(new([6, 4], bytes(24), [4, 0], 2), QuantizationError::EmptyBlock);
        let odd = QuantizationError::Shape { shape: [2, 3] };
        assert_eq!(new([2, 3], Codes::E2m1(vec![0; 3]), [1, 1], 6), odd);
        let huge = QuantizationError::Shape { shape: [usize::MAX, 2] };
        assert_eq!(new([usize::MAX, 2], bytes(2), [1, 1], 2), huge);
    }

    #[test]
    fn scales_are_finite() {
        for bad in [f32::NAN, f32::INFINITY] {
            let scales = Scales::Blocks { block: [1, 1], values: vec![1.0, bad] };
            let refused = QuantizedMatrix::new([1, 2], Codes::E4m3(vec![0; 2]), scales);
            assert_eq!(refused, Err(QuantizationError::Scale { index: 1 }));
        }
        let scales = Scales::Groups { group: 32, exponents: vec![255] };
        let refused = QuantizedMatrix::new([1, 32], Codes::E2m1(vec![0; 16]), scales);
        assert_eq!(refused, Err(QuantizationError::Scale { index: 0 }));
    }

    #[test]
    fn elements_are_finite() {
        let check = |codes: Codes, scales, expected: Result<(), [usize; 2]>| {
            let result = QuantizedMatrix::new([2, 32], codes, scales).map(|_| ());
            let expected =
                expected.map_err(|[row, column]| QuantizationError::Value { row, column });
            assert_eq!(result, expected);
        };
        let e4m3 = |at: usize, code| {
            let mut codes = vec![0; 64];
            codes[at] = code;
            Codes::E4m3(codes)
        };
        let whole = |scale| Scales::Blocks { block: [2, 32], values: vec![scale] };
        for nan in [0x7f, 0xff] {
            check(e4m3(35, nan), whole(1.0), Err([1, 3]));
        }
        // 448 and 256 times a scale that f32 has room for.
        let half = -f32::MAX / 256.0;
        check(e4m3(7, 0x7e), whole(half), Err([0, 7]));
        check(e4m3(7, 0x78), whole(half), Ok(()));
        let groups = || Scales::Groups { group: 32, exponents: vec![127, 254] };
        // 0.5 to 6 times 2^127: only from 2 on there is no room.
        let e2m1 = |code| Codes::E2m1([vec![0x77; 16], vec![0, code], vec![0; 14]].concat());
        for (code, expected) in [(0x33, Ok(())), (0x40, Err([1, 3])), (0x0c, Err([1, 2]))] {
            check(e2m1(code), groups(), expected);
        }
    }
}

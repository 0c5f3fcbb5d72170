//! Quantised matrices: read from their shards, and dequantised.

use std::sync::Arc;

use checkpoint_files::Entry;
use half::{bf16, f16};
use quantization::{Codes, QuantizationError, QuantizedMatrix, Scales, e8m0};
use rayon::prelude::*;
use safetensors::Dtype;
use tch::{Kind, Tensor};
use torch_ext::{Element, TensorError, empty, slice_mut};

use crate::error::WeightsError;
use crate::shard::Shard;

/// A weight as a model takes it.
#[derive(Debug)]
pub enum LoadedWeight {
    /// In the dtype that the model computes in, or float32 where that was asked for.
    Dense(Tensor),
    /// As it is in the file, in host memory.
    Quantized(Arc<QuantizedMatrix>),
}

impl LoadedWeight {
    /// Its shape.
    #[must_use]
    pub fn size(&self) -> Vec<i64> {
        match self {
            Self::Dense(tensor) => tensor.size(),
            Self::Quantized(matrix) => vec![matrix.n_out() as i64, matrix.n_in() as i64],
        }
    }

    /// Its values, those of a quantised weight in float32.
    ///
    /// # Errors
    ///
    /// [`TensorError`] if memory is short.
    pub fn to_tensor(&self) -> Result<Tensor, TensorError> {
        match self {
            Self::Dense(tensor) => Ok(tensor.shallow_clone()),
            Self::Quantized(matrix) => dequantize(matrix, Kind::Float),
        }
    }
}

impl From<Tensor> for LoadedWeight {
    fn from(tensor: Tensor) -> Self {
        Self::Dense(tensor)
    }
}

/// The same tensor, not copied.
impl From<&Tensor> for LoadedWeight {
    fn from(tensor: &Tensor) -> Self {
        Self::Dense(tensor.shallow_clone())
    }
}

/// The same weight, not copied.
impl From<&LoadedWeight> for LoadedWeight {
    fn from(weight: &LoadedWeight) -> Self {
        match weight {
            Self::Dense(tensor) => tensor.into(),
            Self::Quantized(matrix) => Self::Quantized(Arc::clone(matrix)),
        }
    }
}

/// Where a quantised matrix lies.
#[derive(Debug)]
pub(crate) struct PackedSource {
    /// `[n_out, n_in]`.
    pub(crate) shape: [usize; 2],
    pub(crate) is_e2m1: bool,
    /// Which elements share a scale, `[rows, columns]`.
    pub(crate) block: [usize; 2],
    pub(crate) codes: (Arc<Shard>, Entry),
    pub(crate) scales: (Arc<Shard>, Entry),
}

impl PackedSource {
    pub(crate) fn n_bytes(&self) -> u64 {
        (self.codes.1.bytes.len() + self.scales.1.bytes.len()) as u64
    }

    pub(crate) fn read(&self, name: &str) -> Result<QuantizedMatrix, WeightsError> {
        let (shard, entry) = &self.codes;
        let codes = shard.read(entry, <[u8]>::to_vec);
        let codes = if self.is_e2m1 { Codes::E2m1(codes) } else { Codes::E4m3(codes) };
        let (shard, entry) = &self.scales;
        let scales = shard.read(entry, |bytes| scales(bytes, entry.dtype, self.block));
        QuantizedMatrix::new(self.shape, codes, scales).map_err(|source| {
            let shard = match source {
                QuantizationError::Value { .. } => &self.codes.0,
                _ => shard,
            };
            let (name, file) = (name.to_owned(), shard.file.clone());
            WeightsError::Quantization { name, file, source }
        })
    }
}

/// Scales from bytes of a dtype that scales may have.
fn scales(bytes: &[u8], dtype: Dtype, block: [usize; 2]) -> Scales {
    let values = match dtype {
        Dtype::F32 => values(bytes, f32::from_le_bytes),
        Dtype::F16 => values(bytes, |value| f16::from_le_bytes(value).to_f32()),
        Dtype::BF16 => values(bytes, |value| bf16::from_le_bytes(value).to_f32()),
        _ if block[0] == 1 => {
            return Scales::Groups { group: block[1], exponents: bytes.to_vec() };
        }
        _ => values(bytes, |[code]| e8m0(code)),
    };
    Scales::Blocks { block, values }
}

fn values<const N: usize>(bytes: &[u8], value: impl Fn([u8; N]) -> f32) -> Vec<f32> {
    bytes.as_chunks::<N>().0.iter().map(|&bytes| value(bytes)).collect()
}

/// The values of a matrix as a tensor `[n_out, n_in]` of `kind`: each one product in f32, rounded
/// once to nearest, ties to even.
pub(crate) fn dequantize(matrix: &QuantizedMatrix, kind: Kind) -> Result<Tensor, TensorError> {
    let shape = [matrix.n_out() as i64, matrix.n_in() as i64];
    if kind == Kind::BFloat16 {
        let mut tensor = empty::<bf16>(&shape)?;
        fill(matrix, slice_mut(&mut tensor)?, bf16::from_f32);
        return Ok(tensor);
    }
    let mut tensor = empty::<f32>(&shape)?;
    fill(matrix, slice_mut(&mut tensor)?, |value: f32| value);
    Ok(tensor.f_to_kind(kind)?)
}

fn fill<T: Element + Send>(
    matrix: &QuantizedMatrix,
    out: &mut [T],
    convert: impl Fn(f32) -> T + Sync,
) {
    let n_in = matrix.n_in();
    let rows = out.par_chunks_mut(n_in.max(1)).enumerate();
    rows.for_each_init(
        || vec![0.0; n_in],
        |values, (row, out)| {
            matrix.dequantize_row(row, values);
            out.iter_mut().zip(values).for_each(|(out, value)| *out = convert(*value));
        },
    );
}

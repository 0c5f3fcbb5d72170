//! Stored bytes or dummy values to tensors, over the threads of the current rayon pool.

use half::{bf16, f16};
use model_config::TensorSpec;
use rayon::prelude::*;
use safetensors::Dtype;
use tch::{Kind, Tensor};
use torch_ext::{Element, TensorError, empty, slice_mut};

use crate::dummy;

/// Values of a task.
const CHUNK: usize = 1 << 18;

/// The libtorch kind of a stored dtype; `None` if it cannot be loaded.
pub(crate) fn kind_of(dtype: Dtype) -> Option<Kind> {
    match dtype {
        Dtype::F32 => Some(Kind::Float),
        Dtype::F16 => Some(Kind::Half),
        Dtype::BF16 => Some(Kind::BFloat16),
        _ => None,
    }
}

/// A tensor of `kind` in host memory from the little-endian values of `stored`, which are as many
/// as `shape` says. Rounds to nearest, ties to even.
pub(crate) fn to_tensor(
    bytes: &[u8],
    shape: &[usize],
    (stored, kind): (Kind, Kind),
) -> Result<Tensor, TensorError> {
    let shape = sizes(shape);
    if kind == Kind::BFloat16 {
        let mut tensor = empty::<bf16>(&shape)?;
        let out = slice_mut(&mut tensor)?;
        match stored {
            Kind::BFloat16 => fill(bytes, out, bf16::from_le_bytes),
            Kind::Half => fill(bytes, out, |value| bf16::from_f32(half(value))),
            _ => fill(bytes, out, |value| bf16::from_f32(f32::from_le_bytes(value))),
        }
        return Ok(tensor);
    }
    let mut tensor = empty::<f32>(&shape)?;
    let out = slice_mut(&mut tensor)?;
    match stored {
        Kind::BFloat16 => fill(bytes, out, |value| bf16::from_le_bytes(value).to_f32()),
        Kind::Half => fill(bytes, out, half),
        _ => fill(bytes, out, f32::from_le_bytes),
    }
    Ok(tensor.f_to_kind(kind)?)
}

/// Dummy values of a tensor.
pub(crate) fn dummy_tensor(
    spec: &TensorSpec,
    seed: u64,
    kind: Kind,
) -> Result<Tensor, TensorError> {
    let shape = sizes(&spec.shape);
    // Rounded on the way, so that a large tensor needs no second copy.
    if kind == Kind::BFloat16 {
        let mut tensor = empty::<bf16>(&shape)?;
        dummy::fill(spec, seed, slice_mut(&mut tensor)?, bf16::from_f32);
        return Ok(tensor);
    }
    let mut tensor = empty::<f32>(&shape)?;
    dummy::fill(spec, seed, slice_mut(&mut tensor)?, |value: f32| value);
    Ok(tensor.f_to_kind(kind)?)
}

fn half(value: [u8; 2]) -> f32 {
    f16::from_le_bytes(value).to_f32()
}

/// A shape as libtorch wants it.
fn sizes(shape: &[usize]) -> Vec<i64> {
    shape.iter().map(|&n| n as i64).collect()
}

fn fill<const N: usize, T: Element + Send>(
    bytes: &[u8],
    out: &mut [T],
    convert: impl Fn([u8; N]) -> T + Sync,
) {
    assert_eq!(bytes.len(), N * out.len(), "a header's lengths agree with its shapes");
    let chunks = out.par_chunks_mut(CHUNK).zip(bytes.par_chunks(CHUNK * N));
    chunks.for_each(|(out, bytes)| {
        for (out, &bytes) in out.iter_mut().zip(bytes.as_chunks::<N>().0) {
            *out = convert(bytes);
        }
    });
}

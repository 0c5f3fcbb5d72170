//! Which implementation a layer uses.

use half::bf16;
use kernels::PackedLinear;
use tch::{Device, Kind, Tensor};
use torch_ext::{TensorError, slice};
use weights::LoadedWeight;

/// Which implementation a layer uses; chosen once, when it is built.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ops {
    /// Plain tensor operations on any device. Activations have the dtype of the weights; one that
    /// is quantised becomes float32.
    Torch,
    /// Fused kernels over packed weights, on the CPU. Activations are float32; weights stay
    /// float32, bfloat16 or quantised.
    Fused,
}

impl Ops {
    /// What a device runs best.
    #[must_use]
    pub fn for_device(device: Device) -> Self {
        if device == Device::Cpu { Self::Fused } else { Self::Torch }
    }
}

/// Packs a weight `[n_out, n_in]`.
pub(crate) fn pack(weight: &LoadedWeight) -> Result<PackedLinear, TensorError> {
    let n_in = matrix(weight)?.1;
    let tensor = match weight {
        LoadedWeight::Quantized(matrix) => return Ok(PackedLinear::from_quantized(matrix)),
        LoadedWeight::Dense(tensor) => tensor.f_contiguous()?,
    };
    if tensor.f_kind()? == Kind::BFloat16 {
        return Ok(PackedLinear::from_bf16(slice::<bf16>(&tensor)?, n_in));
    }
    Ok(PackedLinear::from_f32(slice(&tensor)?, n_in))
}

/// The sizes `(n_out, n_in)` of a weight.
pub(crate) fn matrix(weight: &LoadedWeight) -> Result<(usize, usize), TensorError> {
    match weight.size()[..] {
        [n_out, n_in] if n_out > 0 && n_in > 0 => Ok((n_out as usize, n_in as usize)),
        _ => Err(wrong_shape("a weight", weight, vec![-1, -1])),
    }
}

pub(crate) fn wrong_shape(
    what: &'static str,
    weight: &LoadedWeight,
    expected: Vec<i64>,
) -> TensorError {
    TensorError::WrongShape { what, found: weight.size(), expected }
}

/// The rows of `x`, checked to be of `width` values, and how many there are.
pub(crate) fn rows(x: &Tensor, width: usize) -> Result<(&[f32], usize), TensorError> {
    let size = x.size();
    if size.len() != 2 || size[1] != width as i64 {
        return Err(TensorError::WrongShape {
            what: "the input of a layer",
            found: size,
            expected: vec![-1, width as i64],
        });
    }
    Ok((slice(x)?, size[0] as usize))
}

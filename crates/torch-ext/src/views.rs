//! CPU tensors as slices.

use half::bf16;
use tch::{Device, Kind, Tensor};

use crate::error::TensorError;

/// An element type that has a libtorch dtype of the same memory layout.
pub trait Element: Copy + sealed::Sealed {
    /// The dtype.
    const KIND: Kind;
}

mod sealed {
    /// Keeps [`super::Element`] to the types of this module.
    pub trait Sealed {}
}

macro_rules! elements {
    ($($element:ty => $kind:ident),*) => {
        $(
            impl sealed::Sealed for $element {}
            impl Element for $element {
                const KIND: Kind = Kind::$kind;
            }
        )*
    };
}

elements!(u8 => Uint8, f32 => Float, bf16 => BFloat16, i32 => Int, i64 => Int64);

/// The elements of a contiguous CPU tensor, in row-major order.
///
/// Nothing that shares the tensor's storage may be written by other means while the slice lives.
///
/// # Errors
///
/// [`TensorError`] if the tensor is on another device, of another dtype or not contiguous.
#[expect(unsafe_code, reason = "the elements belong to a C++ object")]
pub fn slice<T: Element>(tensor: &Tensor) -> Result<&[T], TensorError> {
    let n_elements = check::<T>(tensor)?;
    if n_elements == 0 {
        return Ok(&[]);
    }
    // SAFETY: `check` found a contiguous CPU tensor of T, so that its data pointer is valid for
    // `n_elements` values of T, every bit pattern of which is a value. The storage lives as long
    // as the tensor, which the result borrows. That nobody writes to it is the crate's contract.
    Ok(unsafe { std::slice::from_raw_parts(tensor.data_ptr().cast::<T>(), n_elements) })
}

/// As [`slice()`], to write to.
///
/// # Errors
///
/// As [`slice()`].
#[expect(unsafe_code, reason = "the elements belong to a C++ object")]
pub fn slice_mut<T: Element>(tensor: &mut Tensor) -> Result<&mut [T], TensorError> {
    let n_elements = check::<T>(tensor)?;
    if n_elements == 0 {
        return Ok(&mut []);
    }
    // SAFETY: as in `slice`; the tensor is borrowed exclusively, and that nothing else reads or
    // writes its storage is the crate's contract.
    Ok(unsafe { std::slice::from_raw_parts_mut(tensor.data_ptr().cast::<T>(), n_elements) })
}

/// A contiguous CPU tensor whose elements are arbitrary until they are written.
///
/// # Errors
///
/// [`TensorError::Torch`] if memory is short.
pub fn empty<T: Element>(shape: &[i64]) -> Result<Tensor, TensorError> {
    Ok(Tensor::f_empty(shape, (T::KIND, Device::Cpu))?)
}

fn check<T: Element>(tensor: &Tensor) -> Result<usize, TensorError> {
    let device = tensor.device();
    if device != Device::Cpu {
        return Err(TensorError::NotOnCpu(device));
    }
    let found = tensor.f_kind()?;
    if found != T::KIND {
        return Err(TensorError::WrongKind { found, expected: T::KIND });
    }
    if !tensor.is_contiguous() {
        return Err(TensorError::NotContiguous { shape: tensor.size() });
    }
    Ok(tensor.numel())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slice_covers_the_elements_of_a_view_and_writes_through() {
        let whole = Tensor::arange(6, (Kind::Int64, Device::Cpu)).view([3, 2]);
        let mut last = whole.narrow(0, 2, 1);
        assert_eq!(slice::<i64>(&last).unwrap(), [4, 5]);
        slice_mut::<i64>(&mut last).unwrap()[0] = 9;
        assert_eq!(slice::<i64>(&whole).unwrap(), [0, 1, 2, 3, 9, 5]);
    }

    #[test]
    fn bf16_has_the_layout_of_libtorch() {
        let tensor = Tensor::from_slice(&[1.5f32, -2.25]).to_kind(Kind::BFloat16);
        assert_eq!(slice::<bf16>(&tensor).unwrap(), [bf16::from_f32(1.5), bf16::from_f32(-2.25)]);
    }

    #[test]
    fn another_dtype_and_a_gap_are_refused() {
        let tensor = Tensor::from_slice(&[1i32, 2, 3, 4]).view([2, 2]);
        let error = slice::<f32>(&tensor).unwrap_err();
        assert!(matches!(error, TensorError::WrongKind { found: Kind::Int, .. }), "{error}");
        let error = slice::<i32>(&tensor.narrow(1, 0, 1)).unwrap_err();
        assert!(matches!(error, TensorError::NotContiguous { .. }), "{error}");
    }

    #[test]
    fn an_empty_tensor_is_an_empty_slice() {
        let mut tensor = empty::<f32>(&[0, 4]).unwrap();
        assert!(slice::<f32>(&tensor).unwrap().is_empty());
        assert!(slice_mut::<f32>(&mut tensor).unwrap().is_empty());
    }
}

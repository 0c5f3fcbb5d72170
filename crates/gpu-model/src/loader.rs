//! From host tensors to device buffers, with matrices that share an input side by side.

use gpu_runtime::{Buffer, GemmElement, Gpu, Stream};
use model_config::ModelConfig;
use tch::{Kind, Tensor};
use torch_ext::slice;
use weights::{TensorMap, WeightsError};

use crate::error::ModelError;

/// An element of weights, activations and caches: float32 or bfloat16.
pub trait Element: GemmElement + torch_ext::Element {}

impl Element for f32 {}
impl Element for half::bf16 {}

/// Takes tensors out of a map and puts them on the device.
pub(crate) struct Loader<'a> {
    pub(crate) config: &'a ModelConfig,
    pub(crate) gpu: &'a Gpu,
    pub(crate) stream: &'a Stream,
    pub(crate) tensors: TensorMap,
}

impl Loader<'_> {
    /// A tensor of elements `E`.
    pub(crate) fn matrix<E: Element>(&mut self, name: &str) -> Result<Buffer<E>, ModelError> {
        self.stack(&[name.to_owned()])
    }

    /// Tensors one behind the other, as one matrix of their rows.
    pub(crate) fn stack<E: Element>(&mut self, names: &[String]) -> Result<Buffer<E>, ModelError> {
        let tensors = names.iter().map(|name| self.tensors.take(name));
        let tensors = tensors.collect::<Result<Vec<_>, WeightsError>>()?;
        self.upload(&tensors)
    }

    /// The same if the first of them is there.
    pub(crate) fn optional<E: Element>(
        &mut self,
        name: &str,
    ) -> Result<Option<Buffer<E>>, ModelError> {
        let tensor = self.tensors.take_optional(name)?;
        tensor.map(|tensor| self.upload(&[tensor])).transpose()
    }

    /// A tensor as float32.
    pub(crate) fn floats(&mut self, name: &str) -> Result<Buffer<f32>, ModelError> {
        let tensor = self.tensors.take(name)?;
        let tensor = tensor.f_to_kind(Kind::Float).map_err(torch_ext::TensorError::from)?;
        self.upload(&[tensor])
    }

    pub(crate) fn upload<E: Element>(&self, tensors: &[Tensor]) -> Result<Buffer<E>, ModelError> {
        let mut buffer = self.gpu.alloc::<E>(tensors.iter().map(Tensor::numel).sum())?;
        let mut start = 0;
        for tensor in tensors {
            let values = slice::<E>(tensor)?;
            self.stream.upload(values, buffer.slice_mut(start..start + values.len()))?;
            start += values.len();
        }
        Ok(buffer)
    }
}

//! Tensor data: from mapped bytes to libtorch tensors.

use std::collections::HashMap;

use model_config::{LoadDtype, TensorSpec};
use safetensors::Dtype;
use tch::{Device, Kind, TchError, Tensor};

use crate::checkpoint::Checkpoint;
use crate::error::WeightsError;

/// The libtorch kind of a stored dtype; `None` if it cannot be loaded.
pub(crate) fn kind_of(dtype: Dtype) -> Option<Kind> {
    match dtype {
        Dtype::F32 => Some(Kind::Float),
        Dtype::F16 => Some(Kind::Half),
        Dtype::BF16 => Some(Kind::BFloat16),
        _ => None,
    }
}

/// Loaded tensors by checkpoint name. Model code takes each one out, so a tensor that nobody takes
/// is easily found with [`TensorMap::names`].
#[derive(Debug, Default)]
pub struct TensorMap {
    tensors: HashMap<String, Tensor>,
}

impl TensorMap {
    /// Takes a tensor out.
    ///
    /// # Errors
    ///
    /// [`WeightsError::NotLoaded`] if it was not loaded or was already taken.
    pub fn take(&mut self, name: &str) -> Result<Tensor, WeightsError> {
        self.take_optional(name).ok_or_else(|| WeightsError::NotLoaded { name: name.to_owned() })
    }

    /// Takes a tensor out, if it is there.
    pub fn take_optional(&mut self, name: &str) -> Option<Tensor> {
        self.tensors.remove(name)
    }

    /// Adds or replaces a tensor.
    pub fn insert(&mut self, name: impl Into<String>, tensor: Tensor) {
        self.tensors.insert(name.into(), tensor);
    }

    /// Names of the tensors that were not taken yet, in no order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// How many tensors were not taken yet.
    #[must_use]
    pub fn len(&self) -> usize {
        self.tensors.len()
    }

    /// Whether every tensor was taken.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tensors.is_empty()
    }
}

impl Checkpoint {
    /// Loads the expected tensors, converted to `kind` (or float32 where
    /// [`LoadDtype::Float32`] asks for it) and moved to `device`. Optional tensors that are absent
    /// are left out. The tensors of the checkpoint that are not expected are logged at debug
    /// level.
    ///
    /// # Errors
    ///
    /// [`WeightsError::Unfit`] as [`Checkpoint::check`], before anything is loaded;
    /// [`WeightsError::Tensor`] if libtorch fails, for example when memory is short.
    pub fn load(
        &self,
        expected: &[TensorSpec],
        device: Device,
        kind: Kind,
    ) -> Result<TensorMap, WeightsError> {
        self.check(expected)?;
        for name in self.leftovers(expected) {
            tracing::debug!(tensor = name, "not used by this model");
        }
        let mut tensors = TensorMap::default();
        for spec in expected {
            let kind = match spec.load_dtype {
                LoadDtype::Model => kind,
                LoadDtype::Float32 => Kind::Float,
            };
            if let Some(tensor) = self.tensor(&spec.name, device, kind)? {
                tensors.insert(&spec.name, tensor);
            }
        }
        Ok(tensors)
    }

    /// Loads one tensor as it is shaped in the checkpoint; `None` if it is absent.
    ///
    /// # Errors
    ///
    /// [`WeightsError::Unfit`] for a dtype that cannot be loaded; [`WeightsError::Tensor`] if
    /// libtorch fails.
    pub fn tensor(
        &self,
        name: &str,
        device: Device,
        kind: Kind,
    ) -> Result<Option<Tensor>, WeightsError> {
        let Some((shard, entry)) = self.entry(name) else { return Ok(None) };
        let Some(stored_kind) = kind_of(entry.dtype) else {
            return Err(WeightsError::Unfit {
                dir: self.dir().to_path_buf(),
                missing: Vec::new(),
                misshapen: Vec::new(),
                unsupported: vec![(name.to_owned(), format!("{:?}", entry.dtype))],
            });
        };
        to_tensor(shard.data(entry), &entry.shape, stored_kind, (device, kind)).map(Some).map_err(
            |source| WeightsError::Tensor {
                name: name.to_owned(),
                file: shard.file.clone(),
                source,
            },
        )
    }
}

fn to_tensor(
    bytes: &[u8],
    shape: &[usize],
    stored_kind: Kind,
    target: (Device, Kind),
) -> Result<Tensor, TchError> {
    let shape: Vec<i64> = shape.iter().map(|&n| n as i64).collect();
    // This copies the bytes, so the tensor does not depend on the map. The shard's header was
    // checked: the bytes are exactly as many as the shape and the dtype need.
    let tensor = Tensor::f_from_data_size(bytes, &shape, stored_kind)?;
    tensor.f_to_device(target.0)?.f_to_kind(target.1)
}

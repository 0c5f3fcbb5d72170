//! Tensor data: from mapped bytes to libtorch tensors.

use std::collections::HashMap;
use std::path::Path;

use half::bf16;
use model_config::{LoadDtype, ModelConfig, TensorSpec};
use safetensors::Dtype;
use tch::{Device, Kind, TchError, Tensor};
use torch_ext::{TensorError, empty, slice_mut};

use crate::checkpoint::Checkpoint;
use crate::dummy::{self, DUMMY_SEED};
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

/// Where weights are from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LoadFormat {
    /// The safetensors files of the checkpoint.
    #[default]
    Auto,
    /// Nowhere: random values of the shapes that the config asks for ([`dummy`]).
    Dummy,
}

/// Loads the tensors of the target and, for `drafting`, of the MTP layers, converted and moved as
/// by [`Checkpoint::load`]. `dir` is the folder of `config`; dummy weights need nothing else of it.
///
/// # Errors
///
/// [`WeightsError`], for `drafting` also if the config promises no MTP layer or the checkpoint
/// lacks one of their tensors.
pub fn load(
    dir: &Path,
    config: &ModelConfig,
    format: LoadFormat,
    drafting: bool,
    (device, kind): (Device, Kind),
) -> Result<TensorMap, WeightsError> {
    let mut expected = config.target_tensors();
    if drafting {
        expected.extend(config.all_mtp_tensors());
    }
    match format {
        LoadFormat::Auto => {
            let checkpoint = Checkpoint::open(dir)?;
            if drafting {
                checkpoint.check_mtp(config)?;
            }
            checkpoint.load(&expected, device, kind)
        }
        LoadFormat::Dummy if drafting && config.num_mtp_layers == 0 => {
            Err(WeightsError::NoMtpLayers { dir: dir.to_path_buf() })
        }
        LoadFormat::Dummy => TensorMap::dummy(&expected, DUMMY_SEED, device, kind),
    }
}

/// Loaded tensors by checkpoint name. Model code takes each one out, so a tensor that nobody takes
/// is easily found with [`TensorMap::names`].
#[derive(Debug, Default)]
pub struct TensorMap {
    tensors: HashMap<String, Tensor>,
}

impl TensorMap {
    /// Makes dummy values ([`dummy::fill`]) of the expected tensors, in the dtypes that
    /// [`Checkpoint::load`] would give them. Optional tensors are left out, as if the checkpoint
    /// had none of them.
    ///
    /// # Errors
    ///
    /// [`WeightsError::Dummy`] if libtorch fails, for example when memory is short.
    pub fn dummy(
        expected: &[TensorSpec],
        seed: u64,
        device: Device,
        kind: Kind,
    ) -> Result<Self, WeightsError> {
        let required = expected.iter().filter(|spec| !spec.is_optional);
        let tensors = required.map(|spec| {
            let name = spec.name.clone();
            match dummy_tensor(spec, seed, (device, loaded_kind(spec, kind))) {
                Ok(tensor) => Ok((name, tensor)),
                Err(source) => Err(WeightsError::Dummy { name, source }),
            }
        });
        Ok(Self { tensors: tensors.collect::<Result<_, _>>()? })
    }

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
            if let Some(tensor) = self.tensor(&spec.name, device, loaded_kind(spec, kind))? {
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

/// The dtype of a loaded tensor in a model of `kind`.
fn loaded_kind(spec: &TensorSpec, kind: Kind) -> Kind {
    match spec.load_dtype {
        LoadDtype::Model => kind,
        LoadDtype::Float32 => Kind::Float,
    }
}

fn dummy_tensor(
    spec: &TensorSpec,
    seed: u64,
    (device, kind): (Device, Kind),
) -> Result<Tensor, TensorError> {
    let shape = sizes(&spec.shape);
    // Rounded on the way, so that a large model needs no second copy.
    let tensor = if kind == Kind::BFloat16 {
        let mut tensor = empty::<bf16>(&shape)?;
        dummy::fill(spec, seed, slice_mut(&mut tensor)?, bf16::from_f32);
        tensor
    } else {
        let mut tensor = empty::<f32>(&shape)?;
        dummy::fill(spec, seed, slice_mut(&mut tensor)?, |value: f32| value);
        tensor.f_to_kind(kind)?
    };
    Ok(tensor.f_to_device(device)?)
}

fn sizes(shape: &[usize]) -> Vec<i64> {
    shape.iter().map(|&n| n as i64).collect()
}

fn to_tensor(
    bytes: &[u8],
    shape: &[usize],
    stored_kind: Kind,
    target: (Device, Kind),
) -> Result<Tensor, TchError> {
    let shape = sizes(shape);
    // This copies the bytes, so the tensor does not depend on the map. The shard's header was
    // checked: the bytes are exactly as many as the shape and the dtype need.
    let tensor = Tensor::f_from_data_size(bytes, &shape, stored_kind)?;
    tensor.f_to_device(target.0)?.f_to_kind(target.1)
}

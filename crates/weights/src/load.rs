//! What of a checkpoint is loaded, and how.

use std::collections::HashMap;
use std::path::Path;

use model_config::{LoadDtype, ModelConfig, TensorSpec};
use tch::{Device, Kind, Tensor};

use crate::checkpoint::Checkpoint;
use crate::dummy::DUMMY_SEED;
use crate::error::WeightsError;
use crate::packed::PackedSource;
use crate::storage::{Packing, Storage};
use crate::tensor_map::{Source, TensorMap};

/// Where weights are from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LoadFormat {
    /// The safetensors files of the checkpoint.
    #[default]
    Auto,
    /// Nowhere: random values of the shapes that the config asks for ([`crate::dummy`]).
    Dummy,
}

/// The tensors of the target and, for `drafting`, of the MTP layers, converted and moved as by
/// [`Checkpoint::load`]. `dir` is the folder of `config`; dummy weights need nothing else of it.
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
            // A fault of the target is in the way with and without drafting.
            checkpoint.check(&config.target_tensors())?;
            if drafting {
                checkpoint.check_mtp(config)?;
            }
            checkpoint.load(&expected, device, kind)
        }
        LoadFormat::Dummy if drafting && config.num_mtp_layers == 0 => {
            Err(WeightsError::NoMtpLayers { dir: dir.to_path_buf() })
        }
        LoadFormat::Dummy => Ok(TensorMap::dummy(&expected, DUMMY_SEED, device, kind)),
    }
}

impl TensorMap {
    /// Dummy values ([`crate::dummy::fill`]) of the expected tensors, in the dtypes that
    /// [`Checkpoint::load`] would give them. Optional tensors are left out, as if the checkpoint
    /// had none of them.
    #[must_use]
    pub fn dummy(expected: &[TensorSpec], seed: u64, device: Device, kind: Kind) -> Self {
        let required = expected.iter().filter(|spec| !spec.is_optional);
        let sources = required.map(|spec| {
            (spec.name.clone(), Source::Dummy(spec.clone(), seed, loaded_kind(spec, kind)))
        });
        Self::new(sources.collect(), device)
    }
}

impl Checkpoint {
    /// The expected tensors, to be converted to `kind` (or float32 where [`LoadDtype::Float32`]
    /// asks for it) and moved to `device` when they are taken. Optional tensors that are absent
    /// are left out. The tensors of the checkpoint that are not expected are logged at debug
    /// level.
    ///
    /// # Errors
    ///
    /// [`WeightsError::Unfit`] as [`Checkpoint::check`].
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
        let mut sources = HashMap::new();
        for spec in expected {
            if let Some(source) = self.source(spec, loaded_kind(spec, kind)) {
                sources.insert(spec.name.clone(), source);
            }
        }
        Ok(TensorMap::new(sources, device))
    }

    /// Where an expected tensor comes from, which was checked; `None` if it is absent.
    fn source(&self, spec: &TensorSpec, kind: Kind) -> Option<Source> {
        let part =
            |name: &str| self.entry(name).map(|(shard, entry)| (shard.clone(), entry.clone()));
        let stored = self.stored(spec)?;
        match stored.storage.ok()? {
            Storage::Dense => {
                let (shard, entry) = part(stored.info.name)?;
                Some(Source::Stored(shard, entry, kind))
            }
            Storage::Quantized(Packing { codes, scales, is_e2m1, block }) => {
                let shape = spec.shape[..].try_into().ok()?;
                let (codes, scales) = (part(&codes)?, part(&scales)?);
                Some(Source::Packed(PackedSource { shape, is_e2m1, block, codes, scales }, kind))
            }
        }
    }

    /// Reads one tensor as it is shaped in the checkpoint; `None` if it is absent.
    ///
    /// # Errors
    ///
    /// [`WeightsError::Unfit`] for a dtype that cannot be loaded; [`WeightsError::Tensor`] if
    /// libtorch fails, for example when memory is short.
    pub fn tensor(
        &self,
        name: &str,
        device: Device,
        kind: Kind,
    ) -> Result<Option<Tensor>, WeightsError> {
        let Some((shard, entry)) = self.entry(name) else { return Ok(None) };
        let source = Source::Stored(shard.clone(), entry.clone(), kind);
        TensorMap::new([(name.to_owned(), source)].into(), device).take_optional(name)
    }
}

/// The dtype of a loaded tensor in a model of `kind`.
fn loaded_kind(spec: &TensorSpec, kind: Kind) -> Kind {
    match spec.load_dtype {
        LoadDtype::Model => kind,
        LoadDtype::Float32 => Kind::Float,
    }
}

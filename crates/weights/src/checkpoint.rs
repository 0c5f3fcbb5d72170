//! A checkpoint folder: its shards and where each tensor is.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use model_config::{ModelConfig, TensorSpec};

use crate::error::{Misshapen, WeightsError};
use crate::parameters::layer_of;
use crate::shard::{Entry, Shard};
use crate::storage;

/// What a header says about a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorInfo<'a> {
    /// Name in the checkpoint.
    pub name: &'a str,
    /// Shape, outermost dimension first.
    pub shape: &'a [usize],
    /// Stored dtype.
    pub dtype: safetensors::Dtype,
    /// Bytes in the file.
    pub n_bytes: usize,
    /// The shard that holds it.
    pub file: &'a Path,
}

/// An open checkpoint: every header read and checked, no tensor data read yet.
///
/// The files must not be modified while it lives; see [`torch_ext::mmap::map_file`].
pub struct Checkpoint {
    pub(crate) dir: PathBuf,
    pub(crate) shards: Vec<Arc<Shard>>,
    /// Shard of each tensor of the checkpoint.
    pub(crate) shard_of: BTreeMap<String, usize>,
}

impl Checkpoint {
    /// The folder.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Every tensor, sorted by name.
    pub fn tensors(&self) -> impl Iterator<Item = TensorInfo<'_>> {
        self.shard_of.iter().map(|(name, &shard_idx)| self.info_in(shard_idx, name))
    }

    /// What the header says about one tensor.
    #[must_use]
    pub fn tensor_info<'a>(&'a self, name: &str) -> Option<TensorInfo<'a>> {
        let (name, &shard_idx) = self.shard_of.get_key_value(name)?;
        Some(self.info_in(shard_idx, name))
    }

    /// The same for a tensor that a shard is known to hold.
    pub(crate) fn info_in<'a>(&'a self, shard_idx: usize, name: &'a str) -> TensorInfo<'a> {
        let shard = &self.shards[shard_idx];
        let entry = &shard.entries[name];
        TensorInfo {
            name,
            shape: &entry.shape,
            dtype: entry.dtype,
            n_bytes: entry.n_bytes(),
            file: &shard.file,
        }
    }

    pub(crate) fn entry(&self, name: &str) -> Option<(&Arc<Shard>, &Entry)> {
        let shard = &self.shards[*self.shard_of.get(name)?];
        Some((shard, &shard.entries[name]))
    }

    /// Checks that every required tensor is there, and every tensor that is there has its expected
    /// shape and can be read, with a scale that fits where it is quantised. Reads no tensor data.
    ///
    /// # Errors
    ///
    /// [`WeightsError::Unfit`], listing every tensor at fault.
    pub fn check(&self, expected: &[TensorSpec]) -> Result<(), WeightsError> {
        let (mut missing, mut misshapen, mut unreadable) = (Vec::new(), Vec::new(), Vec::new());
        for spec in expected {
            let Some(stored) = self.stored(spec) else {
                if !spec.is_optional {
                    missing.push(spec.name.clone());
                }
                continue;
            };
            if let Err(fault) = stored.storage {
                unreadable.push((spec.name.clone(), fault));
            }
            if stored.info.shape != stored.shape {
                misshapen.push(Misshapen {
                    name: stored.info.name.to_owned(),
                    file: stored.info.file.to_path_buf(),
                    shape: stored.info.shape.to_vec(),
                    expected: stored.shape,
                });
            }
        }
        if missing.is_empty() && misshapen.is_empty() && unreadable.is_empty() {
            return Ok(());
        }
        let mut n_required = Box::<BTreeMap<usize, usize>>::default();
        for spec in expected.iter().filter(|spec| !spec.is_optional) {
            if let Some(layer) = layer_of(&spec.name) {
                *n_required.entry(layer).or_insert(0) += 1;
            }
        }
        let dir = self.dir.clone();
        Err(WeightsError::Unfit { dir, missing, misshapen, unreadable, n_required })
    }

    /// Checks that the checkpoint can draft: its config has MTP layers and all their tensors are
    /// there. To be called if drafting is asked for; without drafting MTP tensors may be absent.
    ///
    /// # Errors
    ///
    /// [`WeightsError::NoMtpLayers`], or [`WeightsError::MtpIncomplete`] listing every tensor at
    /// fault.
    pub fn check_mtp(&self, config: &ModelConfig) -> Result<(), WeightsError> {
        if config.num_mtp_layers == 0 {
            return Err(WeightsError::NoMtpLayers { dir: self.dir.clone() });
        }
        self.check(&config.all_mtp_tensors()).map_err(|error| WeightsError::MtpIncomplete {
            dir: self.dir.clone(),
            source: Box::new(error),
        })
    }

    /// Names of the tensors that are in the checkpoint but neither expected nor scales of those,
    /// sorted.
    #[must_use]
    pub fn leftovers(&self, expected: &[TensorSpec]) -> Vec<&str> {
        let expected: BTreeSet<String> =
            expected.iter().flat_map(|spec| storage::names_of(&spec.name)).collect();
        let names = self.shard_of.keys().map(String::as_str);
        names.filter(|name| !expected.contains(*name)).collect()
    }
}

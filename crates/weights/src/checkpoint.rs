//! A checkpoint folder: its shards and where each tensor is.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use checkpoint_files::{Index, read_bounded};
use model_config::{ModelConfig, TensorSpec};

use crate::error::{Misplaced, Misshapen, WeightsError};
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
    dir: PathBuf,
    shards: Vec<Arc<Shard>>,
    /// Shard of each tensor of the checkpoint.
    shard_of: BTreeMap<String, usize>,
}

impl Checkpoint {
    /// Opens `model.safetensors.index.json` and its shards or, where there is none,
    /// `model.safetensors`.
    ///
    /// # Errors
    ///
    /// [`WeightsError`] if a file is absent, unreadable, cut, or lacks a tensor that the index
    /// puts there.
    pub fn open(dir: &Path) -> Result<Self, WeightsError> {
        let dir = dir.to_path_buf();
        let index = dir.join("model.safetensors.index.json");
        if index.exists() {
            return Self::open_indexed(dir, &index);
        }
        let single = dir.join("model.safetensors");
        if !single.exists() {
            return Err(WeightsError::NoWeights { dir });
        }
        let shard = Shard::open(single)?;
        let shard_of = shard.entries.keys().map(|name| (name.clone(), 0)).collect();
        Ok(Self { dir, shards: vec![Arc::new(shard)], shard_of })
    }

    fn open_indexed(dir: PathBuf, index: &Path) -> Result<Self, WeightsError> {
        let weight_map = read_index(index)?.weight_map;
        let names: BTreeSet<&String> = weight_map.values().collect();
        let files: Vec<PathBuf> = names.iter().map(|name| dir.join(name)).collect();
        let absent: Vec<PathBuf> = files.iter().filter(|file| !file.exists()).cloned().collect();
        if !absent.is_empty() {
            return Err(WeightsError::ShardsAbsent { index: index.to_path_buf(), absent });
        }
        let open = |file| Shard::open(file).map(Arc::new);
        let shards = files.into_iter().map(open).collect::<Result<Vec<_>, _>>()?;
        let idx_of: BTreeMap<&String, usize> = names.into_iter().zip(0..).collect();
        let mut misplaced = Vec::new();
        let mut shard_of = BTreeMap::new();
        for (name, file) in &weight_map {
            let shard_idx = idx_of[file];
            if shards[shard_idx].entries.contains_key(name) {
                shard_of.insert(name.clone(), shard_idx);
            } else {
                let holder = shards.iter().find(|shard| shard.entries.contains_key(name));
                misplaced.push(Misplaced {
                    name: name.clone(),
                    file: shards[shard_idx].file.clone(),
                    found_in: holder.map(|shard| shard.file.clone()),
                });
            }
        }
        if !misplaced.is_empty() {
            return Err(WeightsError::NotInShard { index: index.to_path_buf(), misplaced });
        }
        Ok(Self { dir, shards, shard_of })
    }

    /// The folder.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Every tensor, sorted by name.
    pub fn tensors(&self) -> impl Iterator<Item = TensorInfo<'_>> {
        self.shard_of.keys().filter_map(|name| self.tensor_info(name))
    }

    /// What the header says about one tensor.
    #[must_use]
    pub fn tensor_info<'a>(&'a self, name: &str) -> Option<TensorInfo<'a>> {
        let (name, &shard_idx) = self.shard_of.get_key_value(name)?;
        let shard = &self.shards[shard_idx];
        let entry = &shard.entries[name];
        Some(TensorInfo {
            name,
            shape: &entry.shape,
            dtype: entry.dtype,
            n_bytes: entry.n_bytes(),
            file: &shard.file,
        })
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
        Err(WeightsError::Unfit { dir: self.dir.clone(), missing, misshapen, unreadable })
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

fn read_index(file: &Path) -> Result<Index, WeightsError> {
    let text = read_bounded(file, Index::MAX_BYTES)
        .map_err(|source| WeightsError::Read { file: file.to_path_buf(), source })?;
    Index::parse(&text)
        .map_err(|source| WeightsError::BadIndex { file: file.to_path_buf(), source })
}

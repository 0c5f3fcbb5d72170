//! Opening a checkpoint folder: what can be opened of it, and every fault of the rest.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use checkpoint_files::{Index, read_bounded};
use rayon::prelude::*;

use crate::checkpoint::Checkpoint;
use crate::error::{Misplaced, WeightsError};
use crate::shard::Shard;
use crate::storage::PACKED;

/// What is there of a checkpoint.
pub(crate) struct Survey {
    /// The tensors of the shards that could be opened.
    pub(crate) checkpoint: Checkpoint,
    /// What the index says, if there is one.
    pub(crate) index: Option<Index>,
    /// Whether there is an index and none of its shards.
    pub(crate) is_index_alone: bool,
    /// Why other tensors are not there, in the order in which loading would meet it.
    pub(crate) faults: Vec<WeightsError>,
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
        let Survey { checkpoint, faults, .. } = Survey::of(dir)?;
        faults.into_iter().next().map_or(Ok(checkpoint), Err)
    }
}

impl Survey {
    /// Whether the index names a tensor, as it is or packed.
    pub(crate) fn is_named(&self, name: &str) -> bool {
        let Some(Index { weight_map }) = &self.index else { return false };
        weight_map.contains_key(name) || weight_map.contains_key(&format!("{name}{PACKED}"))
    }

    /// Fails only where there is nothing to start from: neither a usable index nor a single file.
    pub(crate) fn of(dir: &Path) -> Result<Self, WeightsError> {
        let index = dir.join("model.safetensors.index.json");
        if index.exists() {
            return Self::of_index(dir, &index);
        }
        let single = dir.join("model.safetensors");
        if !single.exists() {
            let dir = dir.to_path_buf();
            return Err(match count_shards(&dir) {
                0 => WeightsError::NoWeights { dir },
                n_shards => WeightsError::IndexAbsent { dir, n_shards },
            });
        }
        let (shards, faults) = open_all(vec![single]);
        let names = shards.iter().flat_map(|shard| shard.entries.keys());
        let shard_of = names.map(|name| (name.clone(), 0)).collect();
        let checkpoint = Checkpoint { dir: dir.to_path_buf(), shards, shard_of };
        Ok(Self { checkpoint, index: None, is_index_alone: false, faults })
    }

    fn of_index(dir: &Path, file: &Path) -> Result<Self, WeightsError> {
        let index = read_index(file)?;
        let names: BTreeSet<&String> = index.weight_map.values().collect();
        let files = names.iter().map(|name| dir.join(name));
        let (files, absent): (Vec<_>, Vec<_>) = files.partition(|file| file.exists());
        let is_index_alone = files.is_empty() && !absent.is_empty();
        let (shards, mut faults) = open_all(files);
        if !absent.is_empty() {
            faults.insert(0, WeightsError::ShardsAbsent { index: file.to_path_buf(), absent });
        }
        let (shard_of, misplaced) = place(&index, &shards);
        if !misplaced.is_empty() {
            faults.push(WeightsError::NotInShard { index: file.to_path_buf(), misplaced });
        }
        let checkpoint = Checkpoint { dir: dir.to_path_buf(), shards, shard_of };
        Ok(Self { checkpoint, index: Some(index), is_index_alone, faults })
    }
}

/// Files that look like shards; none where the folder cannot be read.
fn count_shards(dir: &Path) -> usize {
    let files = dir.read_dir().into_iter().flatten().filter_map(Result::ok);
    files.filter(|file| file.path().extension().is_some_and(|end| end == "safetensors")).count()
}

fn open_all(files: Vec<PathBuf>) -> (Vec<Arc<Shard>>, Vec<WeightsError>) {
    // Headers are read side by side: a large checkpoint has hundreds.
    let opened: Vec<_> = files.into_par_iter().map(Shard::open).collect();
    let (mut shards, mut faults) = (Vec::new(), Vec::new());
    for shard in opened {
        match shard {
            Ok(shard) => shards.push(Arc::new(shard)),
            Err(fault) => faults.push(fault),
        }
    }
    (shards, faults)
}

/// The open shard of each tensor, and the tensors that are not in the open shard where the index
/// puts them.
fn place(index: &Index, shards: &[Arc<Shard>]) -> (BTreeMap<String, usize>, Vec<Misplaced>) {
    // The names are plain, so that each is the end of its shard's path.
    let names = shards.iter().filter_map(|shard| shard.file.file_name()?.to_str());
    let idx_of: BTreeMap<&str, usize> = names.zip(0..).collect();
    let (mut shard_of, mut misplaced) = (BTreeMap::new(), Vec::new());
    for (name, file) in &index.weight_map {
        let Some(&shard_idx) = idx_of.get(file.as_str()) else { continue };
        if shards[shard_idx].entries.contains_key(name) {
            shard_of.insert(name.clone(), shard_idx);
            continue;
        }
        let holder = shards.iter().find(|shard| shard.entries.contains_key(name));
        misplaced.push(Misplaced {
            name: name.clone(),
            file: shards[shard_idx].file.clone(),
            found_in: holder.map(|shard| shard.file.clone()),
        });
    }
    (shard_of, misplaced)
}

fn read_index(file: &Path) -> Result<Index, WeightsError> {
    let text = read_bounded(file, Index::MAX_BYTES)
        .map_err(|source| WeightsError::Read { file: file.to_path_buf(), source })?;
    Index::parse(&text)
        .map_err(|source| WeightsError::BadIndex { file: file.to_path_buf(), source })
}

//! One mapped safetensors file.

use std::collections::BTreeMap;
use std::path::PathBuf;

pub(crate) use checkpoint_files::Entry;
use checkpoint_files::{Header, HeaderError, check_regular};
use memmap2::Mmap;
use tch::{Kind, Tensor};
use torch_ext::mmap::{map_file, release_pages};

use crate::convert::{kind_of, to_tensor};
use crate::error::WeightsError;
use crate::storage::StorageFault;

/// A mapped file whose header was read and whose length agrees with it.
#[derive(Debug)]
pub(crate) struct Shard {
    pub(crate) file: PathBuf,
    pub(crate) entries: BTreeMap<String, Entry>,
    map: Mmap,
}

impl Shard {
    pub(crate) fn open(file: PathBuf) -> Result<Self, WeightsError> {
        let mapped = check_regular(&file).and_then(|()| map_file(&file));
        let map = match mapped {
            Ok(map) => map,
            Err(source) => return Err(WeightsError::Read { file, source }),
        };
        match Header::parse(&map) {
            Ok(header) => Ok(Self { file, entries: header.entries, map }),
            Err(HeaderError::BadLength { expected, actual, first_cut }) => {
                Err(WeightsError::BadLength { file, expected, actual, first_cut })
            }
            Err(source) => Err(WeightsError::BadHeader { file, source }),
        }
    }

    /// Reads a tensor that is stored as values.
    pub(crate) fn tensor(
        &self,
        name: &str,
        entry: &Entry,
        kind: Kind,
    ) -> Result<Tensor, WeightsError> {
        let Some(stored) = kind_of(entry.dtype) else {
            return Err(WeightsError::Unfit {
                dir: self.file.parent().unwrap_or(&self.file).to_path_buf(),
                missing: Vec::new(),
                misshapen: Vec::new(),
                unreadable: vec![(name.to_owned(), StorageFault::Dtype(entry.dtype))],
                n_required: Box::default(),
            });
        };
        let tensor = self.read(entry, |bytes| to_tensor(bytes, &entry.shape, (stored, kind)));
        tensor.map_err(|source| WeightsError::Tensor {
            name: name.to_owned(),
            file: self.file.clone(),
            source,
        })
    }

    /// Makes something of a tensor's bytes. What this has brought of the file into this process's
    /// memory is given back to the system, which may keep it for others, so that a large file takes
    /// no memory here.
    pub(crate) fn read<T>(&self, entry: &Entry, make: impl FnOnce(&[u8]) -> T) -> T {
        let made = make(&self.map[entry.bytes.clone()]);
        if let Err(error) = release_pages(&self.map, entry.bytes.clone()) {
            tracing::debug!(%error, file = ?self.file, "the pages of a tensor stay in memory");
        }
        made
    }
}

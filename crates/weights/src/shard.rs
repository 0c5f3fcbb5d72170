//! One mapped safetensors file.

use std::collections::BTreeMap;
use std::path::PathBuf;

pub(crate) use checkpoint_files::Entry;
use checkpoint_files::{Header, HeaderError, check_regular};
use memmap2::Mmap;
use torch_ext::mmap::map_file;

use crate::error::WeightsError;

/// A mapped file whose header was read and whose length agrees with it.
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

    pub(crate) fn data(&self, entry: &Entry) -> &[u8] {
        &self.map[entry.bytes.clone()]
    }
}

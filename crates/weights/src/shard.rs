//! One mapped safetensors file.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;

use memmap2::Mmap;
use safetensors::{Dtype, SafeTensorError, SafeTensors};
use serde::Deserialize;

use crate::error::WeightsError;

/// Bytes of the length that precedes the header.
const N_LENGTH_BYTES: usize = 8;

/// Where and what a tensor of a shard is.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    /// Byte range in the file.
    bytes: Range<usize>,
}

impl Entry {
    pub(crate) fn n_bytes(&self) -> usize {
        self.bytes.len()
    }
}

/// A mapped file whose header was read and whose length agrees with it.
pub(crate) struct Shard {
    pub(crate) file: PathBuf,
    pub(crate) entries: BTreeMap<String, Entry>,
    map: Mmap,
}

impl Shard {
    pub(crate) fn open(file: PathBuf) -> Result<Self, WeightsError> {
        let map = match torch_ext::mmap::map_file(&file) {
            Ok(map) => map,
            Err(source) => return Err(WeightsError::Read { file, source }),
        };
        let (n_header, metadata) = match SafeTensors::read_metadata(&map) {
            Ok(parsed) => parsed,
            Err(source) => return Err(bad_shard(file, &map, source)),
        };
        let n_before_data = N_LENGTH_BYTES + n_header;
        let entries = metadata.tensors().into_iter().map(|(name, info)| {
            let (start, end) = info.data_offsets;
            let bytes = n_before_data + start..n_before_data + end;
            (name, Entry { dtype: info.dtype, shape: info.shape.clone(), bytes })
        });
        Ok(Self { file, entries: entries.collect(), map })
    }

    pub(crate) fn data(&self, entry: &Entry) -> &[u8] {
        &self.map[entry.bytes.clone()]
    }
}

/// Tells a file of the wrong length from one whose header cannot be understood.
fn bad_shard(file: PathBuf, map: &[u8], source: SafeTensorError) -> WeightsError {
    let SafeTensorError::MetadataIncompleteBuffer = source else {
        return WeightsError::BadHeader { file, source };
    };
    match data_ends(map) {
        Some(ends) => {
            let actual = map.len() as u64;
            let expected = ends.iter().map(|(end, _)| *end).max().unwrap_or(0);
            let cut = ends.into_iter().filter(|(end, _)| *end > actual).min();
            let first_cut = cut.map(|(_, name)| name);
            WeightsError::BadLength { file, expected, actual, first_cut }
        }
        None => WeightsError::BadHeader { file, source },
    }
}

/// Where the data of each tensor ends in the file, by a header already known to be well formed.
fn data_ends(map: &[u8]) -> Option<Vec<(u64, String)>> {
    #[derive(Deserialize)]
    struct Offsets {
        data_offsets: (u64, u64),
    }
    let length = map.get(..N_LENGTH_BYTES)?.try_into().ok()?;
    let n_before_data = u64::from_le_bytes(length) + N_LENGTH_BYTES as u64;
    let header = map.get(N_LENGTH_BYTES..usize::try_from(n_before_data).ok()?)?;
    let header: BTreeMap<String, serde_json::Value> = serde_json::from_slice(header).ok()?;
    let mut ends = vec![(n_before_data, "the header".to_owned())];
    for (name, value) in header.into_iter().filter(|(name, _)| name != "__metadata__") {
        let offsets: Offsets = serde_json::from_value(value).ok()?;
        ends.push((n_before_data + offsets.data_offsets.1, name));
    }
    Some(ends)
}

//! `model.safetensors.index.json`: which shard holds which tensor.

use std::collections::BTreeMap;
use std::fmt;

use serde::Deserialize;

use crate::unique::ByTensor;

/// The index of a checkpoint in several shards.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Index {
    /// The name of the shard of each tensor, a plain file name.
    pub weight_map: BTreeMap<String, String>,
}

#[derive(Deserialize)]
struct RawIndex {
    weight_map: ByTensor<String>,
}

impl Index {
    /// Most bytes that an index may have; those of the largest models have some 10 MB.
    pub const MAX_BYTES: u64 = 1 << 28;

    /// Reads the text of an index.
    ///
    /// # Errors
    ///
    /// [`IndexError`] if it is no index, or names a shard that would not lie beside it.
    pub fn parse(text: &[u8]) -> Result<Self, IndexError> {
        let RawIndex { weight_map: ByTensor(weight_map) } =
            serde_json::from_slice(text).map_err(IndexError::Json)?;
        match weight_map.values().find(|shard| !is_plain(shard)) {
            None => Ok(Self { weight_map }),
            Some(shard) => Err(IndexError::Outside { shard: shard.clone() }),
        }
    }
}

/// Whether a shard's name has no part that leads elsewhere, on any system.
fn is_plain(shard: &str) -> bool {
    !matches!(shard, "" | "." | "..") && !shard.contains(['/', '\\', ':', '\0'])
}

/// Why a text is not an index.
#[derive(Debug)]
#[non_exhaustive]
pub enum IndexError {
    /// It is not a JSON object with a `weight_map` of one file name for each tensor.
    Json(serde_json::Error),
    /// It names a shard that would not lie beside it.
    Outside {
        /// The shard, as the index names it.
        shard: String,
    },
}

impl fmt::Display for IndexError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Json(source) => source.fmt(f),
            Self::Outside { shard } => {
                write!(f, "the shard {shard:?} is no plain file name")
            }
        }
    }
}

impl std::error::Error for IndexError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Json(source) => Some(source),
            Self::Outside { .. } => None,
        }
    }
}

//! The header of a safetensors file. The format's own reader is not used, since it says neither
//! which tensor is at fault nor refuses a name that is there twice, and its sums can overflow.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use safetensors::Dtype;
use serde::Deserialize;

use crate::unique::ByTensor;

/// Bytes of the length that precedes the header.
const N_LENGTH_BYTES: usize = 8;

/// Bytes that a header may have, by the format.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// Where and what a tensor of a file is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Stored dtype.
    pub dtype: Dtype,
    /// Sizes, outermost first.
    pub shape: Vec<usize>,
    /// Where its data is in the file.
    pub bytes: Range<usize>,
}

impl Entry {
    /// Bytes of its data.
    #[must_use]
    pub fn n_bytes(&self) -> usize {
        self.bytes.len()
    }
}

/// What a safetensors file says of its tensors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// Each tensor by its name.
    pub entries: BTreeMap<String, Entry>,
}

/// An entry as the file has it; the offsets count from the end of the header.
#[derive(Deserialize)]
struct RawEntry {
    dtype: Dtype,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

impl Header {
    /// Reads the header of a whole file. Of the data only the length is looked at.
    ///
    /// # Errors
    ///
    /// [`HeaderError`] unless the tensors are described soundly and fill the file.
    pub fn parse(file: &[u8]) -> Result<Self, HeaderError> {
        let (length, rest) = file
            .split_first_chunk::<N_LENGTH_BYTES>()
            .ok_or(HeaderError::TooShort { actual: file.len() })?;
        let length = u64::from_le_bytes(*length);
        let header = usize::try_from(length).ok().and_then(|length| rest.get(..length));
        let header = header
            .filter(|_| length <= MAX_HEADER_BYTES)
            .ok_or(HeaderError::TooLong { length, available: rest.len() })?;
        let text = std::str::from_utf8(header).map_err(HeaderError::NotUtf8)?;
        let ByTensor(raw) = serde_json::from_str(text).map_err(HeaderError::Json)?;
        check_contiguous(&raw)?;
        check_length(&raw, (N_LENGTH_BYTES + header.len()) as u64, file.len() as u64)?;
        let entries = raw.into_iter().map(|(name, raw)| {
            let entry = raw.checked(N_LENGTH_BYTES + header.len());
            entry.map(|entry| (name.clone(), entry)).ok_or(HeaderError::WrongSize { name })
        });
        Ok(Self { entries: entries.collect::<Result<_, _>>()? })
    }
}

impl RawEntry {
    /// `None` if its data has not the length that shape and dtype ask for.
    fn checked(self, n_before_data: usize) -> Option<Entry> {
        let shape: Vec<usize> =
            self.shape.iter().map(|&n| usize::try_from(n)).collect::<Result<_, _>>().ok()?;
        // A zero makes the product zero, whatever stands beside it.
        let n_values = match shape.contains(&0) {
            true => 0,
            false => shape.iter().try_fold(1_usize, |product, &n| product.checked_mul(n))?,
        };
        let n_bits = n_values.checked_mul(self.dtype.bitsize())?;
        let [start, end] = [self.data_offsets.0, self.data_offsets.1]
            .map(|offset| usize::try_from(offset).ok()?.checked_add(n_before_data));
        let bytes = start?..end?;
        let is_exact = n_bits % 8 == 0 && bytes.len() == n_bits / 8;
        is_exact.then_some(Entry { dtype: self.dtype, shape, bytes })
    }
}

/// Checks that the data of the tensors follow each other without gap and overlap.
fn check_contiguous(raw: &BTreeMap<String, RawEntry>) -> Result<(), HeaderError> {
    let mut in_order: Vec<(&String, &RawEntry)> = raw.iter().collect();
    in_order.sort_by_key(|(_, entry)| entry.data_offsets);
    let mut expected = 0;
    for (name, entry) in in_order {
        let (start, end) = entry.data_offsets;
        if start != expected || end < start {
            return Err(HeaderError::BadOffsets { name: name.clone(), start, end, expected });
        }
        expected = end;
    }
    Ok(())
}

/// Checks that the data end with the file.
fn check_length(
    raw: &BTreeMap<String, RawEntry>,
    n_before_data: u64,
    actual: u64,
) -> Result<(), HeaderError> {
    let end = |entry: &RawEntry| entry.data_offsets.1.saturating_add(n_before_data);
    let expected = raw.values().map(end).max().unwrap_or(n_before_data);
    if expected == actual {
        return Ok(());
    }
    let cut = raw.iter().filter(|(_, entry)| end(entry) > actual);
    let first_cut = cut.min_by_key(|(_, entry)| end(entry)).map(|(name, _)| name.clone());
    Err(HeaderError::BadLength { expected, actual, first_cut })
}

/// Why a file is not a sound safetensors file.
#[derive(Debug)]
#[non_exhaustive]
pub enum HeaderError {
    /// The file has no room for the header's length.
    TooShort {
        /// Bytes of the file.
        actual: usize,
    },
    /// The header is longer than the file or than the format allows.
    TooLong {
        /// Bytes that it claims to have.
        length: u64,
        /// Bytes of the file behind the length.
        available: usize,
    },
    /// The header is no text.
    NotUtf8(std::str::Utf8Error),
    /// The header is not a JSON object of tensors' dtypes, shapes and offsets, each tensor once.
    Json(serde_json::Error),
    /// The data of a tensor do not begin where those before it end.
    BadOffsets {
        /// The tensor.
        name: String,
        /// Where its data begin, from the end of the header.
        start: u64,
        /// Where they end.
        end: u64,
        /// Where the data before them end.
        expected: u64,
    },
    /// A tensor has another number of bytes than its shape and dtype ask for.
    WrongSize {
        /// The tensor.
        name: String,
    },
    /// The file is shorter or longer than the header says.
    BadLength {
        /// Bytes that the header asks for, the header included.
        expected: u64,
        /// Bytes that are there.
        actual: u64,
        /// The first tensor whose data is incomplete, if the file is too short.
        first_cut: Option<String>,
    },
}

impl fmt::Display for HeaderError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooShort { actual } => {
                write!(f, "a file of {actual} bytes has no room for the header's length")
            }
            Self::TooLong { length, available } => write!(
                f,
                "the header claims {length} bytes, but {available} follow and \
                 {MAX_HEADER_BYTES} are allowed"
            ),
            Self::NotUtf8(source) => write!(f, "the header is not UTF-8: {source}"),
            Self::Json(source) => source.fmt(f),
            Self::BadOffsets { name, start, end, expected } => write!(
                f,
                "the data of {name:?} are at {start}..{end}, but the data before them end at \
                 {expected}: there may be neither gap nor overlap"
            ),
            Self::WrongSize { name } => {
                write!(f, "the data of {name:?} have not the size that shape and dtype ask for")
            }
            Self::BadLength { expected, actual, first_cut } => {
                write!(f, "the file has {actual} bytes but its header asks for {expected}")?;
                match first_cut {
                    Some(name) => write!(f, "; it was cut, the first tensor hurt is {name}"),
                    None => write!(f, "; it has trailing bytes"),
                }
            }
        }
    }
}

impl std::error::Error for HeaderError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::NotUtf8(source) => Some(source),
            Self::Json(source) => Some(source),
            _ => None,
        }
    }
}

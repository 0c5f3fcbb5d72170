//! What the files of a checkpoint folder say, without their tensors.
//!
//! **Owns** the reading of safetensors headers and of `model.safetensors.index.json`, and the rule
//! what may be read as a file of a checkpoint at all.
//! **Must not know** tensors' data, nor what a model does with them.
//!
//! Checkpoints are downloaded, so nothing in them is believed. **Invariants**: no file makes this
//! panic, read outside the folder or the file, or take more memory than a small multiple of the
//! file's size, which is bounded; each entry of a [`Header`] lies inside its file, overlaps no
//! other one, and is exactly as long as its shape and dtype ask; each file of an [`Index`] is a
//! plain name, so that it lies beside the index. (It may be a symbolic link: caches of downloads
//! are made of them, and whoever can make links in a folder can read for himself.)
//!
//! ```
//! use checkpoint_files::{Header, Index};
//!
//! let json = r#"{"b": {"dtype": "BF16", "shape": [2, 1], "data_offsets": [0, 4]}}"#;
//! let file = [&(json.len() as u64).to_le_bytes()[..], json.as_bytes(), &[0; 4]].concat();
//! let header = Header::parse(&file)?;
//! assert_eq!(header.entries["b"].shape, [2, 1]);
//! assert_eq!(header.entries["b"].bytes.end, file.len());
//! assert!(Header::parse(&file[..9]).is_err());
//!
//! assert!(Index::parse(br#"{"weight_map": {"b": "../other.safetensors"}}"#).is_err());
//! # Ok::<(), checkpoint_files::HeaderError>(())
//! ```

mod header;
mod index;
mod read;
mod unique;

#[cfg(test)]
mod tests;

pub use header::{Entry, Header, HeaderError};
pub use index::{Index, IndexError};
pub use read::{check_regular, read_bounded};

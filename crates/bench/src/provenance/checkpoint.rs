//! Which weights a server has.

use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

/// Checkpoints up to this size are hashed whole.
const WHOLE_BYTES_MAX: u64 = 100_000_000;

/// A checkpoint, by its content.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Checkpoint {
    /// The last part of its folder's name.
    pub name: String,
    /// SHA-256 over the name, size and content of `config.json` and each safetensors file, in the
    /// order of their names; in hexadecimal.
    pub sha256: String,
    /// How much of the content that is.
    pub covers: Covers,
    /// Size of these files.
    pub n_bytes: u64,
}

/// What of a checkpoint's files is hashed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Covers {
    /// Everything: a checkpoint of less than 100 MB.
    WholeFiles,
    /// Names, sizes and headers, which name the tensors; not the tensors' data.
    HeadersAndSizes,
}

impl fmt::Display for Checkpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let covers = match self.covers {
            Covers::WholeFiles => "whole files",
            Covers::HeadersAndSizes => "headers and sizes",
        };
        write!(f, "{}, SHA-256 of {covers} {}", self.name, self.sha256)
    }
}

impl Checkpoint {
    /// Of the checkpoint in a folder.
    ///
    /// # Errors
    ///
    /// If it has no `config.json`, or a file cannot be read.
    pub fn of(folder: &Path) -> io::Result<Self> {
        let files = files(folder)?;
        let n_bytes = files.iter().map(|(_, size)| size).sum();
        let covers =
            if n_bytes < WHOLE_BYTES_MAX { Covers::WholeFiles } else { Covers::HeadersAndSizes };
        let mut hash = Sha256::new();
        for (path, size) in &files {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            hash.update(format!("{name}\n{size}\n"));
            let is_whole = covers == Covers::WholeFiles || name.ends_with(".json");
            add(&mut hash, path, is_whole)?;
        }
        let folder = fs::canonicalize(folder)?;
        Ok(Self {
            name: folder.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            sha256: hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect(),
            covers,
            n_bytes,
        })
    }
}

/// `config.json` and the safetensors files with their sizes, by name.
fn files(folder: &Path) -> io::Result<Vec<(PathBuf, u64)>> {
    let mut files = vec![folder.join("config.json")];
    for entry in fs::read_dir(folder)? {
        files.push(entry?.path());
    }
    files[1..].sort();
    let is_shard = |path: &PathBuf| path.extension().is_some_and(|name| name == "safetensors");
    let kept = files.into_iter().enumerate().filter(|(idx, path)| *idx == 0 || is_shard(path));
    kept.map(|(_, path)| fs::metadata(&path).map(|of| (path, of.len()))).collect()
}

/// Adds a file, or the header of a safetensors file: its length in 8 bytes and that many bytes.
fn add(hash: &mut Sha256, path: &Path, is_whole: bool) -> io::Result<()> {
    let mut file = File::open(path)?;
    let mut n_left = u64::MAX;
    if !is_whole {
        let mut length = [0; 8];
        file.read_exact(&mut length)?;
        hash.update(length);
        n_left = u64::from_le_bytes(length);
    }
    let mut reader = file.take(n_left);
    let mut buffer = vec![0; 1 << 20];
    loop {
        match reader.read(&mut buffer)? {
            0 => return Ok(()),
            n => hash.update(&buffer[..n]),
        }
    }
}

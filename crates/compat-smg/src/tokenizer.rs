//! A checkpoint's tokenizer files as a zip archive.

use std::fs;
use std::io::{self, Cursor, Write as _};
use std::path::Path;

use sha2::{Digest as _, Sha256};
use zip::ZipWriter;
use zip::write::SimpleFileOptions;

use crate::engine::GetTokenizerChunk;

/// Bytes in one message, as the contract's own servers choose it.
const CHUNK_BYTES: usize = 64 << 10;

/// Files that the gateway looks at, beside templates (`*.jinja`).
const NAMES: &[&str] = &[
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
];

/// The archive of the tokenizer files in `folder`, the same for the same files.
pub(crate) fn archive(folder: &Path) -> io::Result<Vec<u8>> {
    let mut names = vec![];
    for entry in fs::read_dir(folder)? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if NAMES.contains(&name.as_str()) || name.ends_with(".jinja") {
            names.push(name);
        }
    }
    names.sort();
    let mut archive = ZipWriter::new(Cursor::new(vec![]));
    for name in names {
        archive.start_file(&name, SimpleFileOptions::default())?;
        archive.write_all(&fs::read(folder.join(&name))?)?;
    }
    Ok(archive.finish()?.into_inner())
}

/// The archive in pieces, the last one with its hash.
pub(crate) fn chunks(archive: Vec<u8>) -> impl Iterator<Item = GetTokenizerChunk> + Send + 'static {
    let sha256 = format!("{:x}", Sha256::digest(&archive));
    let n_chunks = archive.len().div_ceil(CHUNK_BYTES);
    (0..n_chunks).map(move |index| {
        let start = index * CHUNK_BYTES;
        let data = archive[start..archive.len().min(start + CHUNK_BYTES)].to_vec();
        let is_last = index + 1 == n_chunks;
        GetTokenizerChunk { data, sha256: if is_last { sha256.clone() } else { String::new() } }
    })
}

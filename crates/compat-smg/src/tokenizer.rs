//! A checkpoint's tokenizer files as a zip archive.

use std::fs;
use std::io::{self, Cursor, Write as _};
use std::path::Path;

use checkpoint_files::read_bounded;
use sha2::{Digest as _, Sha256};
use zip::ZipWriter;
use zip::write::SimpleFileOptions;

use crate::engine::GetTokenizerChunk;

/// Bytes in one message, as the contract's own servers choose it.
const CHUNK_BYTES: usize = 64 << 10;

/// Bytes that a file may have; the vocabularies of the largest models have some 40 MB.
pub(crate) const MAX_FILE_BYTES: u64 = 1 << 28;

/// Files that the gateway looks at, beside templates (`*.jinja`).
const NAMES: &[&str] = &[
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
];

/// The archive of the tokenizer files in `folder`, the same for the same files. Fails at one that
/// is too long, or no regular file.
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
        archive.write_all(&read_bounded(&folder.join(&name), MAX_FILE_BYTES)?)?;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_without_an_end_is_not_archived() {
        let folder = std::env::temp_dir().join(format!("tokenizer-files-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("tokenizer.json"), "{}").unwrap();
        let whole = archive(&folder).unwrap();
        let template = folder.join("chat_template.jinja");
        // A length that takes no room on the disk.
        fs::File::create(&template).unwrap().set_len(MAX_FILE_BYTES + 1).unwrap();
        assert_eq!(archive(&folder).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
        fs::remove_file(&template).unwrap();
        fs::create_dir(&template).unwrap();
        assert_eq!(archive(&folder).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        fs::remove_dir(&template).unwrap();
        assert_eq!(archive(&folder).unwrap(), whole);
        fs::remove_dir_all(&folder).unwrap();
    }
}

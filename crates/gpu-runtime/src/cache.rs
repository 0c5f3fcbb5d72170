//! Compiled kernels on disk.
//!
//! An entry is a file named by the hash of all that its code depends on. It begins with the
//! SHA-256 of the code, so that a damaged one is noticed and made anew.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicU64, Ordering};
use std::{env, fmt};

use sha2::{Digest, Sha256};

const HASH_BYTES: usize = 32;

/// The usual folder of compiled kernels: `tandem/kernels` in `xdg_cache_home` (the variable
/// `XDG_CACHE_HOME`, which the caller reads), else in `~/.cache`. `None` without a home.
#[must_use]
pub fn kernel_cache_dir(xdg_cache_home: Option<&OsStr>) -> Option<PathBuf> {
    // The XDG specification wants relative paths ignored.
    let given = xdg_cache_home.map(PathBuf::from).filter(|path| path.is_absolute());
    let caches = given.or_else(|| {
        env::home_dir().filter(|home| home.is_absolute()).map(|home| home.join(".cache"))
    })?;
    Some(caches.join("tandem/kernels"))
}

/// Where a module's machine code came from.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Found {
    /// The kernel cache.
    InCache,
    /// The compiler; now in the cache.
    Compiled,
    /// The compiler; not in the cache, and why.
    NotCached(String),
}

/// A hash of named parts, each with its length, so that no two lists of parts are the same.
#[derive(Default)]
pub(crate) struct Key(Sha256);

impl Key {
    pub(crate) fn part(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.update((bytes.len() as u64).to_le_bytes());
        self.0.update(bytes);
        self
    }

    pub(crate) fn file_name(self) -> String {
        format!("{}.bin", Hex(&self.0.finalize()))
    }
}

struct Hex<'a>(&'a [u8]);

impl fmt::Display for Hex<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// The code of a whole entry; `None` for an absent or damaged one.
pub(crate) fn read(file: &Path) -> Option<Vec<u8>> {
    let mut entry = fs::read(file).ok()?;
    let (hash, code) = entry.split_at_checked(HASH_BYTES)?;
    let is_whole = Sha256::digest(code)[..] == *hash;
    is_whole.then(|| entry.split_off(HASH_BYTES))
}

/// Writes an entry under another name first, so that no reader sees a part of it.
pub(crate) fn write(file: &Path, code: &[u8]) -> io::Result<()> {
    static SERIAL: AtomicU64 = AtomicU64::new(0);
    if let Some(folder) = file.parent() {
        fs::create_dir_all(folder)?;
    }
    let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
    let draft = file.with_extension(format!("{}-{serial}", process::id()));
    let entry = [&Sha256::digest(code)[..], code].concat();
    let outcome = fs::write(&draft, entry).and_then(|()| fs::rename(&draft, file));
    if outcome.is_err() {
        let _ = fs::remove_file(&draft);
    }
    outcome
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_comes_back_and_a_damaged_one_does_not() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("a/b/key.bin");
        assert_eq!(read(&file), None);
        write(&file, b"code").unwrap();
        assert_eq!(read(&file).unwrap(), b"code");
        write(&file, b"other code").unwrap();
        assert_eq!(read(&file).unwrap(), b"other code");
        assert_eq!(fs::read_dir(file.parent().unwrap()).unwrap().count(), 1);

        let whole = fs::read(&file).unwrap();
        for at in [0, HASH_BYTES, whole.len() - 1] {
            let mut damaged = whole.clone();
            damaged[at] ^= 1;
            fs::write(&file, damaged).unwrap();
            assert_eq!(read(&file), None, "byte {at}");
        }
        for len in [0, HASH_BYTES - 1, whole.len() - 1] {
            fs::write(&file, &whole[..len]).unwrap();
            assert_eq!(read(&file), None, "{len} bytes");
        }
    }

    #[test]
    fn an_entry_that_cannot_be_written_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("key.bin");
        fs::create_dir(&file).unwrap();
        assert!(write(&file, b"code").is_err());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn keys_differ_where_parts_are_cut_elsewhere() {
        let name = |parts: &[&str]| {
            let mut key = Key::default();
            parts.iter().for_each(|part| {
                key.part(part.as_bytes());
            });
            key.file_name()
        };
        assert_eq!(name(&["ab", "c"]), name(&["ab", "c"]));
        assert_ne!(name(&["ab", "c"]), name(&["a", "bc"]));
        assert_ne!(name(&["ab", "c"]), name(&["ab", "c", ""]));
        assert_eq!(name(&[]).len(), 64 + 4);
    }

    #[test]
    fn the_folder_follows_the_xdg_rule() {
        let given = kernel_cache_dir(Some(OsStr::new("/caches"))).unwrap();
        assert_eq!(given, Path::new("/caches/tandem/kernels"));
        let relative = kernel_cache_dir(Some(OsStr::new("caches")));
        assert_eq!(relative, kernel_cache_dir(None));
    }
}

//! Files as memory.

use std::fs::File;
use std::io;
use std::path::Path;

use memmap2::Mmap;

/// Maps a whole file read-only. An empty file gives an empty map.
///
/// The file must not be written to or cut while the map lives: its bytes would change under a
/// shared slice, and reading past a new end kills the process. Checkpoints are never modified in
/// place; replace them by a rename.
///
/// # Errors
///
/// What the operating system says when opening or mapping fails.
#[expect(unsafe_code, reason = "mapping a file is unsafe as another process may write to it")]
pub fn map_file(path: &Path) -> io::Result<Mmap> {
    let file = File::open(path)?;
    // SAFETY: the map is private and read-only, it covers the file as it is now, and this crate's
    // contract (above) is that nobody modifies a checkpoint file while it is mapped.
    unsafe { Mmap::map(&file) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_mapped_whole_and_an_absent_one_is_an_error() {
        let this_file = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/mmap.rs");
        let map = map_file(&this_file).unwrap();
        assert_eq!(&map[..], include_bytes!("mmap.rs"));
        let error = map_file(Path::new("no/such/file")).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}

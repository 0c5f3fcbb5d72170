//! Files as memory.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::Path;

use memmap2::{Mmap, UncheckedAdvice};

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

/// Gives the memory of a range of bytes back to the system. Whoever reads them again finds the same
/// bytes: they come from the file anew.
///
/// # Errors
///
/// What the operating system says; the pages then stay.
///
/// # Panics
///
/// If the range does not lie inside the map.
#[expect(unsafe_code, reason = "some advice, of which this is none, may change what is read")]
pub fn release_pages(map: &Mmap, bytes: Range<usize>) -> io::Result<()> {
    assert!(bytes.start <= bytes.end && bytes.end <= map.len(), "the range lies inside the map");
    if bytes.is_empty() {
        return Ok(());
    }
    // SAFETY: the map is read-only and its file is not modified ([`map_file`]), so that a dropped
    // page has no content of its own and is the same when it is read again.
    unsafe { map.unchecked_advise_range(UncheckedAdvice::DontNeed, bytes.start, bytes.len()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn released_pages_are_read_again() {
        let map = map_file(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src/mmap.rs")).unwrap();
        for bytes in [0..map.len(), 7..8, 9..9, map.len()..map.len()] {
            release_pages(&map, bytes).unwrap();
            assert_eq!(&map[..], include_bytes!("mmap.rs"));
        }
    }

    #[test]
    fn a_file_is_mapped_whole_and_an_absent_one_is_an_error() {
        let this_file = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/mmap.rs");
        let map = map_file(&this_file).unwrap();
        assert_eq!(&map[..], include_bytes!("mmap.rs"));
        let error = map_file(Path::new("no/such/file")).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}

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

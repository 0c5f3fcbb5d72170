//! What may be read as a file of a checkpoint.

use std::fs;
use std::io::{self, ErrorKind, Read as _};
use std::path::Path;

/// Checks that `file` is a regular file, by itself or behind a symbolic link: opening a FIFO would
/// wait for its writer, and a device has no end.
///
/// # Errors
///
/// [`ErrorKind::InvalidInput`] if it is none; what the operating system says if it is not there.
pub fn check_regular(file: &Path) -> io::Result<()> {
    if fs::metadata(file)?.is_file() {
        return Ok(());
    }
    Err(io::Error::new(ErrorKind::InvalidInput, "it is not a regular file"))
}

/// Reads a regular file of at most `max_bytes`.
///
/// # Errors
///
/// As [`check_regular`]; [`ErrorKind::FileTooLarge`] if it is longer.
pub fn read_bounded(file: &Path, max_bytes: u64) -> io::Result<Vec<u8>> {
    check_regular(file)?;
    let mut bytes = Vec::new();
    fs::File::open(file)?.take(max_bytes + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > max_bytes {
        let reason = format!("it has more than {max_bytes} bytes");
        return Err(io::Error::new(ErrorKind::FileTooLarge, reason));
    }
    Ok(bytes)
}

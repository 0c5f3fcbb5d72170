//! The libtorch release that the workspace is built against, and where it lies.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::{process, workspace};

/// The release that tch 0.24 binds; `tch` in the root `Cargo.toml` is the other half of the pair.
pub(crate) const VERSION: &str = "2.11.0";

/// Requirements of the CPU set, as pip reads them.
pub(crate) const CPU_WHEELS: &[&str] =
    &["torch==2.11.0", "nvidia-cuda-runtime==13.0.96", "nvidia-cuda-cupti==13.0.85"];

/// Free bytes that the CPU set needs while it is made: wheels and unpacked files.
pub(crate) const CPU_BYTES_NEEDED: u64 = 1_200_000_000;

/// Free bytes that the CUDA set needs while it is made.
pub(crate) const CUDA_BYTES_NEEDED: u64 = 7_000_000_000;

/// The folder that `setup` makes.
pub(crate) fn folder() -> PathBuf {
    workspace::root().join(".libtorch")
}

/// Where libtorch comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// The folder that `setup` makes.
    Own,
    /// `LIBTORCH` names a folder of the user's.
    Folder(PathBuf),
    /// `LIBTORCH_USE_PYTORCH` is set: the PyTorch of `python3`.
    PyTorch,
}

/// Decides by the two variables that torch-sys reads. `.cargo/config.toml` sets `LIBTORCH` to the
/// own folder where the user has not.
pub(crate) fn source(libtorch: Option<&Path>, use_pytorch: bool, own: &Path) -> Source {
    match libtorch {
        _ if use_pytorch => Source::PyTorch,
        Some(folder) if folder != own => Source::Folder(folder.to_owned()),
        _ => Source::Own,
    }
}

/// [`source`] of this process's environment.
pub(crate) fn source_of_environment() -> Source {
    let libtorch = std::env::var_os("LIBTORCH").map(PathBuf::from);
    let use_pytorch = std::env::var_os("LIBTORCH_USE_PYTORCH").is_some();
    source(libtorch.as_deref(), use_pytorch, &folder())
}

/// `LD_LIBRARY_PATH` for what a task builds and runs, where the run path in the programs does not
/// lead to the libraries: they are not in `.libtorch`, or the target folder is not `target`.
pub(crate) fn loader_path() -> Result<Option<(&'static str, OsString)>> {
    const NAME: &str = "LD_LIBRARY_PATH";
    let lib = match source_of_environment() {
        Source::Own if workspace::load()?.1 == workspace::root().join("target") => return Ok(None),
        Source::Own => folder().join("lib"),
        Source::Folder(folder) => folder.join("lib"),
        Source::PyTorch => {
            let print = "import torch; print(torch.__path__[0])";
            PathBuf::from(process::python(&["-c", print])?.trim()).join("lib")
        }
    };
    let others = std::env::var_os(NAME).unwrap_or_default();
    let folders = std::iter::once(lib).chain(std::env::split_paths(&others));
    let joined = std::env::join_paths(folders).context("the libtorch folder's name has a colon")?;
    Ok(Some((NAME, joined)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_users_choice_wins() {
        let own = Path::new("/w/.libtorch");
        assert_eq!(source(None, false, own), Source::Own);
        assert_eq!(source(Some(own), false, own), Source::Own);
        let theirs = Path::new("/their/libtorch");
        assert_eq!(source(Some(theirs), false, own), Source::Folder(theirs.to_owned()));
        assert_eq!(source(Some(own), true, own), Source::PyTorch);
    }
}

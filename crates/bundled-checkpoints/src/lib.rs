//! The checkpoints that ship with the project, and configurations for benches, found by name.
//!
//! **Owns** the folders under `checkpoints/` (see the README there) and the lookup of a model
//! argument: a folder on disk, or a bundled name.
//! **Must not know** what is in a checkpoint, nor the environment: whoever moves a binary away
//! from the workspace passes the folder that holds the checkpoints as a search root.
//!
//! **Invariants**: a returned path is a folder that existed when it was looked up; a bundled name
//! never hides a folder of the same spelling.
//!
//! ```
//! for name in ["tiny-dsv3", "tiny-glm52", "glm52-lite"] {
//!     let dir = bundled_checkpoints::resolve(name, None)?;
//!     assert!(dir.join("config.json").is_file());
//! }
//! assert!(bundled_checkpoints::resolve("no-such-model", None).is_err());
//! # Ok::<(), bundled_checkpoints::ResolveError>(())
//! ```

use std::fmt;
use std::path::{Path, PathBuf};

const NAMES: &[&str] = &["tiny-dsv3", "tiny-glm52"];
const CONFIGURATIONS: &[&str] = &["dsv3-lite", "glm52-lite"];

/// The names of the bundled checkpoints, sorted.
#[must_use]
pub fn names() -> &'static [&'static str] {
    NAMES
}

/// The names of the bundled configurations, sorted. Their folders have a `config.json` and neither
/// weights nor a tokenizer.
#[must_use]
pub fn configurations() -> &'static [&'static str] {
    CONFIGURATIONS
}

fn is_bundled(name: &str) -> bool {
    NAMES.contains(&name) || CONFIGURATIONS.contains(&name)
}

/// The folder of a bundled checkpoint or configuration; `None` if there is no such name or its
/// folder is not found.
///
/// Looks in `search_root` if one is given; then in the workspace that this crate was built in;
/// then in `checkpoints/` beside the running executable and in the folder above it.
#[must_use]
pub fn find(name: &str, search_root: Option<&Path>) -> Option<PathBuf> {
    if !is_bundled(name) {
        return None;
    }
    roots(search_root).into_iter().map(|root| root.join(name)).find(|dir| is_checkpoint(dir))
}

/// Turns a model argument into a checkpoint folder: an existing folder as it is, otherwise a
/// bundled name, looked up as by [`find`].
///
/// # Errors
///
/// [`ResolveError::Unknown`] if it is neither, [`ResolveError::NotFound`] if it is a bundled name
/// whose folder is in none of the places.
pub fn resolve(model: &str, search_root: Option<&Path>) -> Result<PathBuf, ResolveError> {
    let as_path = Path::new(model);
    if as_path.is_dir() {
        return Ok(as_path.to_path_buf());
    }
    if !is_bundled(model) {
        return Err(ResolveError::Unknown { model: model.to_owned() });
    }
    find(model, search_root).ok_or_else(|| ResolveError::NotFound {
        name: model.to_owned(),
        searched: roots(search_root),
    })
}

fn roots(search_root: Option<&Path>) -> Vec<PathBuf> {
    let mut roots: Vec<PathBuf> = search_root.map(Path::to_path_buf).into_iter().collect();
    roots.push(Path::new(env!("CARGO_MANIFEST_DIR")).join("checkpoints"));
    let executable = std::env::current_exe().ok();
    let folders = executable.iter().flat_map(|path| path.ancestors().skip(1).take(2));
    roots.extend(folders.map(|folder| folder.join("checkpoints")));
    roots
}

fn is_checkpoint(dir: &Path) -> bool {
    dir.join("config.json").is_file()
}

/// Why a model argument names no checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ResolveError {
    /// Neither a folder nor a bundled name.
    Unknown {
        /// The argument.
        model: String,
    },
    /// A bundled name, but its folder is not there.
    NotFound {
        /// The bundled name.
        name: String,
        /// The folders that were searched for it.
        searched: Vec<PathBuf>,
    },
}

impl fmt::Display for ResolveError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown { model } => write!(
                f,
                "`{model}` is neither a checkpoint folder nor a bundled checkpoint ({}) nor a \
                 bundled configuration ({})",
                NAMES.join(", "),
                CONFIGURATIONS.join(", ")
            ),
            Self::NotFound { name, searched } => {
                write!(f, "the bundled checkpoint `{name}` is in none of")?;
                for folder in searched {
                    write!(f, " {}", folder.display())?;
                }
                write!(f, "; pass the path of its folder instead")
            }
        }
    }
}

impl std::error::Error for ResolveError {}

#[cfg(test)]
mod tests;

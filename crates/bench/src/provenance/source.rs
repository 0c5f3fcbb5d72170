//! The source of a program, as its version tells it.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::Fact;

/// The source of a program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Source {
    /// Hash of the commit.
    pub commit: String,
    /// Whether files differed from it, new ones included.
    pub is_dirty: bool,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.12}", self.commit)?;
        if self.is_dirty { f.write_str(", with changes") } else { Ok(()) }
    }
}

impl Source {
    /// That in the build metadata of a version: `0.1.0+4769999`, with `.dirty` behind it where
    /// files differed.
    #[must_use]
    pub fn of_version(version: &str) -> Fact<Self> {
        let told = || {
            let (_, metadata) = version.split_once('+')?;
            let (commit, is_dirty) = match metadata.strip_suffix(".dirty") {
                Some(commit) => (commit, true),
                None => (metadata, false),
            };
            let is_hash = commit.len() >= 7 && commit.bytes().all(|b| b.is_ascii_hexdigit());
            is_hash.then(|| Self { commit: commit.to_owned(), is_dirty })
        };
        told()
            .ok_or(format!("version {version} names no commit: `cargo xtask` builds one that does"))
            .into()
    }
}

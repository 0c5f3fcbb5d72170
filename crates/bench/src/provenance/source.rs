//! The source of a program, as git tells it.

use std::fmt;
use std::path::Path;
use std::process::Command;

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
    /// Of the checkout that holds `folder`, now.
    #[must_use]
    pub fn of_checkout(folder: &Path) -> Fact<Self> {
        let told = || {
            let commit = git(folder, &["rev-parse", "HEAD"])?;
            let changes = git(folder, &["status", "--porcelain", "--untracked-files=normal"])?;
            Ok::<_, String>(Self { commit, is_dirty: !changes.is_empty() })
        };
        told().into()
    }

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
        told().ok_or("the server's version names no commit").into()
    }
}

/// What git writes for these arguments.
fn git(folder: &Path, arguments: &[&str]) -> Result<String, String> {
    let ran = Command::new("git").arg("-C").arg(folder).args(arguments).output();
    let output = ran.map_err(|error| format!("git does not run: {error}"))?;
    if output.status.success() {
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    } else {
        Err(format!("git: {}", String::from_utf8_lossy(&output.stderr).trim()))
    }
}

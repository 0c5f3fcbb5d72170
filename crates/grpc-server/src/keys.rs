//! Bearer tokens, of which only digests are kept.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::{fmt, fs, io};

use sha2::{Digest as _, Sha256};
use subtle::ConstantTimeEq as _;
use tokio::sync::Semaphore;

/// A token under its name.
pub(crate) struct Key {
    pub(crate) name: String,
    digest: [u8; 32],
    /// Calls that may still start.
    pub(crate) places: Arc<Semaphore>,
}

/// The tokens of one file.
pub struct KeySet {
    path: PathBuf,
    pub(crate) keys: Vec<Key>,
}

impl KeySet {
    /// Reads a file with one key a line, as `name:token` or `token`; a line that begins with `#` is
    /// a comment. A token is of visible ASCII characters; one without a name is called after its
    /// line.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, has no key, or has lines with a fault; no error has a token.
    pub fn read(path: &Path) -> Result<Self, KeysError> {
        let text = fs::read_to_string(path)
            .map_err(|source| KeysError::Unreadable { path: path.to_owned(), source })?;
        let mut keys = vec![];
        let mut faults = vec![];
        let (mut names, mut digests) = (HashMap::new(), HashMap::new());
        for (line, text) in (1..).zip(text.lines().map(str::trim)) {
            if text.is_empty() || text.starts_with('#') {
                continue;
            }
            match Key::parse(text, line) {
                Ok(key) => {
                    if let Some(first) = names.insert(key.name.clone(), line) {
                        faults.push((line, format!("line {first} has the same name")));
                    }
                    if let Some(first) = digests.insert(key.digest, line) {
                        faults.push((line, format!("line {first} has the same token")));
                    }
                    keys.push(key);
                }
                Err(fault) => faults.push((line, fault.to_owned())),
            }
        }
        if keys.is_empty() && faults.is_empty() {
            return Err(KeysError::Empty { path: path.to_owned() });
        }
        if !faults.is_empty() {
            return Err(KeysError::Lines { path: path.to_owned(), faults });
        }
        Ok(Self { path: path.to_owned(), keys })
    }

    /// The key of a token. All keys are compared, in a time that does not depend on the token.
    pub(crate) fn find(&self, digest: &[u8; 32]) -> Option<&Key> {
        let mut found = None;
        for key in &self.keys {
            if key.digest.ct_eq(digest).into() {
                found = Some(key);
            }
        }
        found
    }

    /// Fails if a token is in both.
    pub(crate) fn check_apart(&self, other: &Self) -> Result<(), KeysError> {
        match self.keys.iter().find_map(|key| Some((key, other.find(&key.digest)?))) {
            None => Ok(()),
            Some((key, same)) => Err(KeysError::Shared {
                key: (self.path.clone(), key.name.clone()),
                same: (other.path.clone(), same.name.clone()),
            }),
        }
    }
}

impl Key {
    fn parse(text: &str, line: u32) -> Result<Self, &'static str> {
        let is_visible = |text: &str| text.bytes().all(|byte| byte.is_ascii_graphic());
        let (name, token) = match text.split_once(':') {
            Some((name, token)) => (name.to_owned(), token),
            None => (format!("line-{line}"), text),
        };
        if name.is_empty() || token.is_empty() {
            return Err("give name:token or token, neither of them empty");
        }
        if !is_visible(&name) || !is_visible(token) {
            return Err("only visible ASCII characters, and no spaces, may be in a key");
        }
        let places = Arc::new(Semaphore::new(Semaphore::MAX_PERMITS));
        Ok(Self { name, digest: digest(token), places })
    }
}

/// What is kept of a token.
pub(crate) fn digest(token: &str) -> [u8; 32] {
    Sha256::digest(token).into()
}

impl fmt::Debug for KeySet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.keys.iter().map(|key| &key.name)).finish()
    }
}

/// What is wrong with files of keys. None of it tells a token.
#[derive(Debug)]
#[non_exhaustive]
pub enum KeysError {
    /// A file cannot be read.
    Unreadable {
        /// Which one.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A file has no key.
    Empty {
        /// Which one.
        path: PathBuf,
    },
    /// Lines of a file have faults.
    Lines {
        /// Which file.
        path: PathBuf,
        /// Each line and what is wrong with it.
        faults: Vec<(u32, String)>,
    },
    /// A token is both a usual and an admin key.
    Shared {
        /// The file of one and its name.
        key: (PathBuf, String),
        /// Those of the other.
        same: (PathBuf, String),
    },
}

impl fmt::Display for KeysError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreadable { path, source } => {
                write!(f, "{}: cannot be read: {source}", path.display())
            }
            Self::Empty { path } => {
                write!(f, "{}: has no key; give one a line, as name:token", path.display())
            }
            Self::Lines { path, faults } => {
                write!(f, "{}", path.display())?;
                for (index, (line, fault)) in faults.iter().enumerate() {
                    let sign = if index == 0 { ':' } else { ';' };
                    write!(f, "{sign} line {line}: {fault}")?;
                }
                Ok(())
            }
            Self::Shared { key, same } => write!(
                f,
                "{}: the token of {} is that of {} in {}; give each its own",
                key.0.display(),
                key.1,
                same.1,
                same.0.display()
            ),
        }
    }
}

impl std::error::Error for KeysError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Unreadable { source, .. } => Some(source),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests;

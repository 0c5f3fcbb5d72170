//! Why a tokenizer could not be loaded or used.

use std::fmt;
use std::io;
use std::path::PathBuf;

/// Why a tokenizer could not be loaded or used.
#[derive(Debug)]
#[non_exhaustive]
pub enum TokenizationError {
    /// A file could not be read.
    Read {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// A file is not what its name says.
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        message: String,
    },
    /// `tokenizer.json` decodes in a way that is not available.
    UnsupportedDecoder {
        /// The file.
        path: PathBuf,
        /// What its `decoder` asks for.
        what: String,
    },
    /// `tokenizer_config.json` asks for a first token that the vocabulary does not have.
    UnknownBosToken {
        /// The file.
        path: PathBuf,
        /// The token.
        token: String,
    },
    /// The tokenizer refused a text.
    Encode(String),
}

impl fmt::Display for TokenizationError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Read { path, source } => write!(f, "{}: {source}", path.display()),
            Self::Malformed { path, message } => write!(f, "{}: {message}", path.display()),
            Self::UnsupportedDecoder { path, what } => write!(
                f,
                "{}: `decoder` {what} is not supported (ByteLevel, Metaspace, Replace, \
                 ByteFallback, Fuse and a leading Strip are)",
                path.display()
            ),
            Self::UnknownBosToken { path, token } => {
                write!(f, "{}: `bos_token` {token:?} is not in the vocabulary", path.display())
            }
            Self::Encode(message) => write!(f, "the text cannot be tokenized: {message}"),
        }
    }
}

impl std::error::Error for TokenizationError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Read { source, .. } => Some(source),
            _ => None,
        }
    }
}

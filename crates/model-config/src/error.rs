//! Why a configuration cannot be used.

use std::fmt;
use std::path::PathBuf;

/// Why a configuration was refused. Every variant names the file; all but the first two the field.
#[derive(Debug)]
#[non_exhaustive]
pub enum ConfigError {
    /// The file cannot be read.
    Read {
        /// Which file.
        file: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// The file is not a JSON object.
    Json {
        /// Which file.
        file: PathBuf,
        /// What the JSON reader said.
        source: serde_json::Error,
    },
    /// A field that the model cannot do without is absent or null.
    Missing {
        /// Which file.
        file: PathBuf,
        /// Which field; a nested one is written `outer.inner`.
        field: String,
    },
    /// A field has the wrong JSON type, an impossible value, or contradicts another field.
    Invalid {
        /// Which file.
        file: PathBuf,
        /// Which field.
        field: String,
        /// What is wrong, and what would be right.
        reason: String,
    },
    /// A field asks for something that this version cannot do.
    Unsupported {
        /// Which file.
        file: PathBuf,
        /// Which field.
        field: String,
        /// What is asked for, and what is supported.
        reason: String,
    },
}

impl ConfigError {
    /// The field at fault, if a single one is.
    #[must_use]
    pub fn field(&self) -> Option<&str> {
        match self {
            Self::Read { .. } | Self::Json { .. } => None,
            Self::Missing { field, .. }
            | Self::Invalid { field, .. }
            | Self::Unsupported { field, .. } => Some(field),
        }
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Read { file, source } => write!(f, "cannot read {}: {source}", file.display()),
            Self::Json { file, source } => {
                write!(f, "{} is not a JSON object: {source}", file.display())
            }
            Self::Missing { file, field } => {
                write!(f, "{}: `{field}` is missing; the model cannot be built", file.display())
            }
            Self::Invalid { file, field, reason } => {
                write!(f, "{}: `{field}` {reason}", file.display())
            }
            Self::Unsupported { file, field, reason } => {
                write!(f, "{}: `{field}` {reason}", file.display())
            }
        }
    }
}

impl std::error::Error for ConfigError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Read { source, .. } => Some(source),
            Self::Json { source, .. } => Some(source),
            Self::Missing { .. } | Self::Invalid { .. } | Self::Unsupported { .. } => None,
        }
    }
}

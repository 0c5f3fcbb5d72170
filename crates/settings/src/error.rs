//! Why there are no settings.

use std::path::PathBuf;
use std::{fmt, io};

/// Why there are no settings.
#[derive(Debug)]
#[non_exhaustive]
pub enum SettingsError {
    /// What the command line asks for or does wrong; `exit` of it prints that and ends the program.
    Arguments(clap::Error),
    /// The file cannot be read.
    Unreadable {
        /// The file.
        file: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file is not TOML.
    NotToml {
        /// The file.
        file: PathBuf,
        /// Where, and what is wrong.
        source: toml::de::Error,
    },
    /// Each names a setting, the place of its value, and the way out.
    Faults(Vec<String>),
}

impl SettingsError {
    /// An error if there is a fault.
    pub(crate) fn of_faults(faults: Vec<String>) -> Result<(), Self> {
        if faults.is_empty() { Ok(()) } else { Err(Self::Faults(faults)) }
    }
}

impl fmt::Display for SettingsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Arguments(error) => error.fmt(f),
            Self::Unreadable { file, source } => {
                let file = file.display();
                write!(f, "{file}: cannot be read: {source}; correct --config or TANDEM_CONFIG")
            }
            Self::NotToml { file, source } => {
                write!(f, "{}: {}", file.display(), source.to_string().trim_end())
            }
            Self::Faults(faults) => f.write_str(&faults.join("\n")),
        }
    }
}

impl std::error::Error for SettingsError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Arguments(error) => Some(error),
            Self::Unreadable { source, .. } => Some(source),
            Self::NotToml { source, .. } => Some(source),
            Self::Faults(_) => None,
        }
    }
}

impl From<clap::Error> for SettingsError {
    fn from(error: clap::Error) -> Self {
        Self::Arguments(error)
    }
}

//! Where a result comes from: programs, sources, settings, checkpoint and machine.

mod checkpoint;
mod host;
mod process;
mod source;

use std::collections::BTreeMap;
use std::fmt;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use checkpoint::{Checkpoint, Covers};
pub use host::Host;
pub use process::{Process, masked};
pub use source::Source;

/// Something that is known, or the reason why it is not. Nothing is ever guessed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fact<T> {
    /// What it is.
    Known(T),
    /// Why nobody can say.
    Unknown(String),
}

/// All that a reader needs to tell whether two results may be compared. A result is not made
/// without it ([`crate::ResultFile::new`]), and every field of it is asked for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Provenance {
    /// When the measurement began; RFC 3339 in UTC.
    pub started_at: Timestamp,
    /// The program that measured.
    pub bench: Build,
    /// The arguments it was started with, secrets masked.
    pub arguments: Vec<String>,
    /// What they came to, defaults included.
    pub settings: Value,
    /// The machine that it ran on.
    pub host: Host,
    /// What was measured, each by a name of its own.
    pub servers: Vec<Server>,
}

/// A program of this workspace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Build {
    /// Version of the package.
    pub version: String,
    /// The source it was built from.
    pub source: Fact<Source>,
    /// What the compiler calls itself.
    pub rustc: String,
    /// Whether it was built with optimisation rather than for debugging.
    pub is_optimized: bool,
}

/// A server, or an engine in this process, with one setting.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Server {
    /// What runs and reports call it, such as `k = 3` or `A`.
    pub name: String,
    /// Protocol and address, or `in process`.
    pub address: String,
    /// The version it tells.
    pub version: Fact<String>,
    /// The source it tells it was built from.
    pub source: Fact<Source>,
    /// What it tells of its configuration and model.
    pub config: Value,
    /// Its process, where that is on this machine.
    pub process: Fact<Process>,
    /// The weights it serves.
    pub checkpoint: Fact<Checkpoint>,
    /// What it computes on.
    pub device: Fact<String>,
    /// Threads it computes with.
    pub threads: Fact<u32>,
    /// Versions of libraries it tells, such as libtorch's.
    pub libraries: BTreeMap<String, String>,
    /// Whether drafts are accepted by a schedule instead of by the model.
    pub synthetic_acceptance: Fact<bool>,
}

impl<T> Fact<T> {
    /// The fact, if it is known.
    pub fn known(&self) -> Option<&T> {
        match self {
            Self::Known(fact) => Some(fact),
            Self::Unknown(_) => None,
        }
    }
}

impl<T, E: fmt::Display> From<Result<T, E>> for Fact<T> {
    fn from(result: Result<T, E>) -> Self {
        match result {
            Ok(fact) => Self::Known(fact),
            Err(error) => Self::Unknown(error.to_string()),
        }
    }
}

impl<T: fmt::Display> fmt::Display for Fact<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Known(fact) => fact.fmt(f),
            Self::Unknown(why) => write!(f, "unknown ({why})"),
        }
    }
}

impl Provenance {
    /// That of a measurement that `bench` begins now on this machine, of no server yet.
    #[must_use]
    pub fn now(bench: Build, arguments: &[String], settings: Value) -> Self {
        Self {
            started_at: Timestamp::now(),
            bench,
            arguments: masked(arguments),
            settings,
            host: Host::this(),
            servers: vec![],
        }
    }
}

impl Build {
    /// Of the program that runs and has this version, whose build metadata may name its source.
    #[must_use]
    pub fn of_this_program(version: &str) -> Self {
        Self {
            version: version.to_owned(),
            source: Source::of_version(version),
            rustc: env!("BENCH_RUSTC").to_owned(),
            is_optimized: !cfg!(debug_assertions),
        }
    }
}

impl Server {
    /// A server that tells nothing of itself; what is known is then filled in.
    #[must_use]
    pub fn untold(name: impl Into<String>, address: impl Into<String>) -> Self {
        fn untold<T>() -> Fact<T> {
            Fact::Unknown("the server does not tell".to_owned())
        }
        Self {
            name: name.into(),
            address: address.into(),
            version: untold(),
            source: untold(),
            config: Value::Null,
            process: untold(),
            checkpoint: untold(),
            device: untold(),
            threads: untold(),
            libraries: BTreeMap::new(),
            synthetic_acceptance: untold(),
        }
    }
}

#[cfg(test)]
mod tests;

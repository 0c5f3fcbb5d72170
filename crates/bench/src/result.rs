//! The one document that results are kept in.

use std::fmt;
use std::fs;
use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::arrivals::Load;
use crate::compare::AbResult;
use crate::machine::{GeneratorLoad, MachineLoad};
use crate::metrics::{Metrics, Slo};
use crate::provenance::{Provenance, Server};
use crate::record::Record;
use crate::series::Series;
use crate::summary::Summary;
use crate::target::Counters;
use crate::workload::Planned;

/// The form of the document; a change that old readers would misread gets the next number.
pub const SCHEMA: &str = "tandem-bench/1";

/// What was measured, and where it comes from.
///
/// There is no result without provenance: [`Self::new`] asks for it, and a run is taken only of a
/// server that the provenance has.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ResultFile {
    schema: String,
    title: String,
    provenance: Provenance,
    runs: Vec<RunResult>,
    ab: Vec<AbResult>,
    /// Whether runs that were planned are not there.
    is_partial: bool,
}

/// What one run came to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunResult {
    /// The setting of the load, such as `concurrency 16`; the same for all servers and repeats.
    pub name: String,
    /// The server's name in the provenance.
    pub server: String,
    /// When requests were sent.
    pub load: Load,
    /// What was asked.
    pub workload: Workload,
    /// Which of the repeats this is, from 0; of an A/B measurement, which pair.
    pub repeat: u32,
    /// Seed of prompts, lengths and times.
    pub seed: u64,
    /// Requests that were sent before, and not measured.
    pub n_warmup: u32,
    /// Whether the server was not made to forget its prompts before.
    #[serde(default)]
    pub kept_prompts: bool,
    /// Limits of good requests.
    pub slo: Slo,
    /// The figures.
    pub metrics: Metrics,
    /// What the server counted meanwhile, where it tells.
    pub counters: Option<Counters>,
    /// What else the machine did.
    pub machine: MachineLoad,
    /// Whether the generator kept up; unset where the engine ran in the same process.
    pub generator: Option<GeneratorLoad>,
    /// Whether the run was cut short.
    pub is_partial: bool,
    /// Time of a whole batch from its sending to its last end, milliseconds, where requests ran in
    /// batches.
    pub batch_ms: Option<Summary>,
    /// What plots need.
    pub series: Series,
    /// Every request, where they are kept.
    pub records: Option<Vec<Record>>,
}

/// What was asked of a server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Workload {
    /// For readers: the kind of prompts, and their lengths.
    pub description: String,
    /// Requests.
    pub n_requests: usize,
    /// SHA-256 of the requests, prompts and limits included, the number of drafts not: that is a
    /// setting of the server, which a request only hands on. In hexadecimal.
    pub sha256: String,
}

impl Workload {
    /// Of these requests.
    #[must_use]
    pub fn of(description: impl Into<String>, requests: &[Planned]) -> Self {
        let asked = |planned: &Planned| Planned { num_speculative_tokens: None, ..planned.clone() };
        let asked: Vec<Planned> = requests.iter().map(asked).collect();
        let json = serde_json::to_vec(&asked).expect("plain data has a JSON form");
        Self {
            description: description.into(),
            n_requests: requests.len(),
            sha256: Sha256::digest(json).iter().map(|byte| format!("{byte:02x}")).collect(),
        }
    }
}

/// A document of results cannot be written or read.
#[derive(Debug)]
#[non_exhaustive]
pub enum ResultFileError {
    /// The file cannot be written or read.
    Io(io::Error),
    /// It is no document of results, or an incomplete one.
    Malformed(serde_json::Error),
    /// It has another form than this program's: the one named, or none.
    Schema(Option<String>),
    /// A run is of this server, which the provenance does not have.
    UnknownServer(String),
}

impl fmt::Display for ResultFileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io(error) => error.fmt(f),
            Self::Malformed(error) => write!(f, "not a complete document of results: {error}"),
            Self::Schema(Some(schema)) => {
                write!(f, "the document's schema is {schema}, and this program reads {SCHEMA}")
            }
            Self::Schema(None) => write!(f, "not a document of results: it names no schema"),
            Self::UnknownServer(name) => {
                write!(f, "a run is of the server {name}, of which nothing is known")
            }
        }
    }
}

impl std::error::Error for ResultFileError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Io(error) => Some(error),
            Self::Malformed(error) => Some(error),
            Self::Schema(_) | Self::UnknownServer(_) => None,
        }
    }
}

impl ResultFile {
    /// Results that come from there; none yet.
    #[must_use]
    pub fn new(provenance: Provenance, title: impl Into<String>) -> Self {
        Self {
            schema: SCHEMA.to_owned(),
            title: title.into(),
            provenance,
            runs: vec![],
            ab: vec![],
            is_partial: false,
        }
    }

    /// Adds a server that is then measured. One of the same name takes the place of an earlier one,
    /// of which more is known by now.
    pub fn add_server(&mut self, server: Server) {
        let servers = &mut self.provenance.servers;
        match servers.iter_mut().find(|known| known.name == server.name) {
            Some(known) => *known = server,
            None => servers.push(server),
        }
    }

    /// Adds a run.
    ///
    /// # Errors
    ///
    /// If nothing is known of its server.
    pub fn push(&mut self, run: RunResult) -> Result<(), ResultFileError> {
        if self.server(&run.server).is_none() {
            return Err(ResultFileError::UnknownServer(run.server));
        }
        self.runs.push(run);
        Ok(())
    }

    /// Compares the runs of two servers pair by pair, for each setting that both have, and keeps
    /// what comes of it beside what other pairs came to.
    pub fn judge_pairs(&mut self, a: &str, b: &str) {
        self.ab.extend(AbResult::of_runs(&self.runs, a, b));
    }

    /// Marks it, in its title as well: runs that were planned are not there, or not whole.
    pub fn mark_partial(&mut self) {
        if !std::mem::replace(&mut self.is_partial, true) {
            self.title.push_str(" (partial)");
        }
    }

    /// Whether runs that were planned are not there, or not whole.
    #[must_use]
    pub fn is_partial(&self) -> bool {
        self.is_partial
    }

    /// What readers call it.
    #[must_use]
    pub fn title(&self) -> &str {
        &self.title
    }

    /// Where it comes from.
    #[must_use]
    pub fn provenance(&self) -> &Provenance {
        &self.provenance
    }

    /// The runs, in the order in which they ran.
    #[must_use]
    pub fn runs(&self) -> &[RunResult] {
        &self.runs
    }

    /// What [`Self::judge_pairs`] found, one for each setting.
    #[must_use]
    pub fn ab(&self) -> &[AbResult] {
        &self.ab
    }

    /// What is known of a server.
    #[must_use]
    pub fn server(&self, name: &str) -> Option<&Server> {
        self.provenance.servers.iter().find(|server| server.name == name)
    }

    /// Writes the document: the whole of it, or nothing.
    ///
    /// # Errors
    ///
    /// If the file cannot be written.
    pub fn write(&self, path: &Path) -> Result<(), ResultFileError> {
        let mut json = serde_json::to_vec(self).map_err(ResultFileError::Malformed)?;
        json.push(b'\n');
        write_whole(path, &json).map_err(ResultFileError::Io)
    }

    /// Reads a document.
    ///
    /// # Errors
    ///
    /// If it cannot be read, is of another schema, or incomplete.
    pub fn read(path: &Path) -> Result<Self, ResultFileError> {
        Self::from_json(&fs::read_to_string(path).map_err(ResultFileError::Io)?)
    }

    /// Reads a document's text.
    ///
    /// # Errors
    ///
    /// If it is of another schema, or incomplete.
    pub fn from_json(text: &str) -> Result<Self, ResultFileError> {
        /// What documents of all schemas have.
        #[derive(Deserialize)]
        struct Head {
            schema: Option<String>,
        }
        let head: Head = serde_json::from_str(text).map_err(ResultFileError::Malformed)?;
        if head.schema.as_deref() != Some(SCHEMA) {
            return Err(ResultFileError::Schema(head.schema));
        }
        let file: Self = serde_json::from_str(text).map_err(ResultFileError::Malformed)?;
        match file.runs.iter().find(|run| file.server(&run.server).is_none()) {
            Some(run) => Err(ResultFileError::UnknownServer(run.server.clone())),
            None => Ok(file),
        }
    }
}

/// Writes a file of its own beside `path` and gives it its name at the end.
fn write_whole(path: &Path, content: &[u8]) -> io::Result<()> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.part", std::process::id()));
    let part = path.with_file_name(name);
    let written = fs::write(&part, content).and_then(|()| fs::rename(&part, path));
    if written.is_err() {
        // What cannot be written may well not be there.
        let _ = fs::remove_file(&part);
    }
    written
}

#[cfg(test)]
mod tests;

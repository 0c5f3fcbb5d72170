//! What a hostile checkpoint may say, tried by mutation and under libFuzzer.
//!
//! **Owns** a [`Target`] for each kind of file that a checkpoint brings beside tensors' data: what
//! reads it, what must hold of whatever is read, and the seeds that inputs are made of.
//! **Must not know** how inputs are made: the tests mutate seeds for a moment, `cargo xtask fuzz`
//! runs libFuzzer, which looks for inputs that reach new code, as long as one likes.
//!
//! **Invariant**: a target neither panics nor exhausts memory or time, whatever its input.
//!
//! ```
//! let target = fuzz::target("config").expect("it is one of them");
//! for seed in target.seeds() {
//!     (target.run)(&seed);
//!     (target.run)(&seed[..seed.len() / 2]);
//! }
//! assert!(fuzz::target("weather").is_none());
//! ```

mod files;
mod template;
mod tokenizer;

use std::fs;
use std::path::Path;

/// A reader of files that others have made.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// What it is called.
    pub name: &'static str,
    /// Reads an input and checks what comes of it.
    pub run: fn(&[u8]),
    /// Sound inputs.
    seeds: fn() -> Vec<Vec<u8>>,
}

/// Every target.
pub const TARGETS: &[Target] = &[
    Target { name: "header", run: files::header, seeds: files::header_seeds },
    Target { name: "index", run: files::index, seeds: files::index_seeds },
    Target { name: "config", run: files::config, seeds: files::config_seeds },
    Target { name: "tokenizer", run: tokenizer::run, seeds: tokenizer::seeds },
    Target { name: "template", run: template::run, seeds: template::seeds },
];

/// The target of a name.
#[must_use]
pub fn target(name: &str) -> Option<&'static Target> {
    TARGETS.iter().find(|target| target.name == name)
}

impl Target {
    /// Sound inputs, which others are made of.
    ///
    /// # Panics
    ///
    /// If the sources of the workspace are not where this was built.
    #[must_use]
    pub fn seeds(&self) -> Vec<Vec<u8>> {
        (self.seeds)()
    }
}

/// The files of a folder of the workspace whose names end so, by name.
fn files_of(folder: &str, end: &str) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(folder);
    let entries = fs::read_dir(&folder).expect("the folder is in the workspace");
    let mut files: Vec<_> = entries.map(|entry| entry.expect("a folder is read").path()).collect();
    files.retain(|file| file.to_string_lossy().ends_with(end));
    files.sort();
    files.iter().map(|file| fs::read(file).expect("a file of the workspace is read")).collect()
}

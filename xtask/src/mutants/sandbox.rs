//! A private copy of some crates, with a target folder of its own.

use std::collections::HashSet;
use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::list::Fault;
use crate::workspace::Member;
use crate::{process, workspace};

/// How often a running program is looked at.
const POLL: Duration = Duration::from_millis(5);

/// A copied workspace. Faults are put into it, never into the working tree.
#[derive(Debug)]
pub(super) struct Sandbox {
    tree: PathBuf,
    target: PathBuf,
    log: PathBuf,
}

/// What a build came to.
pub(super) enum Built {
    Program(PathBuf),
    /// What the compiler says.
    Errors(String),
}

impl Built {
    /// The program of crates that must compile.
    pub(super) fn program(self) -> Result<PathBuf> {
        match self {
            Self::Program(program) => Ok(program),
            Self::Errors(text) => bail!("the crates do not compile without a fault:\n{text}"),
        }
    }
}

/// What a program did.
pub(super) struct Output {
    /// `None` if it was stopped at the time limit.
    pub(super) status: Option<ExitStatus>,
    /// Both of its outputs.
    pub(super) text: String,
}

impl Sandbox {
    /// Makes `folder` a workspace of `members` as they are now. What an earlier run left there is
    /// used again where it is the same, so that little is compiled.
    pub(super) fn new(folder: &Path, members: &[&Member]) -> Result<Self> {
        let tree = folder.join("tree");
        let root = workspace::root();
        let manifest = fs::read_to_string(root.join("Cargo.toml")).context("read Cargo.toml")?;
        write(&tree.join("Cargo.toml"), narrowed(&manifest)?.as_bytes())?;
        let lock = fs::read(root.join("Cargo.lock")).context("read Cargo.lock")?;
        write(&tree.join("Cargo.lock"), &lock)?;
        let crates = tree.join("crates");
        fs::create_dir_all(&crates)?;
        let mut names = HashSet::new();
        for member in members {
            let name = member.folder.file_name().context("a crate lies in a folder")?;
            mirror(&member.folder, &crates.join(name))?;
            names.insert(name.to_owned());
        }
        keep_only(&crates, &names)?;
        Ok(Self { tree, target: folder.join("target"), log: folder.join("log") })
    }

    /// Runs `trial` with `fault` in the copy, and takes it out again.
    pub(super) fn with<T>(&self, fault: &Fault, trial: impl FnOnce() -> Result<T>) -> Result<T> {
        let path = self.tree.join("crates").join(&fault.file);
        let source = fs::read_to_string(&path).with_context(|| format!("read {}", fault.file))?;
        fs::write(&path, fault.apply(&source)?)?;
        let result = trial();
        fs::write(&path, source)?;
        result
    }

    /// Builds the one program that `cargo ARGS` makes.
    pub(super) fn build(&self, args: &[&str]) -> Result<Built> {
        let mut command = process::cargo(args);
        command.args(["--quiet", "--message-format", "json-render-diagnostics", "--target-dir"]);
        command.arg(&self.target).current_dir(&self.tree).env("CARGO_INCREMENTAL", "1");
        let output = command.output().context("cannot start cargo")?;
        if !output.status.success() {
            return Ok(Built::Errors(String::from_utf8_lossy(&output.stderr).into_owned()));
        }
        let messages = String::from_utf8_lossy(&output.stdout);
        let program = messages.lines().rev().find_map(executable);
        Ok(Built::Program(program.context("cargo names no program")?))
    }

    /// Runs a program, for `limit` at most.
    pub(super) fn run(&self, program: &Path, args: &[&str], limit: Duration) -> Result<Output> {
        let log = File::create(&self.log).context("cannot write a log")?;
        let mut command = Command::new(program);
        command.args(args).current_dir(&self.tree).env("RUST_BACKTRACE", "0");
        command.stdout(log.try_clone()?).stderr(log);
        let start = Instant::now();
        let mut child = command.spawn().with_context(|| format!("run {}", program.display()))?;
        let status = loop {
            if let Some(status) = child.try_wait()? {
                break Some(status);
            }
            if start.elapsed() > limit {
                child.kill()?;
                child.wait()?;
                break None;
            }
            std::thread::sleep(POLL);
        };
        let text = String::from_utf8_lossy(&fs::read(&self.log)?).into_owned();
        Ok(Output { status, text })
    }
}

/// The workspace's manifest with the copied crates as its only members.
fn narrowed(manifest: &str) -> Result<String> {
    let members = manifest.lines().find(|line| line.starts_with("members = [\"crates/*\""));
    let members = members.context("Cargo.toml lists no `members = [\"crates/*\"`")?;
    ensure!(members.ends_with(']'), "Cargo.toml lists its members on several lines");
    Ok(manifest.replacen(members, "members = [\"crates/*\"]", 1))
}

/// The program of one of cargo's messages.
fn executable(message: &str) -> Option<PathBuf> {
    let message: Value = serde_json::from_str(message).ok()?;
    message["executable"].as_str().map(PathBuf::from)
}

/// Makes `to` equal to the folder `from`.
fn mirror(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    let mut names = HashSet::new();
    for entry in fs::read_dir(from).with_context(|| format!("read {}", from.display()))? {
        let entry = entry?;
        let copy = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            mirror(&entry.path(), &copy)?;
        } else {
            write(&copy, &fs::read(entry.path())?)?;
        }
        names.insert(entry.file_name());
    }
    keep_only(to, &names)
}

/// Removes what is not among `names` from a folder.
fn keep_only(folder: &Path, names: &HashSet<OsString>) -> Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if names.contains(&entry.file_name()) {
            continue;
        }
        if entry.file_type()?.is_dir() {
            fs::remove_dir_all(entry.path())?;
        } else {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

/// Writes a file unless it is so already: cargo compiles again what is newer than its output.
fn write(path: &Path, content: &[u8]) -> Result<()> {
    if fs::read(path).is_ok_and(|old| old == content) {
        return Ok(());
    }
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    fs::write(path, content).with_context(|| format!("write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_becomes_equal_and_equal_files_stay_untouched() {
        let folder = tempfile::tempdir().unwrap();
        let (from, to) = (folder.path().join("from"), folder.path().join("to"));
        fs::create_dir_all(from.join("src")).unwrap();
        fs::write(from.join("src/a.rs"), "a").unwrap();
        fs::write(from.join("src/b.rs"), "b").unwrap();
        mirror(&from, &to).unwrap();
        let modified = || fs::metadata(to.join("src/a.rs")).unwrap().modified().unwrap();
        let before = modified();
        fs::write(to.join("src/b.rs"), "a fault").unwrap();
        fs::write(to.join("src/c.rs"), "left over").unwrap();
        fs::create_dir_all(to.join("old/src")).unwrap();
        mirror(&from, &to).unwrap();
        assert_eq!(fs::read_to_string(to.join("src/b.rs")).unwrap(), "b");
        assert!(!to.join("src/c.rs").exists() && !to.join("old").exists());
        assert_eq!(modified(), before);
    }

    #[test]
    fn a_fault_is_in_the_copy_only_during_its_trial() {
        let folder = tempfile::tempdir().unwrap();
        let tree = folder.path().to_owned();
        let file = tree.join("crates/c/src/f.rs");
        write(&file, b"one two").unwrap();
        let sandbox = Sandbox { target: tree.join("target"), log: tree.join("log"), tree };
        let faults = super::super::list::parse("a | c/src/f.rs | two | three").unwrap();
        let read = || fs::read_to_string(&file).unwrap();
        let during = sandbox.with(&faults[0], || Ok(read())).unwrap();
        assert_eq!((during.as_str(), read().as_str()), ("one three", "one two"));
        let failed: Result<()> = sandbox.with(&faults[0], || anyhow::bail!("no"));
        assert!(failed.is_err());
        assert_eq!(read(), "one two");
    }

    #[test]
    fn the_manifest_names_the_copied_crates_alone() {
        let manifest = "[workspace]\nmembers = [\"crates/*\", \"xtask\"]\n[x]\n";
        let narrow = narrowed(manifest).unwrap();
        assert_eq!(narrow, "[workspace]\nmembers = [\"crates/*\"]\n[x]\n");
        assert!(narrowed("[workspace]\n").is_err());
    }

    #[test]
    fn a_program_is_stopped_at_its_limit() {
        let folder = tempfile::tempdir().unwrap();
        let tree = folder.path().to_owned();
        let sandbox = Sandbox { target: tree.join("target"), log: tree.join("log"), tree };
        let long = Duration::from_secs(60);
        let said = sandbox.run("sh".as_ref(), &["-c", "echo out; echo err >&2"], long).unwrap();
        assert!(said.status.unwrap().success());
        assert_eq!(said.text, "out\nerr\n");
        let stopped = sandbox.run("sleep".as_ref(), &["60"], Duration::from_millis(20)).unwrap();
        assert_eq!(stopped.status, None);
    }
}

//! `cargo xtask serve`: build and become the server.

use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::{libtorch, process, setup, workspace};

pub(crate) const HELP: &str = "Arguments are those of `tandem serve`.";

pub(crate) fn run(args: &[String]) -> Result<()> {
    run_tandem("serve", args)
}

/// Builds the program and becomes it, with this command and its arguments.
pub(crate) fn run_tandem(command: &str, args: &[String]) -> Result<()> {
    setup::ensure_libtorch()?;
    let tandem = build(&["-p", "server"])?;
    let mut program = Command::new(&tandem);
    program.arg(command).args(args).envs(libtorch::loader_path()?);
    // Returns only if it fails: from here on this process is the program, and gets its signals.
    Err(program.exec()).with_context(|| format!("cannot start {}", tandem.display()))
}

/// Builds in release and returns the executable that cargo reports, wherever the target folder is.
pub(crate) fn build(target: &[&str]) -> Result<PathBuf> {
    let mut command = process::cargo(["build", "--release"]);
    command.args(target).arg("--message-format=json-render-diagnostics");
    // Read by the program `tandem` alone, so that a commit compiles nothing else anew.
    command.envs(commit().map(|commit| ("TANDEM_COMMIT", commit)));
    let messages = process::output(&mut command)?;
    let mut executables = messages.lines().filter_map(|line| {
        let message: Value = serde_json::from_str(line).ok()?;
        message["executable"].as_str().map(PathBuf::from)
    });
    executables.next_back().context("cargo built no executable")
}

/// The commit of the checkout in 12 digits, with `.dirty` behind it where files differ, new ones
/// included; none without git.
fn commit() -> Option<String> {
    let git = |args: &[&str]| {
        let ran = Command::new("git").args(args).current_dir(workspace::root()).output().ok()?;
        ran.status.success().then(|| String::from_utf8_lossy(&ran.stdout).trim().to_owned())
    };
    let commit = git(&["rev-parse", "--short=12", "HEAD"])?;
    let is_dirty = !git(&["status", "--porcelain", "--untracked-files=normal"])?.is_empty();
    Some(if is_dirty { format!("{commit}.dirty") } else { commit })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_commit_is_one_that_versions_can_name() {
        // An archive of the sources has none.
        let Some(commit) = commit() else { return };
        let digits = commit.trim_end_matches(".dirty");
        assert!(digits.len() >= 12 && digits.bytes().all(|b| b.is_ascii_hexdigit()), "{commit}");
    }
}

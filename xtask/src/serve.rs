//! `cargo xtask serve`: build and become the server.

use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::{libtorch, process, setup};

pub(crate) const HELP: &str = "Arguments are those of `tandem serve`.";

pub(crate) fn run(args: &[String]) -> Result<()> {
    setup::ensure_libtorch()?;
    let tandem = build(&["-p", "server"])?;
    let mut serve = Command::new(&tandem);
    serve.arg("serve").args(args).envs(libtorch::loader_path()?);
    // Returns only if it fails: from here on this process is the server, and gets its signals.
    Err(serve.exec()).with_context(|| format!("cannot start {}", tandem.display()))
}

/// Builds in release and returns the executable that cargo reports, wherever the target folder is.
pub(crate) fn build(target: &[&str]) -> Result<PathBuf> {
    let mut command = process::cargo(["build", "--release"]);
    command.args(target).arg("--message-format=json-render-diagnostics");
    let messages = process::output(&mut command)?;
    let mut executables = messages.lines().filter_map(|line| {
        let message: Value = serde_json::from_str(line).ok()?;
        message["executable"].as_str().map(PathBuf::from)
    });
    executables.next_back().context("cargo built no executable")
}

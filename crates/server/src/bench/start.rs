//! Servers that a benchmark starts and stops.

use std::io::{BufRead as _, BufReader};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, bail};
use serde_json::Value;
use tokio_util::sync::CancellationToken;

use super::Interrupted;

/// A server of ours, which ends with this.
pub(super) struct Started(Child);

impl Drop for Started {
    fn drop(&mut self) {
        // It has ended by itself where these fail.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts `tandem serve` with these arguments and waits until it listens: its settings, itself and
/// its URL.
pub(super) async fn start(
    arguments: &str,
    tandem: Option<&Path>,
    stop: &CancellationToken,
) -> Result<(Value, Started, String)> {
    let program = match tandem {
        Some(program) => program.to_owned(),
        None => std::env::current_exe()?,
    };
    let mut serve = Command::new(&program);
    serve.args(["serve", "--port", "0"]).args(arguments.split_whitespace());
    let settings = settings(&program, arguments)?;
    if std::env::var_os("RUST_LOG").is_none() {
        serve.env("RUST_LOG", "warn");
    }
    // In a group of its own, so that Ctrl-C reaches the benchmark alone.
    serve.stdout(Stdio::piped()).process_group(0);
    let mut child = serve.spawn().with_context(|| cannot_start(&program))?;
    let stdout = child.stdout.take().context("a server has a standard output")?;
    let started = Started(child);
    let address = tokio::task::spawn_blocking(|| address(stdout));
    let address = tokio::select! {
        // The server ends with `started`, and with it what is waited for.
        () = stop.cancelled() => return Err(Interrupted.into()),
        address = address => address??,
    };
    let Some(address) = address else {
        bail!("`tandem serve {arguments}` ended before it listened");
    };
    Ok((settings, started, format!("http://{address}")))
}

fn cannot_start(program: &Path) -> String {
    format!("cannot start {}", program.display())
}

/// All settings that the server is going to have, defaults included.
fn settings(program: &Path, arguments: &str) -> Result<Value> {
    let mut print = Command::new(program);
    print.arg("serve").args(arguments.split_whitespace()).arg("--print-config");
    let printed = print.output().with_context(|| cannot_start(program))?;
    if !printed.status.success() {
        let why = String::from_utf8_lossy(&printed.stderr);
        bail!("`tandem serve {arguments}`: {}", why.trim().trim_start_matches("error: "));
    }
    let table: toml::Table = String::from_utf8(printed.stdout)?.parse()?;
    Ok(serde_json::to_value(table)?)
}

/// Where the server says that it listens; none if it ends before.
fn address(stdout: ChildStdout) -> Result<Option<String>> {
    for line in BufReader::new(stdout).lines() {
        if let Some(address) = line?.strip_prefix("listening on ") {
            return Ok(Some(address.to_owned()));
        }
    }
    Ok(None)
}

//! `cargo xtask soak`: the server under load and faults.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::{libtorch, process, serve, setup};

pub(crate) const HELP: &str = "\
Builds in release, starts the server with the bundled checkpoint, all its listeners and little room
(KV blocks for a part of what is asked, a short queue, small buffers of streams), drives it with
many clients, a fifth of whose calls are left early and some of which are nonsense, and ends it by
SIGTERM under load. Prints the counts; fails if a call came to anything but what its kind allows, or
the server kept anything.

  --minutes M       minutes of load (default 10)
  --clients N       clients at a time (default 64)
  --seed S          seed of what the clients do (default 0)
  --json FILE       results as JSON";

/// So little room that requests are preempted and refused, and that a slow reader is noticed.
const SERVER: &[&str] = &[
    "serve",
    "--host=127.0.0.1",
    "--port=0",
    "--http-port=0",
    "--smg-port=0",
    "--vllm-port=0",
    "--kv-cache-memory=12",
    "--max-queued-requests=64",
    "--max-buffered-steps=128",
];

pub(crate) fn run(args: &[String]) -> Result<()> {
    setup::ensure_libtorch()?;
    let tandem = serve::build(&["-p", "server"])?;
    let soak = serve::build(&["-p", "soak"])?;
    let mut server = Command::new(&tandem)
        .args(SERVER)
        .envs(libtorch::loader_path()?)
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot start the server")?;
    let result = drive(&mut server, &soak, args);
    // One that ended by the signal is past this.
    server.kill().context("stop the server")?;
    let status = server.wait().context("wait for the server")?;
    result?;
    ensure!(status.success(), "the server ended with {status}");
    Ok(())
}

/// Runs the clients against a server as soon as it says where it listens.
fn drive(server: &mut Child, soak: &Path, args: &[String]) -> Result<()> {
    let stdout = server.stdout.take().context("the server has no standard output")?;
    // Open to the end, so that the server can go on writing.
    let mut lines = BufReader::new(stdout).lines().map_while(Result::ok);
    let address = lines
        .find_map(|line| line.strip_prefix("listening on ").map(str::to_owned))
        .context("the server did not start (see above)")?;
    let mut clients = Command::new(soak);
    clients.args(["--address", &address, "--pid", &server.id().to_string(), "--terminate"]);
    process::run(clients.args(args))
}

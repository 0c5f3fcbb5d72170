//! `cargo xtask demo`: the main job, end to end, in three processes.

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::{libtorch, process, serve, setup};

pub(crate) const HELP: &str = "\
Provides libtorch, builds in release, starts the gRPC server on a free loopback port with the
bundled tiny-dsv3 checkpoint and three drafts a step, and streams a completion of PROMPT (Python
code, or a default one) through a client in a process of its own. Accepted drafts are green on a
terminal and bracketed elsewhere. Then a summary, and the same request without drafting.";

const LOAD_TIME_MAX: Duration = Duration::from_secs(120);
const STOP_TIME_MAX: Duration = Duration::from_secs(60);

pub(crate) fn run(args: &[String]) -> Result<()> {
    let prompt = match args {
        [] => None,
        [prompt] => Some(prompt),
        _ => bail!("demo takes one prompt: put it in quotes"),
    };
    process::stage("libtorch", setup::ensure_libtorch)?;
    let build = "build (the first one compiles the libtorch binding: minutes)";
    let (tandem, client) = process::stage(build, || {
        let tandem = serve::build(&["-p", "server"])?;
        let client = serve::build(&["-p", "grpc-api", "--example", "stream"])?;
        let size = fs::metadata(&tandem).context("find the server")?.len();
        eprintln!("{}: {} MB", tandem.display(), size / 1_000_000);
        Ok((tandem, client))
    })?;
    let server = process::stage("load", || Server::start(&tandem))?;
    let mut stream = Command::new(client);
    stream.args(["--addr", &server.address, "--compare", "--"]).args(prompt);
    let streamed = process::run(&mut stream);
    let stopped = process::stage("stop", || server.stop());
    streamed.and(stopped)
}

/// A running `tandem serve`. It is killed if this is dropped before it was stopped, and asked to
/// stop if this process is killed.
struct Server {
    child: Child,
    guard: Child,
    address: String,
}

impl Server {
    fn start(tandem: &Path) -> Result<Self> {
        let mut command = Command::new(tandem);
        command.args(["serve", "--model", "tiny-dsv3", "--num-speculative-tokens", "3"]);
        command.args(["--host", "127.0.0.1", "--port", "0"]).envs(libtorch::loader_path()?);
        let mut child =
            command.stdout(Stdio::piped()).spawn().context("cannot start the server")?;
        let stdout = child.stdout.take().context("the server has no standard output")?;
        let guard = guard(child.id()).or_else(|error| {
            child.kill().context("stop the server")?;
            Err(error)
        })?;
        let mut server = Self { child, guard, address: String::new() };
        server.address = address_line(stdout)?;
        Ok(server)
    }

    /// Asks the server to stop, as an operator would, and waits for a clean end.
    fn stop(mut self) -> Result<()> {
        let id = self.child.id().to_string();
        process::run(Command::new("kill").args(["-TERM", &id]))?;
        let start = Instant::now();
        while start.elapsed() < STOP_TIME_MAX {
            if let Some(status) = self.child.try_wait().context("wait for the server")? {
                ensure!(status.success(), "the server ended with {status}");
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        bail!("the server did not stop within {} s", STOP_TIME_MAX.as_secs())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The guard first: it must not outlive the process whose number it holds. Killing what has
        // ended fails harmlessly.
        for child in [&mut self.guard, &mut self.child] {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// A shell that asks process `id` to stop when its standard input closes, which happens however
/// this process ends. In a process group of its own, so that Ctrl-C does not end it first.
fn guard(id: u32) -> Result<Child> {
    let mut shell = Command::new("sh");
    shell.args(["-c", &format!("read _; kill -TERM {id}")]).stdin(Stdio::piped());
    shell.stdout(Stdio::null()).process_group(0).spawn().context("cannot start sh")
}

/// The address in the first line that the server prints.
fn address_line(stdout: ChildStdout) -> Result<String> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let mut lines = BufReader::new(stdout);
        let mut line = String::new();
        // A read error reads as an empty line, which is no address.
        let _ = lines.read_line(&mut line);
        let _ = sender.send(line);
        // Keeps the pipe open, so that the server can go on writing.
        let _ = lines.read_to_end(&mut Vec::new());
    });
    let line = receiver
        .recv_timeout(LOAD_TIME_MAX)
        .with_context(|| format!("the server was not ready in {} s", LOAD_TIME_MAX.as_secs()))?;
    let address = line.trim().strip_prefix("listening on ");
    Ok(address.context("the server ended before it listened (see above)")?.to_owned())
}

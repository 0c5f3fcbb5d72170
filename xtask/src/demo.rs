//! `cargo xtask demo`: the main job, end to end, in three processes.

use std::io::{BufRead, BufReader, Read as _};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::{process, serve, setup};

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
    let mut programs = None;
    process::stage("build (the first one compiles the libtorch binding: minutes)", || {
        let tandem = serve::build(&["-p", "server"])?;
        let client = serve::build(&["-p", "grpc-api", "--example", "stream"])?;
        programs = Some((tandem, client));
        Ok(())
    })?;
    let (tandem, client) = programs.context("the build reported no program")?;
    let mut server = None;
    process::stage("load", || {
        server = Some(Server::start(&tandem)?);
        Ok(())
    })?;
    let server = server.context("the server did not start")?;
    let mut stream = Command::new(client);
    stream.args(["--addr", &server.address, "--compare"]).args(prompt);
    let streamed = process::run(&mut stream);
    let stopped = server.stop();
    streamed.and(stopped)
}

/// A running `tandem serve`; killed if it is dropped before it was stopped.
struct Server {
    child: Child,
    address: String,
}

impl Server {
    fn start(tandem: &Path) -> Result<Self> {
        let mut command = Command::new(tandem);
        command.args(["serve", "--model", "tiny-dsv3", "--num-speculative-tokens", "3"]);
        command.args(["--host", "127.0.0.1", "--port", "0"]).stdout(Stdio::piped());
        let child = command.spawn().context("cannot start the server")?;
        let mut server = Self { child, address: String::new() };
        let stdout = server.child.stdout.take().context("the server has no standard output")?;
        let (sender, receiver) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let mut lines = BufReader::new(stdout);
            let mut line = String::new();
            // A read error reads as an empty line, which is no address.
            let _ = lines.read_line(&mut line);
            let _ = sender.send(line);
            // Keeps the pipe open, so that the server can go on writing.
            let _ = lines.read_to_end(&mut Vec::new());
        });
        let line = receiver.recv_timeout(LOAD_TIME_MAX).context("the server did not get ready")?;
        let address = line.trim().strip_prefix("listening on ");
        server.address =
            address.context("the server ended before it listened (see above)")?.to_owned();
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
        // Both fail harmlessly if the server has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

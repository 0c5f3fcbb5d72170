//! `cargo xtask demo`: the main job, end to end, in three processes.

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::{libtorch, process, serve, setup};

pub(crate) const HELP: &str = "\
Provides libtorch, builds in release, starts the gRPC server on a free loopback port with the
bundled tiny-glm52 checkpoint and three drafts a step, and streams a completion of PROMPT (Python
code, or a default one) through a client in a process of its own. Accepted drafts are green on a
terminal and bracketed elsewhere. Then a summary, the same request without drafting, and how often
the indexer of the MTP layer runs with draft steps that share its selection and without.";

const MODEL: &str = "tiny-glm52";
const PROMPT: &str = "def read_lines(path):\n    \"\"\"Return the lines of a text file.\"\"\"\n";

const LOAD_TIME_MAX: Duration = Duration::from_secs(120);
const STOP_TIME_MAX: Duration = Duration::from_secs(60);

pub(crate) fn run(args: &[String]) -> Result<()> {
    let prompt = match args {
        [] => PROMPT,
        [prompt] => prompt,
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
    stream.args(["--addr", &server.address, "--compare", "--", prompt]);
    let streamed = process::run(&mut stream);
    let stopped = process::stage("stop", || server.stop());
    streamed.and(stopped)?;
    process::stage("index sharing", || compare_index_share(&tandem, prompt))
}

/// Generates with and without index sharing and prints what the drafts' indexer did.
fn compare_index_share(tandem: &Path, prompt: &str) -> Result<()> {
    let shared = generate(tandem, prompt, "on")?;
    let plain = generate(tandem, prompt, "off")?;
    ensure!(shared["token_ids"] == plain["token_ids"], "index sharing changed the text");
    let (Some(shared), Some(plain)) = (draft_figures(&shared), draft_figures(&plain)) else {
        println!("\nthe text is too short to draft");
        return Ok(());
    };
    println!("\nthe same text again, with draft steps after the first using its selection of keys");
    println!("and with the indexer at every draft step:\n");
    println!("{:<25}{:<12}every step", "indexer of the drafts", "shared");
    for (name, idx, digits) in
        [("launches a propose", 0, 2), ("scored keys", 1, 0), ("mean acceptance length", 2, 2)]
    {
        println!("{name:<25}{:<12.digits$}{:.digits$}", shared[idx], plain[idx]);
    }
    Ok(())
}

/// Indexer launches a propose, keys that they scored, and the mean acceptance length; `None` if
/// nothing was drafted.
fn draft_figures(run: &Value) -> Option<[f64; 3]> {
    let steps = run["indexer"]["draft_steps"].as_array()?;
    let sum = |field| steps.iter().map(|counts| counts[field].as_f64()).sum::<Option<f64>>();
    // The first draft step runs its indexer once in each propose.
    let n_proposes = steps.first()?["launches"].as_f64()?;
    let length = run["spec_decode"]["acceptance_length"].as_f64()?;
    Some([sum("launches")? / n_proposes, sum("scored_keys")?, length])
}

/// One JSON line of `tandem generate`.
fn generate(tandem: &Path, prompt: &str, index_share: &str) -> Result<Value> {
    let mut command = Command::new(tandem);
    command.args(["generate", "--json", "--model", MODEL, "--index-share", index_share]);
    command.args(["--num-speculative-tokens", "3", "--max-tokens", "96"]);
    command.arg(format!("--prompt={prompt}")).envs(libtorch::loader_path()?);
    let line = process::output(&mut command)?;
    serde_json::from_str(&line).context("`tandem generate` printed no JSON")
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
        command.args(["serve", "--model", MODEL, "--num-speculative-tokens", "3"]);
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

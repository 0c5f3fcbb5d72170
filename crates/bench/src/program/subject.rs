//! The server that is measured: found or started, and what is known of it.

use std::io::{BufRead as _, BufReader};
use std::net::{SocketAddr, ToSocketAddrs as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use bench::{
    Checkpoint, Fact, GrpcTarget, OpenAiTarget, Process, Server, ServerProcess, Source, Target,
    Vocabulary,
};
use serde_json::json;

use crate::args::Output;

/// Ids of prompts for servers that do not tell their vocabulary: all models have these.
const COMMON_VOCABULARY: u32 = 1000;

/// A server with its connection.
pub(crate) struct Subject {
    pub(crate) target: Arc<dyn Target>,
    pub(crate) process: ServerProcess,
    pub(crate) server: Server,
    pub(crate) vocabulary: Vocabulary,
    /// Stopped at the end.
    _started: Option<Started>,
}

/// A server of ours.
struct Started(Child);

impl Drop for Started {
    fn drop(&mut self) {
        // It has ended by itself where these fail.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Subject {
    /// Finds or starts the server that `what` names: a URL, or arguments of `tandem serve`.
    pub(crate) async fn new(name: &str, what: &str, output: &Output) -> Result<Self> {
        if let Some(base) = what.strip_prefix("openai+") {
            return Self::peer(name, base, output).await;
        }
        if what.starts_with("http://") || what.starts_with("https://") {
            return Self::tandem(name, what, None, output).await;
        }
        let (started, url) = start(what, output.tandem.as_deref())?;
        Self::tandem(name, &url, Some(started), output).await
    }

    async fn tandem(
        name: &str,
        url: &str,
        started: Option<Started>,
        output: &Output,
    ) -> Result<Self> {
        let token = token(output)?;
        let target = GrpcTarget::connect(url, token.as_deref()).await?;
        let (model, info) = (target.model_info().await?, target.server_info().await?);
        let process = process_of(url);
        let config = json!({
            "served_model_name": model.served_model_name,
            "architecture": model.architecture,
            "dtype": model.dtype,
            "max_model_len": model.max_model_len,
            "num_speculative_tokens": model.num_speculative_tokens,
            "index_topk": model.index_topk,
            "index_share": model.index_share,
            "block_size": info.block_size,
            "total_blocks": info.total_blocks,
            "max_num_seqs": info.max_num_seqs,
            "max_num_batched_tokens": info.max_num_batched_tokens,
            "prefix_caching": info.prefix_caching,
        });
        let server = Server {
            source: Source::of_version(&info.version),
            version: Fact::Known(info.version),
            config,
            process: known_process(process),
            checkpoint: checkpoint(output),
            device: Fact::Known("cpu".to_owned()),
            synthetic_acceptance: Fact::Known(model.synthetic_acceptance),
            ..Server::untold(name, url)
        };
        ensure_current(&server)?;
        let vocabulary = Vocabulary { size: model.vocab_size, eos_token_ids: model.eos_token_ids };
        let target = Arc::new(target);
        Ok(Self { target, process, server, vocabulary, _started: started })
    }

    async fn peer(name: &str, base: &str, output: &Output) -> Result<Self> {
        let token = token(output)?;
        let target = OpenAiTarget::connect(base, None, token.as_deref()).await?;
        let process = process_of(base);
        let server = Server {
            config: json!({ "model": target.model() }),
            process: known_process(process),
            checkpoint: checkpoint(output),
            ..Server::untold(name, base)
        };
        let vocabulary = Vocabulary { size: COMMON_VOCABULARY, eos_token_ids: vec![0, 1, 2] };
        let target = Arc::new(target);
        Ok(Self { target, process, server, vocabulary, _started: None })
    }

    /// Makes sure that the process is the one that it was.
    pub(crate) fn check(&self) -> Result<()> {
        let Fact::Known(before) = &self.server.process else { return Ok(()) };
        let now = Process::of(before.pid).map_err(anyhow::Error::msg);
        let now = now.with_context(|| format!("{}: the server has gone", self.server.name))?;
        ensure!(
            now.started_at == before.started_at,
            "{}: the server was started anew while it was measured: measure again",
            self.server.name
        );
        Ok(())
    }
}

/// Refuses a server whose program has been replaced since it was started: it is not what the
/// sources say.
fn ensure_current(server: &Server) -> Result<()> {
    if let Fact::Known(process) = &server.process {
        ensure!(
            !process.is_replaced,
            "{}: the server runs a program that has been replaced since it was started: restart it",
            server.name
        );
    }
    Ok(())
}

fn token(output: &Output) -> Result<Option<String>> {
    let Some(path) = &output.api_key_file else { return Ok(None) };
    let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
    Ok(Some(text.trim().to_owned()))
}

fn checkpoint(output: &Output) -> Fact<Checkpoint> {
    match &output.checkpoint {
        None => Fact::Unknown("give --checkpoint".to_owned()),
        Some(folder) => Checkpoint::of(folder).map_err(|error| error.to_string()).into(),
    }
}

fn process_of(url: &str) -> ServerProcess {
    let address = url.split("://").nth(1).and_then(|rest| rest.split('/').next());
    let address = address.and_then(|address| address.to_socket_addrs().ok()?.next());
    address
        .map_or(ServerProcess::Unknown, |address: SocketAddr| ServerProcess::listening_on(address))
}

fn known_process(process: ServerProcess) -> Fact<Process> {
    match process.pid() {
        Some(pid) => Process::of(pid).into(),
        None => Fact::Unknown("no process of this machine that may be looked at".to_owned()),
    }
}

/// Starts `tandem serve` and waits until it listens.
fn start(arguments: &str, tandem: Option<&Path>) -> Result<(Started, String)> {
    let program = match tandem {
        Some(program) => program.to_owned(),
        None => beside_this_one()?,
    };
    let mut child = Command::new(&program)
        .args(["serve", "--port", "0"])
        .args(arguments.split_whitespace())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .with_context(|| format!("cannot start {}", program.display()))?;
    let stdout = child.stdout.take().context("a server has a standard output")?;
    let started = Started(child);
    for line in BufReader::new(stdout).lines() {
        if let Some(address) = line?.strip_prefix("listening on ") {
            return Ok((started, format!("http://{address}")));
        }
    }
    bail!("`tandem serve {arguments}` ended before it listened; run it by hand to see why");
}

fn beside_this_one() -> Result<PathBuf> {
    let this = std::env::current_exe()?;
    let program = this.with_file_name("tandem");
    ensure!(program.is_file(), "{} is not there: give --tandem", program.display());
    Ok(program)
}

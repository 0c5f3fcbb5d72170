//! What is measured: a server that was found or started, or an engine in this process, and what is
//! known of it.

use std::net::{SocketAddr, ToSocketAddrs as _};
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use bench::{
    Checkpoint, EngineTarget, Fact, GrpcTarget, OpenAiTarget, Piece, Planned, Process, Prompt,
    Server, ServerProcess, Source, Target, Totals, Vocabulary,
};
use engine::EngineThread;
use grpc_api::control::v1::{GetModelInfoResponse, GetServerInfoResponse};
use serde_json::{Value, json};
use serving::{Frontend, FrontendConfig, InferenceEngine as _};
use settings::{DraftingArg, EngineSettings};
use tokio_stream::StreamExt as _;
use tokio_util::sync::CancellationToken;

use super::Interrupted;
use super::args::ProgramArgs;
use super::asked::{Asked, TOKEN_IDS};
use super::start::{self, Started};
use crate::loading::{self, LoadedEngine};
use crate::serve;

/// Ids of prompts for servers that do not tell their vocabulary: all models have these.
const COMMON_VOCABULARY: u32 = 1000;

/// Ids that a server is asked with to see whether it takes ids.
const PROBE: std::ops::Range<u32> = 3..19;

/// A server or an engine with its connection.
pub(super) struct Subject {
    pub(super) target: Arc<dyn Target>,
    pub(super) process: ServerProcess,
    pub(super) server: Server,
    pub(super) vocabulary: Vocabulary,
    /// Tokens of a request at most; peers do not tell.
    pub(super) max_model_len: Option<u32>,
    /// Stopped at the end.
    _started: Option<Started>,
    engine: Option<EngineThread>,
}

impl Subject {
    /// Finds or starts the server that `what` names: a URL, or arguments of `tandem serve`.
    pub(super) async fn new(
        name: &str,
        what: &str,
        args: &ProgramArgs,
        stop: &CancellationToken,
    ) -> Result<Self> {
        if let Some(base) = what.strip_prefix("openai+") {
            return Self::peer(name, base, args).await;
        }
        if what.starts_with("http://") || what.starts_with("https://") {
            let checkpoint =
                as_given(args).unwrap_or_else(|| Fact::Unknown("give --checkpoint".to_owned()));
            let untold = json!("unknown: the benchmark did not start the server");
            let token = token(args)?;
            let found = Self::tandem(name, what, token.as_deref()).await?;
            return Ok(found.with_settings(&untold, checkpoint));
        }
        let (settings, started, url) = start::start(what, args.tandem.as_deref(), stop).await?;
        let model = settings["engine"]["model"].as_str().unwrap_or_default();
        let checkpoint = match &args.tandem {
            Some(program) if !Path::new(model).is_dir() && !is_this_program(program) => {
                Fact::Unknown(format!(
                    "the {model} of another build may be another one: give --model a folder"
                ))
            }
            _ => checkpoint(model),
        };
        let found = Self::tandem(name, &url, None).await?;
        let mut found = found.with_settings(&settings, checkpoint);
        found._started = Some(started);
        Ok(found)
    }

    async fn tandem(name: &str, url: &str, token: Option<&str>) -> Result<Self> {
        let target = GrpcTarget::connect(url, token).await?;
        let (model, info) = (target.model_info().await?, target.server_info().await?);
        let process = process_of(url);
        let known = match process.pid() {
            Some(pid) => Process::of(pid).into(),
            None => Fact::Unknown("no process of this machine that may be looked at".to_owned()),
        };
        Self::of_infos((name, url), Arc::new(target), (process, known), model, info)
    }

    /// Of what an engine of ours tells.
    fn of_infos(
        (name, address): (&str, &str),
        target: Arc<dyn Target>,
        (process, known): (ServerProcess, Fact<Process>),
        model: GetModelInfoResponse,
        info: GetServerInfoResponse,
    ) -> Result<Self> {
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
        let untold = Server::untold(name, address);
        let device = Some(info.device).filter(|device| !device.is_empty());
        let threads = Some(info.compute_threads).filter(|n| *n > 0);
        let server = Server {
            source: Source::of_version(&info.version),
            version: Fact::Known(info.version),
            config,
            process: known,
            device: device.map_or(untold.device.clone(), Fact::Known),
            threads: threads.map_or(untold.threads.clone(), Fact::Known),
            libraries: info.libraries.into_iter().collect(),
            synthetic_acceptance: Fact::Known(model.synthetic_acceptance),
            ..untold
        };
        ensure_current(&server)?;
        let vocabulary = Vocabulary { size: model.vocab_size, eos_token_ids: model.eos_token_ids };
        let max_model_len = Some(model.max_model_len);
        Ok(Self {
            target,
            process,
            server,
            vocabulary,
            max_model_len,
            _started: None,
            engine: None,
        })
    }

    async fn peer(name: &str, base: &str, args: &ProgramArgs) -> Result<Self> {
        let model = args.served_model_name.as_deref();
        let target = OpenAiTarget::connect(base, model, token(args)?.as_deref()).await?;
        let process = process_of(base);
        let untold = Server::untold(name, format!("openai+{base}"));
        let server = Server {
            config: json!({ "model": target.model() }),
            process: process.pid().map_or(untold.process.clone(), |pid| Process::of(pid).into()),
            checkpoint: as_given(args).unwrap_or_else(|| untold.checkpoint.clone()),
            ..untold
        };
        Ok(Self {
            target: Arc::new(target),
            process,
            server,
            vocabulary: Vocabulary { size: COMMON_VOCABULARY, eos_token_ids: vec![0, 1, 2] },
            max_model_len: None,
            _started: None,
            engine: None,
        })
    }

    /// An engine in this process.
    pub(super) async fn in_process(
        settings: &EngineSettings,
        stop: &CancellationToken,
    ) -> Result<Self> {
        let mut settings = settings.clone();
        // What runs where nothing says it is told as well.
        settings.drafting.get_or_insert(DraftingArg::Fixed);
        let of_engine = settings.clone();
        let loading = tokio::task::spawn_blocking(move || {
            loading::start_engine(&of_engine, DraftingArg::Fixed)
        });
        let loaded = tokio::select! {
            () = stop.cancelled() => return Err(Interrupted.into()),
            loaded = loading => loaded??,
        };
        let info = serve::model_info(None, &loaded, &settings);
        let LoadedEngine { model, handle, thread, .. } = loaded;
        let config = FrontendConfig::default();
        let engine = Frontend::new(config, handle, model.tokenizer.clone(), info);
        let engine = Arc::new(engine);
        let (info, server) = (engine.model_info()?, engine.server_info()?);
        let target = Arc::new(EngineTarget::new(engine));
        let process = (ServerProcess::InProcess, Process::of(std::process::id()).into());
        let found = Self::of_infos(("engine", "in process"), target, process, info, server)?;
        let checkpoint = Checkpoint::of(&model.dir).into();
        let settings = json!({ "engine": settings });
        let mut found = found.with_settings(&settings, checkpoint);
        found.engine = Some(thread);
        Ok(found)
    }

    fn with_settings(mut self, settings: &Value, checkpoint: Fact<Checkpoint>) -> Self {
        self.server.config["settings"] = settings.clone();
        self.server.checkpoint = checkpoint;
        self
    }

    /// Makes sure that the requests of all repeats can be answered, and notes how prompts are sent:
    /// a peer is asked whether it takes ids.
    pub(super) async fn take(&mut self, repeats: &[Asked]) -> Result<()> {
        let Some(asked) = repeats.first() else { return Ok(()) };
        let name = &self.server.name;
        let n_tokens = repeats.iter().map(Asked::longest).max().unwrap_or_default();
        if let Some(most) = self.max_model_len {
            ensure!(
                n_tokens <= most as usize,
                "requests have up to {n_tokens} tokens, and the model of {name} takes {most}: give \
                 shorter prompts and outputs"
            );
        }
        let is_peer = self.max_model_len.is_none();
        let mut told = format!("sent as {}", asked.kind());
        if asked.kind() == TOKEN_IDS && is_peer {
            let n_sent = PROBE.len();
            let totals = probe(&*self.target).await.with_context(|| {
                format!("{name} takes no token ids: give --dataset-name builtin or a file of texts")
            })?;
            told = match totals.n_prompt.map(|n| n as usize) {
                // Some put a token of their own before a prompt.
                Some(n) if n == n_sent || n == n_sent + 1 => format!("{told}, which it counts"),
                Some(n) => bail!(
                    "{name} makes {n} tokens of {n_sent} token ids: it does not take them as such; \
                     give --dataset-name builtin or a file of texts"
                ),
                None => format!("{told}, which it takes and does not count"),
            };
        }
        self.server.config["prompts"] = json!(told);
        Ok(())
    }

    /// Refuses more drafts a step than the server makes.
    pub(super) fn ensure_drafts(&self, width: u32) -> Result<()> {
        let most = self.server.config["num_speculative_tokens"].as_u64();
        let most = most.context("--num-speculative-tokens: a peer's number is its own setting")?;
        ensure!(
            u64::from(width) <= most,
            "--num-speculative-tokens {width}: the server makes {most} at most; start it with more"
        );
        Ok(())
    }

    /// What runs of so many drafts a step are called: there are fewer where they do not pay.
    pub(super) fn drafts_label(&self, width: u32) -> String {
        let is_fixed = self.server.config["settings"]["engine"]["drafting"] == "fixed";
        let sign = if is_fixed || width == 0 { "=" } else { "<=" };
        format!("k {sign} {width}")
    }

    /// Makes sure that the process is the one that it was.
    pub(super) fn check(&self) -> Result<()> {
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

impl Drop for Subject {
    fn drop(&mut self) {
        if let Some(thread) = self.engine.take() {
            thread.drain();
        }
    }
}

/// Asks with ids and waits for the end.
async fn probe(target: &dyn Target) -> Result<Totals> {
    let planned = Planned::greedy(Prompt::TokenIds(PROBE.collect()), 1);
    let mut pieces = target.send(&planned).await?;
    while let Some(piece) = pieces.next().await {
        if let Piece::Finished(totals) = piece? {
            return Ok(totals);
        }
    }
    bail!("the answer ended without its last message")
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

fn token(args: &ProgramArgs) -> Result<Option<String>> {
    let Some(path) = &args.api_key_file else { return Ok(None) };
    let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
    Ok(Some(text.trim().to_owned()))
}

/// That of a folder or a bundled name.
fn checkpoint(model: &str) -> Fact<Checkpoint> {
    let of = |folder: &Path| Checkpoint::of(folder).map_err(|error| error.to_string());
    let folder = bundled_checkpoints::resolve(model, None).map_err(|error| error.to_string());
    folder.and_then(|folder| of(&folder)).into()
}

/// That of `--checkpoint`, which nobody can verify; none without it.
fn as_given(args: &ProgramArgs) -> Option<Fact<Checkpoint>> {
    let mut given = checkpoint(args.checkpoint.as_deref()?);
    if let Fact::Known(checkpoint) = &mut given {
        checkpoint.name += " (as given)";
    }
    Some(given)
}

fn is_this_program(program: &Path) -> bool {
    let this = std::env::current_exe().and_then(std::fs::canonicalize).ok();
    this.is_some() && std::fs::canonicalize(program).ok() == this
}

fn process_of(url: &str) -> ServerProcess {
    let address = url.split("://").nth(1).and_then(|rest| rest.split('/').next());
    let address = address.and_then(|address| address.to_socket_addrs().ok()?.next());
    address
        .map_or(ServerProcess::Unknown, |address: SocketAddr| ServerProcess::listening_on(address))
}

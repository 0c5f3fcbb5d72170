//! `tandem chat`: a conversation in the terminal, with a model loaded here or with a server's.

use std::env;
use std::io::{self, IsTerminal as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use chat_template::ChatTemplate;
use grpc_api::inference::v1::SamplingParams;
use serving::{Frontend, FrontendConfig, ModelInfo};
use settings::DraftingArg;
use terminal::{Chat, ChatModel, ChatOptions, Editor, Engine, Lines, Paint, Piped};
use tokenization::Tokenizer;
use tokio::runtime::Runtime;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::Notify;

use crate::cli::{ChatArgs, SamplingArgs};
use crate::loading::{self, LoadedEngine};
use crate::top;

pub(crate) fn run(args: &ChatArgs) -> Result<()> {
    let dir = bundled_checkpoints::resolve(&args.engine.model, None)?;
    let template = template(args, &dir)?;
    let runtime = Runtime::new()?;
    let Some(url) = &args.connect else {
        let has_other = args.client.api_key_file.is_some() || args.client.tls_ca.is_some();
        ensure!(!has_other, "--api-key-file and --tls-ca are for a server: give --connect, too");
        let loaded = loading::start_engine(&args.engine, DraftingArg::Fixed)?;
        let tokenizer = loaded.model.tokenizer.clone();
        let tokenizer =
            tokenizer.context("the checkpoint has no tokenizer.json: it cannot chat")?;
        let engine = Engine::Here(frontend(args, &loaded));
        let chatted = chat(args, &runtime, (engine, template, tokenizer));
        loaded.thread.drain();
        return chatted;
    };
    let tokenizer = Arc::new(Tokenizer::load(&dir)?);
    let engine = Engine::There(Box::new(top::client(&runtime, url, &args.client)?));
    chat(args, &runtime, (engine, template, tokenizer))
}

/// The template of the flag, or of the checkpoint.
fn template(args: &ChatArgs, dir: &Path) -> Result<ChatTemplate> {
    if let Some(file) = &args.chat_template {
        return ChatTemplate::load_file(dir, file).context("--chat-template");
    }
    ChatTemplate::load(dir)?.with_context(|| {
        format!("{} has no chat template: give one with --chat-template FILE", dir.display())
    })
}

/// The engine as the chat sees it.
fn frontend(args: &ChatArgs, loaded: &LoadedEngine) -> Arc<Frontend> {
    let info = ModelInfo {
        served_model_name: args.engine.model.clone(),
        architecture: loaded.model.architecture.clone(),
        eos_token_ids: loaded.model.config.eos_token_ids.clone(),
        synthetic_acceptance: args.engine.is_synthetic(),
        ..ModelInfo::default()
    };
    let tokenizer = loaded.model.tokenizer.clone();
    Arc::new(Frontend::new(FrontendConfig::default(), loaded.handle.clone(), tokenizer, info))
}

fn chat(
    args: &ChatArgs,
    runtime: &Runtime,
    (engine, template, tokenizer): (Engine, ChatTemplate, Arc<Tokenizer>),
) -> Result<()> {
    let model = runtime.block_on(ChatModel::new(engine, template, tokenizer))?;
    let is_interactive = io::stdin().is_terminal() && io::stdout().is_terminal();
    let options = ChatOptions {
        sampling: sampling(&args.sampling),
        max_tokens: args.max_tokens,
        paint: paint(args),
        is_interactive,
    };
    let stop = Arc::new(Notify::new());
    let mut chat = Chat::new(model, options, io::stdout(), Arc::clone(&stop));
    let mut lines: Box<dyn Lines> = if is_interactive {
        // From here on Ctrl-C ends an answer, no longer the program. This must not wait for the
        // task's first turn: the line editor puts back the handler that it met.
        let mut interrupts = {
            let _context = runtime.enter();
            signal(SignalKind::interrupt()).context("watch for SIGINT")?
        };
        runtime.spawn(async move {
            while interrupts.recv().await.is_some() {
                stop.notify_waiters();
            }
        });
        let history = history_file(args);
        let fault = || format!("the lines cannot be kept in {history:?}; give --no-history");
        Box::new(Editor::new(history.as_deref()).with_context(fault)?)
    } else {
        Box::new(Piped(io::stdin().lock()))
    };
    Ok(terminal::chat(runtime, &mut chat, &mut *lines)?)
}

fn sampling(args: &SamplingArgs) -> SamplingParams {
    SamplingParams {
        temperature: Some(args.temperature.into()),
        top_p: Some(args.top_p.into()),
        top_k: Some(args.top_k),
        min_p: Some(args.min_p.into()),
        seed: args.seed,
        ..SamplingParams::default()
    }
}

fn paint(args: &ChatArgs) -> Paint {
    let is_set = |name| env::var_os(name).is_some_and(|value| !value.is_empty());
    let is_dumb = env::var_os("TERM").is_some_and(|term| term == "dumb");
    match io::stdout().is_terminal() {
        false => Paint::Plain,
        true if args.no_color || is_set("NO_COLOR") || is_dumb => Paint::Marks,
        true => Paint::Colour,
    }
}

/// Where the lines are kept: in the folder of the user's data, if there is one.
fn history_file(args: &ChatArgs) -> Option<PathBuf> {
    let data = env::var_os("XDG_DATA_HOME").map(PathBuf::from).filter(|data| data.is_absolute());
    let data = data.or_else(|| Some(env::home_dir()?.join(".local/share")))?;
    (!args.no_history).then(|| data.join("tandem/chat_history"))
}

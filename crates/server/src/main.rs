//! The `tandem` program: serve, generate, chat, top, score, inspect, bench, completions.
//!
//! Results go to standard output, the log to standard error (`RUST_LOG` chooses what).

mod bench;
mod chat;
mod cli;
mod generate;
mod http;
mod inspect;
mod loading;
mod output;
mod port;
mod program;
mod prompts;
mod score;
mod serve;
mod top;

use std::process::ExitCode;

use anyhow::Result;
use clap::CommandFactory as _;
use settings::SettingsError;
use telemetry::LogFormat;

use crate::cli::{Cli, Command};
use crate::serve::DEFAULT_DRAFTING;

fn main() -> ExitCode {
    match run() {
        Ok(code) => code,
        Err(error) => {
            output::error(&error);
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<ExitCode> {
    let (Cli { command }, sources) =
        match settings::parse(std::env::args_os().collect(), std::env::vars_os()) {
            Err(SettingsError::Arguments(error)) => error.exit(),
            parsed => parsed?,
        };
    command.validate(&sources)?;
    if !matches!(command, Command::Serve(_)) {
        // A command that prints a result leaves it at that.
        telemetry::log("warn", LogFormat::Text)?;
    }
    match &command {
        Command::Serve(args) if args.print_config => {
            let mut settings = args.settings.clone();
            // What runs where nothing says it is shown as well.
            settings.engine.drafting.get_or_insert(DEFAULT_DRAFTING);
            output::text(&settings.to_toml())
        }
        Command::Serve(args) => serve::run(&args.settings),
        Command::Generate(args) => generate::run(args),
        Command::Chat(args) => chat::run(args),
        Command::Top(args) => top::run(args),
        Command::Score(args) => score::run(args),
        Command::Inspect(args) => return inspect::run(args),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(*shell, &mut Cli::command(), "tandem", &mut script);
            output::text(&String::from_utf8(script)?)
        }
        Command::Bench(args) => return bench::run(args),
    }
    .map(|()| ExitCode::SUCCESS)
}

//! Layers, faults, and what is written about settings elsewhere.

mod documents;
mod layers;
mod validation;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use tempfile::TempDir;

use crate::{EngineSettings, ServeArgs, ServeSettings, SettingsError, Sources, parse};

/// A program with commands that take all of the tree, a section of it, and a few keys of that.
#[derive(Debug, Parser)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Serve(Box<ServeArgs>),
    Generate(Box<GenerateArgs>),
    Score(ScoreArgs),
    Inspect,
}

#[derive(Debug, Args)]
struct GenerateArgs {
    #[arg(long)]
    config: Option<PathBuf>,
    #[command(flatten)]
    engine: EngineSettings,
    /// Of another meaning than the key of `[listen]`.
    #[arg(long)]
    port: Option<String>,
}

#[derive(Debug, Args)]
struct ScoreArgs {
    #[arg(long)]
    config: Option<PathBuf>,
    #[arg(long, default_value = "a")]
    model: String,
}

type Variables<'a> = &'a [(&'a str, &'a str)];

fn run(args: &[&str], variables: Variables<'_>) -> Result<(Command, Sources), SettingsError> {
    let args = ["tandem"].iter().chain(args).map(Into::into).collect();
    let variables = variables.iter().map(|(name, value)| (name.into(), value.into()));
    let (Cli { command }, sources) = parse(args, variables)?;
    Ok((command, sources))
}

/// The settings of `tandem serve` with these arguments, validated.
fn serve(args: &[&str], variables: Variables<'_>) -> Result<ServeSettings, SettingsError> {
    let (command, sources) = run(&[&["serve"], args].concat(), variables)?;
    let Command::Serve(args) = command else { panic!("the command is serve") };
    args.settings.validate(&sources)?;
    Ok(args.settings)
}

/// What is wrong with them.
fn faults(args: &[&str], variables: Variables<'_>) -> Vec<String> {
    match serve(args, variables) {
        Err(SettingsError::Faults(faults)) => faults,
        other => panic!("no faults: {other:?}"),
    }
}

/// A file of settings; its name lasts as long as the folder.
fn file(text: &str) -> (TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tandem.toml");
    std::fs::write(&file, text).unwrap();
    let name = file.to_str().unwrap().to_owned();
    (folder, name)
}

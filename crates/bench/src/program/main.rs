//! The program `tandem-bench`.

mod args;
mod drive;
mod subject;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use bench::ResultFile;
use clap::Parser as _;

use crate::args::{Cli, Command, Output};

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> ExitCode {
    let cli = Cli::parse();
    match run(&cli).await {
        Ok(is_well) => {
            if is_well {
                ExitCode::SUCCESS
            } else {
                ExitCode::FAILURE
            }
        }
        Err(error) => {
            complain(&format!("error: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

/// Runs a command; false if what it found is bad.
async fn run(cli: &Cli) -> Result<bool> {
    match &cli.command {
        Command::Serve(args) => drive::serve(args).await.map(|()| true),
        Command::Ab(args) => drive::ab(args).await.map(|()| true),
        Command::Sweep(args) => drive::sweep(args).await.map(|()| true),
        Command::Compare { a, b, force } => compare(a, b, *force),
        Command::Report { file } => {
            let result = ResultFile::read(file)?;
            write_reports(&result, file)?;
            Ok(true)
        }
    }
}

/// Prints how two results differ; false if the second one is worse.
fn compare(a: &Path, b: &Path, force: bool) -> Result<bool> {
    let read = |path: &Path| ResultFile::read(path).with_context(|| path.display().to_string());
    let comparison = bench::compare(&read(a)?, &read(b)?, force)?;
    show(&bench::comparison_markdown(&comparison));
    Ok(comparison.regressions().is_empty())
}

/// Prints a result and writes its files.
fn publish(result: &ResultFile, output: &Output) -> Result<()> {
    show(&bench::markdown(result));
    if let Some(path) = &output.output {
        result.write(path)?;
        write_reports(result, path)?;
    }
    Ok(())
}

/// Writes the Markdown and HTML beside a result's JSON.
fn write_reports(result: &ResultFile, path: &Path) -> Result<()> {
    let beside = |extension: &str| -> PathBuf { path.with_extension(extension) };
    for (path, text) in
        [(beside("md"), bench::markdown(result)), (beside("html"), bench::html(result)?)]
    {
        std::fs::write(&path, text).with_context(|| path.display().to_string())?;
    }
    Ok(())
}

#[expect(clippy::print_stdout, reason = "it is a command's result")]
fn show(text: &str) {
    println!("{text}");
}

#[expect(clippy::print_stderr, reason = "it is a command's progress and complaint")]
fn complain(text: &str) {
    eprintln!("{text}");
}

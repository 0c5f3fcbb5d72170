//! `tandem bench`: measure servers and engines, and compare what was measured.

mod args;
mod asked;
mod drive;
mod extras;
mod seed_table;
mod sitting;
mod start;
mod subject;

use std::fmt;
use std::io::Write as _;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use bench::ResultFile;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

pub(crate) use args::{BenchArgs, BenchCommand};

use crate::output;
use drive::Context;

/// The exit code of programs that SIGINT ends.
const INTERRUPTED: u8 = 130;
/// That of two results that say nothing beside each other; 1 is a regression.
const INCOMPARABLE: u8 = 2;

/// A signal has ended a command; what was measured until then has been written.
#[derive(Debug)]
struct Interrupted;

impl fmt::Display for Interrupted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("interrupted")
    }
}

impl std::error::Error for Interrupted {}

/// Runs a command; the code is not 0 if what it found is bad, or a signal ended it.
pub(crate) fn run(args: &BenchArgs) -> Result<ExitCode> {
    // The load is small, and the engine that is measured needs the processors.
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.worker_threads(2).enable_all().build()?;
    let (stop, leave) = (CancellationToken::new(), CancellationToken::new());
    let ended = runtime.block_on(async {
        tokio::spawn(watch_signals(stop.clone(), leave.clone())?);
        tokio::select! {
            ended = command(&args.command, stop) => ended,
            // What is dropped here stops the servers that were started.
            () = leave.cancelled() => Err(Interrupted.into()),
        }
    });
    // A model that is still being read would keep the program.
    runtime.shutdown_background();
    match ended {
        Err(error) if error.is::<Interrupted>() => Ok(ExitCode::from(INTERRUPTED)),
        ended => ended,
    }
}

/// The first signal stops what is measured, the second one ends the command at once.
fn watch_signals(
    stop: CancellationToken,
    leave: CancellationToken,
) -> Result<impl Future<Output = ()> + Send> {
    let (mut interrupt, mut terminate) =
        (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    // Under `nohup` a terminal that goes ends nothing.
    let mut hang_up = if ignores_hang_up() { None } else { Some(signal(SignalKind::hangup())?) };
    let mut next = async move || {
        let hang_up = async {
            match &mut hang_up {
                Some(hang_up) => hang_up.recv().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
            _ = hang_up => {}
        }
    };
    Ok(async move {
        next().await;
        complain("stopping; what was measured is kept, interrupt again to lose it");
        stop.cancel();
        next().await;
        leave.cancel();
    })
}

/// Whether whoever started this program made it ignore SIGHUP, which is the lowest bit.
fn ignores_hang_up() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    ignored.is_some_and(|mask| mask & 1 == 1)
}

async fn command(command: &BenchCommand, stop: CancellationToken) -> Result<ExitCode> {
    let context = Context { settings: serde_json::to_value(command)?, stop };
    match command {
        BenchCommand::Serve(args) => drive::serve(args, context).await?,
        BenchCommand::Ab(args) => drive::ab(args, context).await?,
        BenchCommand::Sweep(args) => drive::sweep(args, context).await?,
        BenchCommand::Latency(args) => drive::latency(args, context).await?,
        BenchCommand::Throughput(args) => drive::throughput(args, context).await?,
        BenchCommand::SeedTable(args) => seed_table::seed_table(args, context).await?,
        BenchCommand::Compare { a, b, force } => {
            return Ok(compare(a, b, *force).unwrap_or_else(|error| {
                output::error(&error);
                ExitCode::from(INCOMPARABLE)
            }));
        }
        BenchCommand::Report { file } => {
            let result = ResultFile::read(file).with_context(|| file.display().to_string())?;
            sitting::write_reports(&result, file)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints how two results differ; a failure if the second one is worse.
fn compare(a: &Path, b: &Path, force: bool) -> Result<ExitCode> {
    let read = |path: &Path| ResultFile::read(path).with_context(|| path.display().to_string());
    let comparison = bench::compare(&read(a)?, &read(b)?, force)?;
    output::text(&format!("{}\n", bench::comparison_markdown(&comparison)))?;
    let is_worse = !comparison.regressions().is_empty();
    Ok(if is_worse { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Says how it goes, on standard error.
fn complain(text: &str) {
    // Nothing is left to tell if standard error is closed.
    let _ = writeln!(std::io::stderr(), "{text}");
}

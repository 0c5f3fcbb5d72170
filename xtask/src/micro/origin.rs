//! Where results come from, and what else the machine did meanwhile.

use std::fs;
use std::process::Command;
use std::time::SystemTime;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::{process, workspace};

/// Commit, compiler, machine and time of a run that begins now.
pub(super) fn origin(args: &[String]) -> Result<Value> {
    let since_1970 = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?;
    let changes = git(&["status", "--porcelain", "--untracked-files=normal"])?;
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let mut fields = cpuinfo.lines().filter_map(|line| line.split_once(':'));
    let cpu = fields.find(|(name, _)| name.trim() == "model name").map(|(_, model)| model.trim());
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").ok();
    Ok(json!({
        "started_at_unix_s": since_1970.as_secs(),
        "arguments": args,
        "commit": git(&["rev-parse", "HEAD"])?,
        "is_dirty": !changes.is_empty(),
        "rustc": process::output(Command::new("rustc").arg("--version"))?.trim(),
        "cpu": cpu.unwrap_or("unknown"),
        "n_cpus": std::thread::available_parallelism().map_or(0, usize::from),
        "kernel": kernel.as_deref().map_or("unknown", str::trim),
    }))
}

/// What git writes; results of a source that nobody can name are worth nothing.
fn git(args: &[&str]) -> Result<String> {
    let output = Command::new("git").args(args).current_dir(workspace::root()).output();
    let output = output.context("git, which tells the commit, was not found")?;
    ensure!(output.status.success(), "git: {}", process::last_line(&output.stderr));
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// The kernel's counts of processor time so far, in ticks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Load {
    /// Of all processors.
    all: u64,
    busy: u64,
    /// Of this program and the programs that it has waited for.
    own: u64,
}

impl Load {
    /// `None` where the kernel does not tell.
    pub(super) fn now() -> Option<Self> {
        let read = |path| fs::read_to_string(path).ok();
        Self::parse(&read("/proc/stat")?, &read("/proc/self/stat")?)
    }

    /// Of the machine's first line: user, nice, system, idle, iowait, irq, softirq, steal; and, of
    /// what follows a program's name, the 12th to 15th field.
    pub(super) fn parse(machine: &str, program: &str) -> Option<Self> {
        let numbers = |text: &str| -> Vec<u64> {
            text.split_whitespace().map(|field| field.parse().unwrap_or(0)).collect()
        };
        let times = numbers(machine.lines().next()?.strip_prefix("cpu ")?);
        let all = times.iter().take(8).sum();
        let program = numbers(program.rsplit_once(')')?.1);
        let own = program.get(11..15)?.iter().sum();
        Some(Self { all, busy: all - times.get(3)? - times.get(4)?, own })
    }

    /// The share of all processors that others used since `before`.
    #[expect(clippy::cast_precision_loss, reason = "ticks stay far below 2^52")]
    pub(super) fn others_since(&self, before: &Self) -> f64 {
        let others = (self.busy - before.busy).saturating_sub(self.own - before.own);
        others as f64 / (self.all - before.all).max(1) as f64
    }
}

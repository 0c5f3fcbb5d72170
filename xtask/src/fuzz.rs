//! `cargo xtask fuzz`: libFuzzer over what reads the files of checkpoints.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::{process, workspace};

pub(crate) const HELP: &str = "\
Builds a target of the crate `fuzz` so that libFuzzer sees which code an input reaches, and runs it
from the target's seeds and from what earlier runs kept. Needs a C++ compiler, and no nightly Rust.

  header      the header of a safetensors file
  index       model.safetensors.index.json
  config      config.json and generation_config.json
  tokenizer   tokenizer.json, then texts and ids through it
  template    a chat template, then a conversation through it

  --minutes M   how long (default 1)

An input that ends the target, takes 30 s or 2 GB is a finding: it fails the task and is kept as
`fuzz/TARGET/crash-...` (or `timeout-...`, `oom-...`) of cargo's target folder.";

/// What libFuzzer needs to see: which edges ran, and what was compared with what.
const COVERAGE: &[&str] = &[
    "--cfg=fuzzing",
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
    "-Ccodegen-units=1",
    "-Cdebug-assertions",
];

pub(crate) fn run(args: &[String]) -> Result<()> {
    let (target, minutes) = match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [target] => (target, "1"),
        [target, "--minutes", minutes] => (target, minutes),
        _ => bail!("fuzz takes a target, and --minutes M behind it"),
    };
    let minutes: f64 = minutes.parse().with_context(|| format!("--minutes {minutes}"))?;
    let seconds = Duration::try_from_secs_f64(minutes * 60.0).context("--minutes")?.as_secs();

    let folder = workspace::load()?.1.join("fuzz");
    let [seeds, kept] = ["seeds", "kept"].map(|name| folder.join(target).join(name));
    let seed_writer = ["run", "--quiet", "-p", "fuzz", "--", target];
    process::run(process::cargo(seed_writer).arg(&seeds))?;
    fs::create_dir_all(&kept).with_context(|| format!("make {}", kept.display()))?;

    // With a target triple, the flags are not those of build scripts.
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let host = process::output(std::process::Command::new(rustc).args(["--print", "host-tuple"]))?;
    let mut fuzzer = process::cargo(["run", "--quiet", "--release", "-p", "fuzz", "--target"]);
    fuzzer.args([host.trim(), "--"]).arg(kept).arg(seeds);
    fuzzer.arg(format!("-artifact_prefix={}/", folder.join(target).display()));
    fuzzer.arg(format!("-max_total_time={seconds}"));
    fuzzer.args(["-timeout=30", "-print_final_stats=1"]);
    fuzzer.env("CARGO_TARGET_DIR", folder.join("build")).env("TANDEM_FUZZ_TARGET", target);
    process::run(fuzzer.env("CARGO_ENCODED_RUSTFLAGS", COVERAGE.join("\u{1f}")))
}

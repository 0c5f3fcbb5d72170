//! `cargo xtask test`: every test, cheapest first.

use anyhow::{Result, bail};

use crate::{libtorch, process, setup, sim, workspace};

pub(crate) const HELP: &str = "\
  control   what builds without libtorch, and 2,000 seeds of the simulation
  device    what runs on libtorch, and the whole engine (provides libtorch if it is not there)

Without an argument: both. Everything on libtorch is built in release, so that its binding is
compiled once for tests, demo and server.";

/// Planes whose crates build without libtorch.
pub(crate) const CONTROL: &[&str] = &["control", "shared", "tool"];

/// Planes whose crates need libtorch, or are tested in release with those that do.
pub(crate) const DEVICE: &[&str] = &["device", "binary"];

pub(crate) fn run(args: &[String]) -> Result<()> {
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => process::stage("every test", || {
            control()?;
            device()
        }),
        ["control"] => control(),
        ["device"] => device(),
        _ => bail!("test takes control, device or nothing, not `{}`", args.join(" ")),
    }
}

fn control() -> Result<()> {
    let packages = workspace::packages_of(CONTROL)?;
    process::stage("tests without libtorch", || {
        let mut command = process::cargo(["test", "--quiet"]);
        // A crate that reached for libtorch would not find it.
        process::run(command.args(&packages).env("LIBTORCH", "/nonexistent"))
    })?;
    process::stage("simulation", || sim::run(&["--seeds".to_owned(), "2000".to_owned()]))
}

fn device() -> Result<()> {
    process::stage("libtorch", setup::ensure_libtorch)?;
    let packages = workspace::packages_of(DEVICE)?;
    process::stage("tests on libtorch (the first build compiles its binding: minutes)", || {
        let mut command = process::cargo(["test", "--quiet", "--release"]);
        process::run(command.args(&packages).envs(libtorch::loader_path()?))
    })
}

//! `cargo xtask test`: every test, cheapest first.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::{libtorch, process, serve, setup, sim, tools, workspace};

pub(crate) const HELP: &str = "\
  control   what builds without libtorch, and 2,000 seeds of the simulation
  device    what runs on libtorch, and the whole engine (provides libtorch if it is not there),
            then rocm
  rocm      every GPU kernel, compiled for AMD's gfx90a and gfx942 without a GPU (installs Zig, for
            its Clang, into the target folder at the first run)
  clients   the scripts of tests/clients: other people's clients against the server (installs them
            into the target folder at the first run; needs npm and python3 with venv), and of
            tests/page: the page in Chromium (installs that where it is missing, as root on Debian)

Without an argument: all of them. Everything on libtorch is built in release, so that its binding is
compiled once for tests, demo and server.";

/// Planes whose crates build without libtorch.
pub(crate) const CONTROL: &[&str] = &["control", "shared", "tool"];

/// Planes whose crates need libtorch, or are tested in release with those that do.
pub(crate) const DEVICE: &[&str] = &["device", "binary"];

pub(crate) fn run(args: &[String]) -> Result<()> {
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => process::stage("every test", || {
            control()?;
            device()?;
            clients()
        }),
        ["control"] => control(),
        ["device"] => device(),
        ["rocm"] => rocm(&["-p".to_owned(), "gpu-kernels".to_owned()]),
        ["clients"] => clients(),
        _ => {
            bail!("test takes control, device, rocm, clients or nothing, not `{}`", args.join(" "))
        }
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
    })?;
    // Of the same packages, so that nothing is built anew.
    rocm(&packages)
}

fn rocm(packages: &[String]) -> Result<()> {
    let zig = tools::zig()?;
    process::stage("kernels for ROCm", || {
        let mut command = process::cargo(["test", "--quiet", "--release", "--lib"]);
        command.args(packages).envs(libtorch::loader_path()?).env("TANDEM_ZIG", &zig);
        let filter = ["--ignored", "--nocapture", "every_kernel_compiles_for_rocm"];
        process::run(command.arg("--").args(filter))
    })
}

fn clients() -> Result<()> {
    let programs = tools::python_programs()?;
    let buf_folder = tools::buf()?.parent().context("buf lies in no folder")?.to_owned();
    let path = tools::path_with([programs.clone(), buf_folder])?;
    tools::chromium()?;
    process::stage("libtorch", setup::ensure_libtorch)?;
    let (tandem, example) = process::stage("build", || {
        let example = serve::build(&["-p", "grpc-api", "--example", "stream"])?;
        Ok((serve::build(&["-p", "server"])?, example))
    })?;
    for script in client_tests()? {
        let name = script.file_name().unwrap_or_default().to_string_lossy().into_owned();
        process::stage(&name, || {
            let mut python = Command::new(programs.join("python"));
            python.arg(&script).envs(libtorch::loader_path()?).env("PATH", &path);
            python.env("TANDEM_BIN", &tandem).env("STREAM_EXAMPLE", &example);
            process::run(&mut python)
        })?;
    }
    Ok(())
}

/// The scripts `test_*.py` of `tests/clients` and `tests/page`, each folder's by name.
fn client_tests() -> Result<Vec<PathBuf>> {
    let mut scripts = Vec::new();
    for folder in ["tests/clients", "tests/page"] {
        let files = fs::read_dir(workspace::root().join(folder))
            .with_context(|| format!("list {folder}"))?;
        let paths = files.map(|file| Ok(file?.path())).collect::<Result<Vec<_>>>()?;
        scripts.extend(paths.into_iter().filter(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name.starts_with("test_") && name.ends_with(".py")
        }));
    }
    scripts.sort();
    Ok(scripts)
}

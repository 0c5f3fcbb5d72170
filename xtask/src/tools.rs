//! Programs of others that checks and tests run, in `tools` of cargo's target folder: buf from npm,
//! Zig from PyPI, and a Python environment with gRPC and OpenAI clients. Each is made once for its
//! pins. A browser is one of the system's packages.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::{process, setup, workspace};

const BUF: &str = "@bufbuild/buf@1.75.0";

const ZIG: &str = "ziglang==0.17.1";

/// What the client tests import, and the programs that they start.
const REQUIREMENTS: &str = "tests/clients/requirements.txt";

/// The program buf.
pub(crate) fn buf() -> Result<PathBuf> {
    let folder = provide("buf", BUF, |folder| {
        let mut npm = Command::new("npm");
        npm.args(["install", "--no-save", "--no-audit", "--no-fund", "--loglevel=error"]);
        run_quietly(npm.arg("--prefix").arg(folder).arg(BUF)).context(
            "npm could not install buf: install Node.js with npm, check the network and npm's \
             configuration, and run again",
        )
    })?;
    Ok(folder.join("node_modules/.bin/buf"))
}

/// The program Zig, for its Clang and its linker, which know AMD's GPUs and need no other file.
pub(crate) fn zig() -> Result<PathBuf> {
    let folder = provide("zig", ZIG, |folder| {
        let mut pip = Command::new("python3");
        pip.args(["-m", "pip", "install", "--disable-pip-version-check", "--no-deps"]);
        run_quietly(pip.args(["--no-compile", "--target"]).arg(folder).arg(ZIG)).context(
            "pip could not install Zig: check the network and pip's configuration, and run again",
        )?;
        // 230 MB of headers and sources of C and Zig libraries.
        setup::remove(&folder.join("ziglang/lib"))
    })?;
    Ok(folder.join("ziglang/zig"))
}

/// The folder of the programs of the Python environment, `python` among them.
pub(crate) fn python_programs() -> Result<PathBuf> {
    let requirements = workspace::root().join(REQUIREMENTS);
    let pins = fs::read_to_string(&requirements).with_context(|| format!("read {REQUIREMENTS}"))?;
    let folder = provide("python", &pins, |folder| {
        run_quietly(Command::new("python3").args(["-m", "venv"]).arg(folder)).context(
            "python3 could not make an environment: install Python 3.10 or later with its venv \
             module (python3-venv), and run again",
        )?;
        let mut pip = Command::new(folder.join("bin/python"));
        pip.args(["-m", "pip", "install", "--disable-pip-version-check", "--requirement"]);
        run_quietly(pip.arg(&requirements)).with_context(|| {
            format!(
                "pip could not install {REQUIREMENTS}: check the network and pip's configuration, \
                 and run again"
            )
        })
    })?;
    Ok(folder.join("bin"))
}

/// Sees to it that the system has Chromium and its driver. Where it has not, Debian's packages are
/// installed if this may do so.
pub(crate) fn chromium() -> Result<()> {
    let has = |program: &str| {
        Command::new(program).arg("--version").output().is_ok_and(|said| said.status.success())
    };
    if has("chromium") && has("chromedriver") {
        return Ok(());
    }
    process::stage("install Chromium", || {
        for step in [
            &["update"][..],
            &["install", "--yes", "--no-install-recommends", "chromium", "chromium-driver"],
        ] {
            run_quietly(Command::new("apt-get").args(step)).context(
                "the test of the page needs Chromium: install chromium and chromedriver \
                 (chromium-driver on Debian), or run this as root where apt-get has them",
            )?;
        }
        Ok(())
    })
}

/// `PATH` with these folders first.
pub(crate) fn path_with<const N: usize>(folders: [PathBuf; N]) -> Result<OsString> {
    let others = std::env::var_os("PATH").unwrap_or_default();
    let all = folders.into_iter().chain(std::env::split_paths(&others));
    std::env::join_paths(all).context("the target folder's name has a colon")
}

/// The folder of a tool, made anew unless it was made for the same pins.
fn provide(name: &str, pins: &str, make: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
    let tools = workspace::load()?.1.join("tools");
    fs::create_dir_all(&tools).with_context(|| format!("make {}", tools.display()))?;
    let _lock = setup::lock(&tools.join("lock"))?;
    let folder = tools.join(name);
    // Written last, so that a folder with a stamp is complete.
    let stamp = folder.join("made-for");
    if fs::read_to_string(&stamp).is_ok_and(|made_for| made_for == pins) {
        return Ok(folder);
    }
    process::stage(&format!("install {name} into {}", tools.display()), || {
        setup::remove(&folder)?;
        fs::create_dir(&folder).with_context(|| format!("make {}", folder.display()))?;
        make(&folder)?;
        fs::write(&stamp, pins).with_context(|| format!("write {}", stamp.display()))
    })?;
    Ok(folder)
}

/// Runs an installer; an error is the last line of what it says.
fn run_quietly(command: &mut Command) -> Result<()> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.output().with_context(|| format!("cannot start {program}"))?;
    let said = [output.stdout, output.stderr].concat();
    ensure!(output.status.success(), "{}", process::last_line(&said));
    Ok(())
}

//! `cargo xtask tidy`: the rules of this repository that no other tool knows.

mod closure;
mod functions;
mod graph;
mod text;

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::test::CONTROL;
use crate::workspace::Member;
use crate::{mutants, process, workspace};

pub(crate) const HELP: &str = "\
Files at most 500 lines, functions 70, lines 100 columns; a module doc in every Rust file; no
trailing blanks; unsafe code only where it may be, with its reason; the environment read at the
edges only; no path of one machine and no registry host in a tracked file; tracked files small;
every crate and edge in the layer table, downward and within its plane, and in ARCHITECTURE.md;
nothing in the control plane that needs a C compiler or libtorch; every deliberate fault applicable
and listed in MUTANTS.md.";

const FILE_BYTES_MAX: u64 = 16_000_000;
const TREE_BYTES_MAX: u64 = 45_000_000;

pub(crate) fn run(args: &[String]) -> Result<()> {
    if !args.is_empty() {
        bail!("tidy takes no argument, not `{}`", args.join(" "));
    }
    let mut faults = Vec::new();
    check_files(&mut faults)?;
    faults.extend(mutants::check()?);
    let (members, _) = workspace::load()?;
    let architecture = read("ARCHITECTURE.md")?;
    faults.extend(graph::check(&members, &architecture));
    let control: Vec<&Member> = members.iter().filter(|member| member.is_of(CONTROL)).collect();
    faults.extend(closure::check(&tree(&control)?, closure::LIBTORCH));
    let is_low = |member: &Member| member.layer.is_some_and(|n| n <= closure::ENGINE_LAYER);
    let low: Vec<&Member> = control.into_iter().filter(|member| is_low(member)).collect();
    faults.extend(closure::check(&tree(&low)?, closure::FOREIGN));
    for member in &members {
        let manifest = member.folder.join("Cargo.toml");
        let text = fs::read_to_string(&manifest).context("read a manifest")?;
        if !text.contains("[lints]\nworkspace = true") {
            faults.push(format!("{}: the manifest lacks `[lints] workspace = true`", member.name));
        }
    }
    if faults.is_empty() {
        return Ok(());
    }
    faults.sort();
    bail!("{} faults:\n{}", faults.len(), faults.join("\n"))
}

/// All that the members pull in, one package a line.
fn tree(members: &[&Member]) -> Result<String> {
    let mut tree = process::cargo(["tree", "--locked", "--edges", "normal,build"]);
    tree.args(["--prefix", "none"]);
    for member in members {
        tree.args(["-p", &member.name]);
    }
    process::output(&mut tree)
}

fn check_files(faults: &mut Vec<String>) -> Result<()> {
    let mut total = 0;
    for path in tracked_files()? {
        let full = workspace::root().join(&path);
        let Ok(metadata) = fs::metadata(&full) else { continue };
        total += metadata.len();
        let name = path.to_string_lossy().into_owned();
        if metadata.len() > FILE_BYTES_MAX {
            faults.push(format!("{name}: {} bytes, at most {FILE_BYTES_MAX}", metadata.len()));
        }
        let Ok(content) = fs::read_to_string(&full) else { continue };
        faults.extend(text::check(&name, &content));
    }
    if total > TREE_BYTES_MAX {
        faults.push(format!("the tracked files are {total} bytes, at most {TREE_BYTES_MAX}"));
    }
    Ok(())
}

/// Files that git tracks or would track: untracked ones count, so that a fault is found early.
fn tracked_files() -> Result<Vec<PathBuf>> {
    let mut command = Command::new("git");
    command.args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"]);
    let list = process::output(command.current_dir(workspace::root()))?;
    Ok(list.split('\0').filter(|name| !name.is_empty()).map(PathBuf::from).collect())
}

fn read(name: &str) -> Result<String> {
    fs::read_to_string(workspace::root().join(name)).with_context(|| format!("read {name}"))
}

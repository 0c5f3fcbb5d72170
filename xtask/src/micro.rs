//! `cargo xtask bench micro`: the criterion benches of the workspace, against an earlier run.
//!
//! The documents are this task's own and not the `bench` crate's: a task must build in seconds,
//! and that crate brings HTTP, gRPC and plotting.

mod document;
mod origin;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

use crate::workspace::Member;
use crate::{libtorch, process, setup, test, workspace};
use document::{Bench, Document, read_benches};
use origin::{Load, origin};

const HELP: &str = "\
cargo xtask bench micro [FILTER] [OPTIONS]

Runs the criterion benches of the workspace and prints mean, 95 % interval and median of each.
Beside a baseline: the ratio of the means, and `noise` where the two intervals overlap or the means
differ by 1 % or less.

  FILTER           only benches whose id matches this regular expression
  --control        only crates that build without libtorch
  -p CRATE         only this crate
  --save NAME      keep the results under this name, in `micro` of the target folder
  --baseline NAME  compare with results that were kept
  --output FILE    write the results as JSON, with where they come from";

#[derive(Debug, Default, PartialEq, Eq)]
struct Options {
    filter: Option<String>,
    is_control: bool,
    package: Option<String>,
    save: Option<String>,
    baseline: Option<String>,
    output: Option<PathBuf>,
}

/// Packages with criterion benches, and the names of those.
#[derive(Debug, Default)]
struct Benches {
    packages: Vec<String>,
    names: Vec<String>,
    needs_libtorch: bool,
}

pub(crate) fn run(args: &[String]) -> Result<()> {
    if args.iter().any(|arg| arg == "--help" || arg == "-h") {
        println!("{HELP}");
        return Ok(());
    }
    let options = parse(args)?;
    let (members, target) = workspace::load()?;
    let folder = target.join("micro");
    let kept = |name: &String| folder.join(format!("{name}.json"));
    // Read before minutes are spent.
    let read = |name: &String| {
        Document::read(&kept(name)).with_context(|| format!("there is no baseline `{name}`"))
    };
    let baseline = options.baseline.as_ref().map(read).transpose()?;
    let benches = benches(&members, &options)?;
    let mut origin = origin(args)?;
    let (benches, others_share) =
        process::stage("benches", || measure(&benches, &options, &folder))?;
    origin["others_share"] = others_share.into();
    let document = Document { origin, benches };
    println!("\n{}", document.markdown(baseline.as_ref()));
    for path in options.save.as_ref().map(kept).iter().chain(&options.output) {
        document.write(path)?;
    }
    Ok(())
}

fn parse(args: &[String]) -> Result<Options> {
    let mut options = Options::default();
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        let mut value = || args.next().with_context(|| format!("{arg} takes a value")).cloned();
        match arg.as_str() {
            "--control" => options.is_control = true,
            "-p" => options.package = Some(value()?),
            "--save" => options.save = Some(value()?),
            "--baseline" => options.baseline = Some(value()?),
            "--output" => options.output = Some(value()?.into()),
            flag if flag.starts_with('-') => bail!("bench micro takes no `{flag}`"),
            _ => {
                let earlier = options.filter.replace(arg.clone());
                ensure!(earlier.is_none(), "bench micro takes one filter");
            }
        }
    }
    for name in options.save.iter().chain(&options.baseline) {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        ensure!(name.chars().all(is_plain), "`{name}`: give letters, digits, `-`, `_` and `.`");
    }
    Ok(options)
}

/// The benches that the options leave.
fn benches(members: &[Member], options: &Options) -> Result<Benches> {
    let mut benches = Benches::default();
    let is_asked = |member: &&Member| {
        (!options.is_control || member.is_of(test::CONTROL))
            && options.package.as_ref().is_none_or(|name| *name == member.name)
    };
    for member in members.iter().filter(is_asked) {
        let names = criterion_benches(&member.folder)?;
        if !names.is_empty() {
            benches.packages.push(member.name.clone());
            benches.names.extend(names);
            benches.needs_libtorch |= member.is_of(test::DEVICE);
        }
    }
    ensure!(!benches.names.is_empty(), "no such crate has a criterion bench");
    Ok(benches)
}

/// Names of a crate's benches that are criterion's: others take other arguments.
fn criterion_benches(folder: &Path) -> Result<Vec<String>> {
    let Ok(entries) = fs::read_dir(folder.join("benches")) else { return Ok(vec![]) };
    let mut names = vec![];
    for entry in entries {
        let path = entry?.path();
        let source = if path.is_dir() { path.join("main.rs") } else { path.clone() };
        if fs::read_to_string(&source).is_ok_and(|text| text.contains("criterion_main!(")) {
            let stem = path.file_stem().context("a bench has no name")?;
            names.push(stem.to_string_lossy().into_owned());
        }
    }
    names.sort();
    Ok(names)
}

/// Runs the benches and reads what criterion wrote; with it the share of all processors that others
/// used meanwhile, where the kernel tells.
fn measure(
    benches: &Benches,
    options: &Options,
    folder: &Path,
) -> Result<(Vec<Bench>, Option<f64>)> {
    // Criterion's folder of this run alone, so that nothing in it is of an earlier one.
    let criterion = folder.join("criterion");
    setup::remove(&criterion)?;
    let mut command = process::cargo(["bench"]);
    for (flag, values) in [("-p", &benches.packages), ("--bench", &benches.names)] {
        command.args(values.iter().flat_map(|value| [flag, value.as_str()]));
    }
    if benches.needs_libtorch {
        setup::ensure_libtorch()?;
        command.envs(libtorch::loader_path()?);
    }
    // What the compiler does is no load of the run.
    process::run(process::cargo(command.get_args()).arg("--no-run"))?;
    command.args(["--", "--noplot"]).args(&options.filter).env("CRITERION_HOME", &criterion);
    let before = Load::now();
    process::run(&mut command)?;
    let others_share = before.zip(Load::now()).map(|(before, now)| now.others_since(&before));
    let benches = read_benches(&criterion)?;
    ensure!(!benches.is_empty(), "no bench matches the filter");
    Ok((benches, others_share))
}

#[cfg(test)]
mod tests;

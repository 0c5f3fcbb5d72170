//! `cargo xtask mutants`: deliberate faults of the control plane, and what kills each.

mod list;
mod report;
mod sandbox;
mod trial;

use std::fs::{self, File, TryLockError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::{process, workspace};
use list::Fault;
use trial::Lab;

pub(crate) const HELP: &str = "\
Puts each fault of crates/engine-sim/mutants/mutants.txt into a copy of the crates, by itself, and
runs the simulation, then the unit test that the fault's line names. A fault that survives both,
and whose line does not say why, is an error. All of it happens under mutants/ in the target
folder.

  --seeds N      seeds of the simulation for each fault (default 2000)
  --only A,B     these faults
  --jobs N       faults at a time (default: half the processors)
  --write        then write the table of crates/engine-sim/MUTANTS.md
  --check        run nothing; fail if a fault does not apply, or the table lists others";

const LIST: &str = "crates/engine-sim/mutants/mutants.txt";
const DOCUMENT: &str = "crates/engine-sim/MUTANTS.md";

#[derive(Clone, Debug, PartialEq, Eq)]
struct Options {
    n_seeds: u64,
    only: Vec<String>,
    n_jobs: usize,
    write: bool,
    check: bool,
}

pub(crate) fn run(args: &[String]) -> Result<()> {
    let options = parse(args)?;
    if options.check {
        let differences = check()?;
        ensure!(differences.is_empty(), "{}", differences.join("\n"));
        return Ok(());
    }
    let mut faults = read_list()?;
    let unknown = options.only.iter().find(|name| faults.iter().all(|fault| fault.name != **name));
    if let Some(name) = unknown {
        bail!("{LIST} has no fault `{name}`");
    }
    faults.retain(|fault| options.only.is_empty() || options.only.contains(&fault.name));
    process::stage("mutants", || judge(&faults, &options))
}

fn judge(faults: &[Fault], options: &Options) -> Result<()> {
    let (members, target) = workspace::load()?;
    let folder = target.join("mutants");
    fs::create_dir_all(&folder)?;
    let lock = File::create(folder.join("lock"))?;
    match lock.try_lock() {
        Err(TryLockError::WouldBlock) => bail!("another run works in {}", folder.display()),
        result => result?,
    }
    let n_jobs = options.n_jobs.min(faults.len());
    let lab = Lab::new(&folder, &members, faults, (n_jobs, options.n_seeds))?;
    let time = process::stage("without a fault", || lab.check_sound(faults))?;
    // Several at a time are slower; what is still slower has lost its way.
    let limit = Duration::from_secs(20) + 10 * time;
    let start = Instant::now();
    let findings = lab.try_all(faults, limit)?;
    println!("\nfault, file, time, what kills it:");
    for finding in &findings {
        println!("{}", report::line(finding));
    }
    println!(
        "{} {:.0} s.",
        report::summary(&findings, options.n_seeds),
        start.elapsed().as_secs_f64()
    );
    let problems: Vec<_> = findings.iter().filter_map(trial::Finding::problem).collect();
    ensure!(problems.is_empty(), "{}", problems.join("\n"));
    if options.write {
        let text = report::written(&read(DOCUMENT)?, &findings, options.n_seeds)?;
        fs::write(workspace::root().join(DOCUMENT), text)?;
    }
    Ok(())
}

/// Checks, without running any, that each fault applies and that the table lists exactly them.
pub(crate) fn check() -> Result<Vec<String>> {
    let faults = read_list()?;
    let differences = report::differences(&read(DOCUMENT)?, &faults).context(DOCUMENT)?;
    Ok(differences.into_iter().map(|what| format!("{DOCUMENT}: {what}")).collect())
}

/// The faults of the list; each of them applies.
fn read_list() -> Result<Vec<Fault>> {
    let faults = list::parse(&read(LIST)?).context(LIST)?;
    for fault in &faults {
        let source = read(&format!("crates/{}", fault.file))
            .with_context(|| format!("{LIST}: line {}", fault.line))?;
        fault.apply(&source).context(LIST)?;
    }
    Ok(faults)
}

fn read(name: &str) -> Result<String> {
    fs::read_to_string(workspace::root().join(name)).with_context(|| format!("read {name}"))
}

fn parse(args: &[String]) -> Result<Options> {
    let n_processors = thread::available_parallelism().map_or(1, usize::from);
    let mut options = Options {
        n_seeds: 2000,
        only: vec![],
        n_jobs: n_processors.div_ceil(2),
        write: false,
        check: false,
    };
    let mut args = args.iter().map(String::as_str);
    while let Some(flag) = args.next() {
        match flag {
            "--write" => options.write = true,
            "--check" => options.check = true,
            "--seeds" => options.n_seeds = positive(flag, args.next())?,
            "--jobs" => options.n_jobs = usize::try_from(positive(flag, args.next())?)?,
            "--only" => {
                let names = args.next().context("--only takes names of faults")?;
                options.only = names.split(',').map(str::to_owned).collect();
            }
            _ => bail!("mutants takes no `{flag}`"),
        }
    }
    ensure!(!options.write || options.only.is_empty(), "--write needs every fault: no --only");
    Ok(options)
}

fn positive(flag: &str, value: Option<&str>) -> Result<u64> {
    let n = value.and_then(|value| value.parse().ok()).filter(|n| *n > 0);
    n.with_context(|| format!("{flag} takes a number above 0"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(args: &str) -> Result<Options> {
        parse(&args.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn options_are_read_or_refused() {
        let options = parsed("--seeds 300 --jobs 3 --only a,b").unwrap();
        assert_eq!((options.n_seeds, options.n_jobs), (300, 3));
        assert_eq!(options.only, ["a", "b"]);
        assert!(!options.write && !options.check);
        assert!(parsed("").unwrap().n_jobs >= 1);
        assert!(parsed("--check").unwrap().check);
        for wrong in ["--seeds", "--seeds 0", "--jobs x", "--only", "all", "--write --only a"] {
            assert!(parsed(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn every_listed_fault_applies_and_has_its_row() {
        assert_eq!(check().unwrap(), Vec::<String>::new());
    }
}

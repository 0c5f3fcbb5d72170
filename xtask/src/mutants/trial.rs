//! What becomes of a fault: the simulation first, then the unit test that its line names.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use super::list::{Fault, UnitTest};
use super::sandbox::{Built, Output, Sandbox};
use crate::process;
use crate::workspace::Member;

/// The program and where it comes from.
pub(super) const SIMULATION: &str = "engine-sim";

/// No run of sound crates takes nearly as long.
const SOUND_LIMIT: Duration = Duration::from_secs(900);

/// What came of a fault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// By what, and its first message.
    Killed {
        by: String,
        message: String,
    },
    Survived,
    /// The compiler's first error: the list is wrong.
    NotCompiled(String),
}

/// A fault's trial.
#[derive(Clone, Debug)]
pub(super) struct Finding<'a> {
    pub(super) fault: &'a Fault,
    pub(super) verdict: Verdict,
    pub(super) time: Duration,
}

impl Finding<'_> {
    /// What is wrong, if anything is.
    pub(super) fn problem(&self) -> Option<String> {
        let name = &self.fault.name;
        match (&self.verdict, &self.fault.equivalent) {
            (Verdict::Killed { .. }, None) | (Verdict::Survived, Some(_)) => None,
            (Verdict::Survived, None) => Some(format!("{name} survives")),
            (Verdict::Killed { by, .. }, Some(_)) => {
                Some(format!("{name} is listed as equivalent, but is killed by {by}"))
            }
            (Verdict::NotCompiled(error), _) => {
                Some(format!("{name} (line {}) does not compile: {error}", self.fault.line))
            }
        }
    }
}

/// Where trials run.
pub(super) struct Lab {
    /// One for each trial at a time.
    simulations: Vec<Sandbox>,
    /// Unit tests need more crates and are few.
    tests: Mutex<Sandbox>,
    n_seeds: String,
}

impl Lab {
    /// Copies the crates of the simulation, and of the tests of `faults`, to `folder`.
    pub(super) fn new(
        folder: &Path,
        members: &[Member],
        faults: &[Fault],
        (n_jobs, n_seeds): (usize, u64),
    ) -> Result<Self> {
        let simulated = closure(members, &[SIMULATION]);
        for fault in faults {
            let is_copied = simulated.iter().any(|m| m.folder.ends_with(fault.package()));
            ensure!(is_copied, "line {}: the simulation has no {}", fault.line, fault.file);
        }
        let of_tests = faults.iter().filter_map(|fault| fault.test.as_ref());
        let packages: Vec<_> = of_tests.map(|test| test.package.as_str()).collect();
        let tested = closure(members, &[packages.as_slice(), &[SIMULATION]].concat());
        let simulations = (0..n_jobs)
            .map(|job| Sandbox::new(&folder.join(format!("simulation-{job}")), &simulated))
            .collect::<Result<_>>()?;
        let tests = Mutex::new(Sandbox::new(&folder.join("tests"), &tested)?);
        Ok(Self { simulations, tests, n_seeds: n_seeds.to_string() })
    }

    /// Runs the simulation, and the tests of `faults`, without a fault. All must pass. Returns the
    /// time of the simulation.
    pub(super) fn check_sound(&self, faults: &[Fault]) -> Result<Duration> {
        let sandbox = &self.simulations[0];
        let program = build_simulation(sandbox)?.program()?;
        let start = Instant::now();
        let output = sandbox.run(&program, &["--seeds", &self.n_seeds], SOUND_LIMIT)?;
        let time = start.elapsed();
        ensure!(passed(&output), "the simulation fails without a fault:\n{}", output.text);
        let tests = self.tests.lock().expect("no trial panics");
        let named: HashSet<_> = faults.iter().filter_map(|fault| fault.test.as_ref()).collect();
        for test in named {
            let program = build_tests(&tests, test)?.program()?;
            let output = tests.run(&program, &[&test.name], SOUND_LIMIT)?;
            let is_one = passed(&output) && output.text.contains("test result: ok. 1 passed");
            ensure!(is_one, "`{test}` is not one test that passes:\n{}", output.text);
        }
        Ok(time)
    }

    /// Tries all `faults`, each for `limit` at most, and returns the findings in their order.
    pub(super) fn try_all<'a>(
        &self,
        faults: &'a [Fault],
        limit: Duration,
    ) -> Result<Vec<Finding<'a>>> {
        let next = AtomicUsize::new(0);
        let work = |sandbox: &Sandbox| -> Result<Vec<(usize, Finding<'a>)>> {
            let mut findings = Vec::new();
            loop {
                let idx = next.fetch_add(1, Ordering::Relaxed);
                let Some(fault) = faults.get(idx) else { return Ok(findings) };
                let start = Instant::now();
                let verdict = self.judge(sandbox, fault, limit).inspect_err(|_| {
                    // The others need not go on.
                    next.store(faults.len(), Ordering::Relaxed);
                })?;
                let finding = Finding { fault, verdict, time: start.elapsed() };
                eprintln!("{}", super::report::line(&finding));
                findings.push((idx, finding));
            }
        };
        let mut findings = thread::scope(|scope| {
            let sandboxes = self.simulations.iter();
            let jobs: Vec<_> =
                sandboxes.map(|sandbox| scope.spawn(move || work(sandbox))).collect();
            let results = jobs.into_iter().map(|job| job.join().expect("no trial panics"));
            results.collect::<Result<Vec<_>>>().map(|all| all.concat())
        })?;
        findings.sort_by_key(|(idx, _)| *idx);
        Ok(findings.into_iter().map(|(_, finding)| finding).collect())
    }

    fn judge(&self, sandbox: &Sandbox, fault: &Fault, limit: Duration) -> Result<Verdict> {
        let args = ["--seeds", &self.n_seeds];
        let by_seed = sandbox.with(fault, || {
            attempt(sandbox, build_simulation(sandbox)?, &args, limit, simulation_failure)
        })?;
        let (Verdict::Survived, Some(test)) = (&by_seed, &fault.test) else { return Ok(by_seed) };
        let failure = |text: &str| Some((format!("test `{test}`"), panic_message(text)?));
        let tests = self.tests.lock().expect("no trial panics");
        tests.with(fault, || {
            attempt(&tests, build_tests(&tests, test)?, &[&test.name], limit, failure)
        })
    }
}

/// Runs what was built; `failure` finds what failed, and its message, in what it says.
fn attempt(
    sandbox: &Sandbox,
    built: Built,
    args: &[&str],
    limit: Duration,
    failure: impl Fn(&str) -> Option<(String, String)>,
) -> Result<Verdict> {
    match built {
        Built::Program(program) => Ok(verdict(&sandbox.run(&program, args, limit)?, failure)),
        Built::Errors(text) => Ok(Verdict::NotCompiled(first_error(&text))),
    }
}

fn build_simulation(sandbox: &Sandbox) -> Result<Built> {
    sandbox.build(&["build", "--release", "-p", SIMULATION, "--bin", SIMULATION])
}

fn build_tests(sandbox: &Sandbox, test: &UnitTest) -> Result<Built> {
    sandbox.build(&["test", "--no-run", "--lib", "-p", &test.package])
}

/// The members called `roots` and all that they build on, tests included.
fn closure<'a>(members: &'a [Member], roots: &[&str]) -> Vec<&'a Member> {
    let mut names: Vec<&str> = roots.to_vec();
    let mut found: Vec<&Member> = Vec::new();
    while let Some(name) = names.pop() {
        let is_new = found.iter().all(|member| member.name != name);
        if let Some(member) = members.iter().find(|member| is_new && member.name == name) {
            found.push(member);
            let all = member.dependencies.iter().chain(&member.dev_dependencies);
            names.extend(all.map(String::as_str));
        }
    }
    found
}

fn passed(output: &Output) -> bool {
    output.status.is_some_and(|status| status.success())
}

fn verdict(output: &Output, failure: impl Fn(&str) -> Option<(String, String)>) -> Verdict {
    if passed(output) {
        return Verdict::Survived;
    }
    let (by, message) = match output.status {
        None => ("the time limit".to_owned(), String::new()),
        Some(status) => failure(&output.text)
            .unwrap_or_else(|| (status.to_string(), process::last_line(output.text.as_bytes()))),
    };
    Verdict::Killed { by, message }
}

/// The seed that failed, and why.
fn simulation_failure(text: &str) -> Option<(String, String)> {
    let line = text.lines().find(|line| line.starts_with("seed ") && line.contains(" failed: "))?;
    let (seed, message) = line.split_once(" failed: ")?;
    Some((seed.to_owned(), message.to_owned()))
}

/// The first line of the first panic.
fn panic_message(text: &str) -> Option<String> {
    let mut lines = text.lines().skip_while(|line| !line.contains(" panicked at "));
    lines.nth(1).map(str::to_owned)
}

fn first_error(text: &str) -> String {
    let first = text.lines().find(|line| line.starts_with("error"));
    first.unwrap_or("no message").to_owned()
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;
    use std::process::ExitStatus;

    use super::*;

    fn output(code: Option<i32>, text: &str) -> Output {
        let status = code.map(|code| ExitStatus::from_raw(code << 8));
        Output { status, text: text.to_owned() }
    }

    fn killed(by: &str, message: &str) -> Verdict {
        Verdict::Killed { by: by.to_owned(), message: message.to_owned() }
    }

    #[test]
    fn the_simulation_names_its_seed() {
        let text = "thread 'main' (7) panicked at crates/a/src/b.rs:1:2:\nassertion failed: a\n\
                    thread 'main' (7) panicked at crates/a/src/c.rs:3:4:\n\
                    seed 12 failed: request 3: the text differs\nreplay it with: x\n";
        let of = |output: &Output| verdict(output, simulation_failure);
        let expected = killed("seed 12", "request 3: the text differs");
        assert_eq!(of(&output(Some(101), text)), expected);
        assert_eq!(of(&output(Some(0), "2000 seeds")), Verdict::Survived);
        assert_eq!(of(&output(None, "")), killed("the time limit", ""));
        let crash = of(&output(Some(9), "a\noverflow\n\n"));
        assert_eq!(crash, killed("exit status: 9", "overflow"));
    }

    #[test]
    fn messages_are_first_lines() {
        let text = "failures:\n\nthread 't' (9) panicked at a.rs:1:2:\nfirst\n  left: 1\n";
        assert_eq!(panic_message(text).as_deref(), Some("first"));
        assert_eq!(panic_message("ok"), None);
        assert_eq!(first_error("warning: a\nerror[E0308]: b\nerror: c\n"), "error[E0308]: b");
    }

    #[test]
    fn a_survivor_needs_a_reason_and_a_reason_a_survivor() {
        let list = "a | c/src/f.rs | x | y\nb | c/src/f.rs | x | y | | equivalent: same\n";
        let faults = super::super::list::parse(list).unwrap();
        let problem = |fault, verdict| {
            Finding { fault, verdict, time: Duration::ZERO }.problem().unwrap_or_default()
        };
        assert_eq!(problem(&faults[0], killed("seed 1", "m")), "");
        assert_eq!(problem(&faults[1], Verdict::Survived), "");
        assert_eq!(problem(&faults[0], Verdict::Survived), "a survives");
        assert!(problem(&faults[1], killed("seed 1", "m")).ends_with("is killed by seed 1"));
        let broken = problem(&faults[1], Verdict::NotCompiled("error: e".to_owned()));
        assert_eq!(broken, "b (line 2) does not compile: error: e");
    }

    #[test]
    fn a_closure_has_the_crates_of_tests_too() {
        let member = |name: &str, dependencies: &[&str], dev: &[&str]| Member {
            name: name.to_owned(),
            folder: name.into(),
            layer: None,
            plane: None,
            dependencies: dependencies.iter().map(|name| (*name).to_owned()).collect(),
            dev_dependencies: dev.iter().map(|name| (*name).to_owned()).collect(),
        };
        let members = [
            member("a", &["b"], &[]),
            member("b", &[], &["c", "a"]),
            member("c", &[], &[]),
            member("d", &["a"], &[]),
        ];
        let mut names: Vec<_> =
            closure(&members, &["a", "b"]).iter().map(|m| m.name.as_str()).collect();
        names.sort_unstable();
        assert_eq!(names, ["a", "b", "c"]);
    }
}

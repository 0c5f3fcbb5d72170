//! What a reader must know before any figure.

use std::fmt;

use serde::Serialize;

use crate::compare::{N_REPEATS_MIN, groups};
use crate::provenance::{Fact, Server};
use crate::record::Counted;
use crate::result::{ResultFile, RunResult};

/// Something that a reader must know before any figure.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Warning {
    /// In a few words.
    pub title: &'static str,
    /// What it is about.
    pub text: String,
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.title, self.text)
    }
}

/// What a reader must know before any figure, the gravest first.
#[must_use]
pub fn warnings(file: &ResultFile) -> Vec<Warning> {
    let runs = file.runs();
    let about = |title, of: &dyn Fn(&RunResult) -> Option<String>, meaning| {
        about_runs(runs, title, of, meaning)
    };
    let mut warnings = vec![];
    warnings.extend(about(
        "Partial",
        &|run| run.is_partial.then(|| "cut short".to_owned()),
        "The figures are of what was measured until then.",
    ));
    if file.is_partial() && !runs.iter().any(|run| run.is_partial) {
        let text = "Runs that were planned are not there.".to_owned();
        warnings.push(Warning { title: "Partial", text });
    }
    warnings.extend(debugging(file));
    for server in &file.provenance().servers {
        warnings.extend(about_server(server));
        warnings.extend(about_answers(server, runs));
    }
    warnings.extend(about(
        "The machine was not quiet",
        &|run| run.machine.why_not.clone().filter(|_| run.machine.is_quiet == Some(false)),
        "Contention does not scale results proportionally: these figures say little of a quiet \
         machine, and ratios between them little too.",
    ));
    warnings.extend(about(
        "Perhaps not quiet",
        &|run| run.machine.why_not.clone().filter(|_| run.machine.is_quiet.is_none()),
        "Whether others disturbed the measurement is not known.",
    ));
    warnings.extend(about(
        "The generator is a bottleneck",
        &|run| run.generator.as_ref()?.why.clone(),
        "The server may be faster than these figures.",
    ));
    warnings.extend(about("Failed requests", &failures, "They are in no average."));
    warnings.extend(unlike_pairs(file));
    warnings.extend(sources(file));
    let few = groups(runs).iter().filter(|group| group.runs.len() < N_REPEATS_MIN).count();
    if few > 0 {
        let text = format!(
            "{few} of {} settings ran fewer than {N_REPEATS_MIN} times: how far their figures \
             spread is not known, so small differences mean nothing.",
            groups(runs).len()
        );
        warnings.push(Warning { title: "Few repeats", text });
    }
    warnings
}

/// One warning of all runs that `of` says something of; the first one's words stand for the rest.
fn about_runs(
    runs: &[RunResult],
    title: &'static str,
    of: &dyn Fn(&RunResult) -> Option<String>,
    meaning: &str,
) -> Option<Warning> {
    let said: Vec<(&RunResult, String)> =
        runs.iter().filter_map(|run| Some((run, of(run)?))).collect();
    let (run, first) = said.first()?;
    let which = format!("{}, {}, repeat {}", run.name, run.server, run.repeat + 1);
    let (n, of_all) = (said.len(), runs.len());
    let such_as = if n == 1 { "" } else { "such as " };
    let text = format!("{n} of {of_all} runs, {such_as}{which}: {first}. {meaning}");
    Some(Warning { title, text })
}

fn about_server(server: &Server) -> Vec<Warning> {
    let name = &server.name;
    let mut warnings = vec![];
    if server.process.known().is_some_and(|process| process.is_replaced) {
        let text = format!(
            "The program file of {name} has been replaced since it started: it runs an older \
             build than what is there now."
        );
        warnings.push(Warning { title: "Stale server", text });
    }
    if server.synthetic_acceptance == Fact::Known(true) {
        let text = format!(
            "By {name}: drafts are accepted by a schedule and not by its model. Speeds are those \
             of the schedule, and texts mean nothing."
        );
        warnings.push(Warning { title: "Synthetic acceptance", text });
    }
    warnings
}

/// What is odd about the answers of a server.
fn about_answers(server: &Server, runs: &[RunResult]) -> Vec<Warning> {
    let name = &server.name;
    let of_server = || runs.iter().filter(|run| run.server == *name);
    let mut warnings = vec![];
    if of_server().any(|run| run.kept_prompts) {
        let text = format!(
            "{name} was not made to forget its prompts: later runs may be answered from its cache."
        );
        warnings.push(Warning { title: "Prompts not forgotten", text });
    }
    if of_server().any(|run| run.metrics.counted == Counted::Messages) {
        let text = format!(
            "The tokens of {name} are counted by messages: it tells neither ids nor usage, and a \
             message may have several tokens."
        );
        warnings.push(Warning { title: "Tokens not told", text });
    }
    let n_short: u64 = of_server().map(|run| run.metrics.n_short).sum();
    if n_short > 0 {
        let n_completed: u64 = of_server().map(|run| run.metrics.n_completed).sum();
        let text = format!(
            "{name} ended {n_short} of {n_completed} answers before their planned length: it did \
             less than was asked."
        );
        warnings.push(Warning { title: "Short answers", text });
    }
    warnings
}

fn debugging(file: &ResultFile) -> Option<Warning> {
    let text = "The benchmark was built for debugging, and so were servers that it started: \
                these figures say little of an optimized build."
        .to_owned();
    let warning = Warning { title: "Built for debugging", text };
    (!file.provenance().bench.is_optimized).then_some(warning)
}

fn failures(run: &RunResult) -> Option<String> {
    let metrics = &run.metrics;
    let n_failed: u64 = metrics.failures.values().sum();
    let classes: Vec<String> =
        metrics.failures.iter().map(|(class, n)| format!("{class} {n}")).collect();
    let text = || format!("{n_failed} of {} ({})", metrics.n_requests, classes.join(", "));
    (n_failed > 0).then(text)
}

/// Pairs whose two servers were not asked the same.
fn unlike_pairs(file: &ResultFile) -> Option<Warning> {
    let is_unlike = |run: &&RunResult| {
        let mut others = file.runs().iter();
        others.any(|other| {
            (&other.name, other.repeat) == (&run.name, run.repeat)
                && (other.load != run.load || other.workload.sha256 != run.workload.sha256)
        })
    };
    let run = file.runs().iter().find(is_unlike)?;
    let text = format!("In {}, repeat {}: their figures do not compare.", run.name, run.repeat + 1);
    Some(Warning { title: "Servers were not asked the same", text })
}

/// Sources that are not exactly a commit, or not the same one.
fn sources(file: &ResultFile) -> Vec<Warning> {
    let provenance = file.provenance();
    let servers = provenance.servers.iter().map(|server| (server.name.as_str(), &server.source));
    let programs: Vec<_> =
        [("the benchmark", &provenance.bench.source)].into_iter().chain(servers).collect();
    let known = || programs.iter().filter_map(|(name, source)| Some((*name, source.known()?)));
    let dirty: Vec<&str> =
        known().filter(|(_, source)| source.is_dirty).map(|(name, _)| name).collect();
    let mut warnings = vec![];
    if !dirty.is_empty() {
        let text = format!(
            "Of {}: it had changes that no commit has, so nobody else can measure the same.",
            dirty.join(", ")
        );
        warnings.push(Warning { title: "Dirty tree", text });
    }
    let unknown: Vec<&str> = programs
        .iter()
        .filter_map(|(name, source)| source.known().is_none().then_some(*name))
        .collect();
    if !unknown.is_empty() {
        let text = format!(
            "Of {}: nobody can tell which code was measured. `cargo xtask bench` builds a Tandem \
             that names its commit.",
            unknown.join(", ")
        );
        warnings.push(Warning { title: "Source not known", text });
    }
    let is_same = |a: &str, b: &str| a.starts_with(b) || b.starts_with(a);
    if let Some((_, first)) = known().next()
        && let Some((name, other)) = known().find(|(_, of)| !is_same(&of.commit, &first.commit))
    {
        let text = format!(
            "The benchmark is of {:.12}, and {name} of {:.12}.",
            first.commit, other.commit
        );
        warnings.push(Warning { title: "Programs of different commits", text });
    }
    warnings
}

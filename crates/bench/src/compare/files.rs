//! Two documents of results: is the second one worse?

use std::fmt;

use serde_json::{Value, json};

use super::ab::signed_percent;
use super::{FIGURES, Figure, GOODPUT, Group, HEADLINE, N_REPEATS_MIN, Spread, groups};
use crate::metrics::Slo;
use crate::provenance::{Covers, Fact, Server};
use crate::report::warnings;
use crate::result::{ResultFile, RunResult};

/// The loss of acceptance rate above which it is a regression, percentage points.
pub const ACCEPTANCE_LOSS_MAX: f64 = 1.0;
/// How far a difference of two rates in percent may be off, as numbers of the machine.
const ROUNDING: f64 = 1e-9;

/// The spread that fewer than 3 repeats are taken to have, as a share of their median.
pub const ASSUMED_SPREAD: f64 = 0.05;

/// What a second document says beside a first one.
#[derive(Clone, Debug, PartialEq)]
pub struct Comparison {
    /// Settings that both have.
    pub settings: Vec<Setting>,
    /// What must not differ and does, where the comparison was forced.
    pub forced: Vec<String>,
    /// What a reader should know beside the figures.
    pub cautions: Vec<String>,
}

/// A setting of a server in both documents.
#[derive(Clone, Debug, PartialEq)]
pub struct Setting {
    /// Setting of the load.
    pub name: String,
    /// The server, in the first and in the second.
    pub servers: (String, String),
    /// Each figure that both have.
    pub rows: Vec<Row>,
}

/// A figure in both documents, over repeats.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// What it is.
    pub figure: &'static str,
    /// Its unit.
    pub unit: &'static str,
    /// In the first.
    pub a: Spread,
    /// In the second.
    pub b: Spread,
    /// The second's median over the first's.
    pub ratio: f64,
    /// What that means.
    pub finding: Finding,
}

/// What a difference means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finding {
    /// Nothing: the repeats' ranges overlap, or one of them is wider than the difference.
    Noise,
    /// The second is better.
    Better,
    /// The second is worse.
    Worse,
}

/// Two documents are not to be compared: what differs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Incomparable(pub Vec<String>);

impl fmt::Display for Incomparable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "these results must not be compared: {}", self.0.join("; "))
    }
}

impl std::error::Error for Incomparable {}

/// Compares the settings that both documents have, by name and server, or by name where each has
/// one server. Runs that were cut short count for nothing.
///
/// # Errors
///
/// If they have none in common or, unless `is_forced`, differ in what must be the same: the
/// checkpoint, the requests, the load, and whether acceptance is synthetic.
pub fn compare(
    a: &ResultFile,
    b: &ResultFile,
    is_forced: bool,
) -> Result<Comparison, Incomparable> {
    let (groups_a, groups_b) = (whole_groups(a), whole_groups(b));
    let by_name = [a, b].iter().all(|file| file.provenance().servers.len() == 1);
    let is_same =
        |a: &Group<'_>, b: &Group<'_>| a.name == b.name && (by_name || a.server == b.server);
    let (mut settings, mut forced, mut cautions) = (vec![], vec![], vec![]);
    for of_a in &groups_a {
        let Some(of_b) = groups_b.iter().find(|of_b| is_same(of_a, of_b)) else {
            cautions.push(format!("the second has no {} of {}", of_a.name, of_a.server));
            continue;
        };
        add_new(&mut forced, load_differences(of_a, of_b));
        if let (Some(a), Some(b)) = (a.server(of_a.server), b.server(of_b.server)) {
            add_new(&mut forced, server_differences(a, b));
            add_new(&mut cautions, not_known(a, b));
            add_new(&mut cautions, other_settings(&a.name, &settings_of(a), &settings_of(b)));
        }
        add_new(&mut cautions, other_terms(of_a, of_b));
        add_new(&mut cautions, few_repeats(of_a, of_b));
        add_new(&mut cautions, one_sided(of_a, of_b));
        settings.push(Setting::of(of_a, of_b));
    }
    for of_b in groups_b.iter().filter(|of_b| !groups_a.iter().any(|of_a| is_same(of_a, of_b))) {
        cautions.push(format!("the first has no {} of {}", of_b.name, of_b.server));
    }
    if settings.is_empty() {
        return Err(Incomparable(vec!["they have no setting in common".to_owned()]));
    }
    if !forced.is_empty() && !is_forced {
        return Err(Incomparable(forced));
    }
    let (at_a, at_b) = (a.provenance().started_at, b.provenance().started_at);
    if at_a != at_b {
        cautions.push(format!(
            "not measured in one sitting, but at {at_a:.0} and at {at_b:.0}: whatever changed \
             between is in the ratios"
        ));
    }
    let (host_a, host_b) = (&a.provenance().host, &b.provenance().host);
    if host_a != host_b {
        cautions.push(format!("the machines differ: {host_a}, and {host_b}"));
    }
    let [bench_a, bench_b] = [a, b].map(|file| {
        let bench = &file.provenance().bench;
        json!({"commit": bench.source.to_string(), "is_optimized": bench.is_optimized})
    });
    cautions.extend(other_settings("the benchmark", &bench_a, &bench_b));
    for (which, file) in [("first", a), ("second", b)] {
        cautions.extend(warnings(file).into_iter().map(|text| format!("the {which}: {text}")));
    }
    Ok(Comparison { settings, forced, cautions })
}

fn whole_groups(file: &ResultFile) -> Vec<Group<'_>> {
    groups(file.runs().iter().filter(|run| !run.is_partial))
}

fn add_new(texts: &mut Vec<String>, more: Vec<String>) {
    let new: Vec<String> = more.into_iter().filter(|text| !texts.contains(text)).collect();
    texts.extend(new);
}

fn load_differences(a: &Group<'_>, b: &Group<'_>) -> Vec<String> {
    let mut differences = vec![];
    for (of_a, of_b) in a.runs.iter().zip(&b.runs) {
        let (asked_a, asked_b) = (&of_a.workload, &of_b.workload);
        if of_a.load != of_b.load {
            differences
                .push(format!("the load of {}: {:?}, and {:?}", a.name, of_a.load, of_b.load));
        }
        if asked_a.description != asked_b.description {
            let (a_is, b_is) = (&asked_a.description, &asked_b.description);
            differences.push(format!("the workload of {}: {a_is}, and {b_is}", a.name));
        } else if asked_a.sha256 != asked_b.sha256 {
            differences.push(format!("the requests of {}: their hashes differ", a.name));
        }
    }
    differences
}

fn server_differences(a: &Server, b: &Server) -> Vec<String> {
    let mut differences = vec![];
    if let (Fact::Known(of_a), Fact::Known(of_b)) = (&a.checkpoint, &b.checkpoint)
        && (&of_a.sha256, of_a.covers) != (&of_b.sha256, of_b.covers)
    {
        differences.push(format!("the checkpoint: {of_a}, and {of_b}"));
    }
    if let (Fact::Known(of_a), Fact::Known(of_b)) =
        (&a.synthetic_acceptance, &b.synthetic_acceptance)
        && of_a != of_b
    {
        let says = |is_synthetic| if is_synthetic { "synthetic" } else { "real" };
        differences.push(format!("acceptance: {}, and {}", says(*of_a), says(*of_b)));
    }
    differences
}

fn not_known(a: &Server, b: &Server) -> Vec<String> {
    let mut texts = vec![];
    if a.checkpoint.known().is_none() || b.checkpoint.known().is_none() {
        texts.push("whether both have the same checkpoint is not known".to_owned());
    }
    let covers = |server: &Server| server.checkpoint.known().map(|of| of.covers);
    if [a, b].iter().any(|server| covers(server) == Some(Covers::HeadersAndSizes)) {
        texts.push(
            "the checkpoints are compared by headers and sizes alone: other weights of the same \
             shapes look the same"
                .to_owned(),
        );
    }
    if a.synthetic_acceptance.known().is_none() || b.synthetic_acceptance.known().is_none() {
        texts.push("whether acceptance is synthetic is not known of both".to_owned());
    }
    texts
}

/// What a server tells that may differ and bears on its figures.
fn settings_of(server: &Server) -> Value {
    json!({
        "commit": server.source.to_string(),
        "device": server.device.to_string(),
        "threads": server.threads.to_string(),
        "libraries": server.libraries,
        "config": server.config,
    })
}

/// What differs between two descriptions, by name.
fn other_settings(name: &str, a: &Value, b: &Value) -> Vec<String> {
    let mut differ = vec![];
    add_differences(&mut differ, "", (a, b));
    if differ.is_empty() { vec![] } else { vec![format!("{name} differs: {}", differ.join("; "))] }
}

fn add_differences(differ: &mut Vec<String>, path: &str, (a, b): (&Value, &Value)) {
    if let (Value::Object(of_a), Value::Object(of_b)) = (a, b) {
        let new = of_b.keys().filter(|key| !of_a.contains_key(*key));
        for key in of_a.keys().chain(new) {
            let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
            add_differences(differ, &path, (&a[key], &b[key]));
        }
    } else if a != b {
        let text = |value: &Value| value.as_str().map_or(value.to_string(), str::to_owned);
        differ.push(format!("{path}: {} → {}", text(a), text(b)));
    }
}

/// What differs in how the runs of a setting were measured and judged.
fn other_terms(a: &Group<'_>, b: &Group<'_>) -> Vec<String> {
    let terms = |group: &Group<'_>| {
        let RunResult { n_warmup, kept_prompts, .. } = group.runs[0];
        json!({"n_warmup": n_warmup, "kept_prompts": kept_prompts, "slo": slo(group)})
    };
    let mut texts = other_settings(a.name, &terms(a), &terms(b));
    if slo(a) != slo(b) {
        texts.push(format!("the goodput of {} is left out: its limits differ", a.name));
    }
    texts
}

fn slo(group: &Group<'_>) -> Slo {
    group.runs[0].slo
}

fn few_repeats(a: &Group<'_>, b: &Group<'_>) -> Vec<String> {
    let n_repeats = a.runs.len().min(b.runs.len());
    if n_repeats >= N_REPEATS_MIN {
        return vec![];
    }
    vec![format!(
        "fewer than {N_REPEATS_MIN} repeats show no spread: it is taken to be {:.0} %",
        ASSUMED_SPREAD * 100.0
    )]
}

/// Figures that one of them alone has, so that nobody can say whether they are worse.
fn one_sided(a: &Group<'_>, b: &Group<'_>) -> Vec<String> {
    let only = |figure: &Figure| match (a.spread(figure.of), b.spread(figure.of)) {
        (Some(_), None) => Some("first"),
        (None, Some(_)) => Some("second"),
        _ => None,
    };
    let text = |figure: &Figure| {
        Some(format!("only the {} has the {} of {}", only(figure)?, figure.label, a.name))
    };
    FIGURES.iter().filter_map(text).collect()
}

impl Setting {
    fn of(a: &Group<'_>, b: &Group<'_>) -> Self {
        let row = |figure: &'static Figure| {
            if figure.label == GOODPUT && slo(a) != slo(b) {
                return None;
            }
            Some(Row::of(figure, a.spread(figure.of)?, b.spread(figure.of)?))
        };
        Self {
            name: a.name.to_owned(),
            servers: (a.server.to_owned(), b.server.to_owned()),
            rows: FIGURES.iter().filter_map(row).collect(),
        }
    }

    pub(super) fn row(&self, figure: &str) -> Option<&Row> {
        self.rows.iter().find(|row| row.figure == figure)
    }

    fn regressions(&self) -> Vec<String> {
        let mut regressions = vec![];
        if let Some(row) = self.row(HEADLINE).filter(|row| row.finding == Finding::Worse) {
            let change = signed_percent(row.ratio);
            regressions.push(format!("{}: output throughput {change}", self.name));
        }
        if let Some(row) = self.row("acceptance rate") {
            let lost = row.a.median - row.b.median;
            if lost > ACCEPTANCE_LOSS_MAX + ROUNDING {
                let name = &self.name;
                regressions.push(format!("{name}: acceptance rate -{lost:.1} percentage points"));
            }
        }
        regressions
    }
}

impl Row {
    fn of(figure: &'static Figure, a: Spread, b: Spread) -> Self {
        let has_overlap = a.min <= b.max && b.min <= a.max;
        let few = a.n.min(b.n) < N_REPEATS_MIN;
        let assumed = if few { ASSUMED_SPREAD * a.median.abs() } else { 0.0 };
        let spread = a.range().max(b.range()).max(assumed);
        let difference = b.median - a.median;
        let finding = if has_overlap || difference.abs() <= spread {
            Finding::Noise
        } else if (difference > 0.0) == figure.is_more_better {
            Finding::Better
        } else {
            Finding::Worse
        };
        let ratio = b.median / a.median;
        Self { figure: figure.label, unit: figure.unit, a, b, ratio, finding }
    }
}

impl Comparison {
    /// What is worse in a way that fails a build: output throughput by more than the spread, or the
    /// median acceptance rate by more than [`ACCEPTANCE_LOSS_MAX`], however far its repeats spread.
    /// A program that finds one ends with a failure.
    #[must_use]
    pub fn regressions(&self) -> Vec<String> {
        self.settings.iter().flat_map(Setting::regressions).collect()
    }
}

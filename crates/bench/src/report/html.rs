//! Results as one HTML file without scripts and without anything from elsewhere.

use minijinja::Environment;
use minijinja::value::Serde;
use serde::Serialize;

use super::plots::{Bars, Line, Plot};
use super::tables::{self, Table};
use super::{ReportError, Warning, number, warnings};
use crate::arrivals::Load;
use crate::compare::{FIGURES, Group, groups};
use crate::provenance::{Fact, Server};
use crate::result::{ResultFile, RunResult};
use crate::series::{Quantiles, StepRates};

const PAGE: &str = include_str!("report.html");
/// Figures beside the throughput that come first.
const IN_HEADLINE: [&str; 3] = ["TTFT, median", "TPOT, mean", "acceptance length"];
/// The first of the colours of what steps do, which are not those of the first servers.
const KIND_COLOUR: usize = 3;
const KINDS: [&str; 3] = ["decode", "prefill", "mixed"];
const STEPS_NOTE: &str = "By what they did; the first repeat.";

/// What the page shows.
#[derive(Serialize)]
struct Page<'a> {
    title: &'a str,
    started_at: String,
    warnings: Vec<Warning>,
    headline: Vec<(String, String)>,
    pairs: Vec<Pairs>,
    summary: Table,
    counted: Option<Table>,
    legend: Vec<&'a str>,
    kind_colour: usize,
    overview: Vec<Figure>,
    settings: Vec<SettingPage<'a>>,
    origin: Vec<(String, String)>,
    servers: Vec<ServerPage<'a>>,
    arguments: String,
    bench_settings: String,
}

/// Pairs of a setting.
#[derive(Serialize)]
struct Pairs {
    name: String,
    table: Table,
}

/// A plot with its words.
#[derive(Serialize)]
struct Figure {
    title: String,
    note: String,
    /// Names of its colours from [`KIND_COLOUR`] on, where those are not the servers'.
    legend: &'static [&'static str],
    svg: String,
}

/// A setting of the load, over all servers.
#[derive(Serialize)]
struct SettingPage<'a> {
    name: &'a str,
    figures: Vec<Figure>,
    runs: Vec<RunPage>,
}

/// One run.
#[derive(Serialize)]
struct RunPage {
    title: String,
    figures: Vec<(String, String)>,
    distributions: Table,
}

/// A server.
#[derive(Serialize)]
struct ServerPage<'a> {
    name: &'a str,
    facts: Vec<(&'static str, String)>,
    config: Option<String>,
}

/// The page of a document: warnings, tables, plots and where it all comes from.
///
/// # Errors
///
/// If a plot cannot be drawn, or the page not be filled in.
pub fn html(file: &ResultFile) -> Result<String, ReportError> {
    let provenance = file.provenance();
    let groups = groups(file.runs());
    let mut names: Vec<&str> = vec![];
    for group in &groups {
        if !names.contains(&group.name) {
            names.push(group.name);
        }
    }
    let settings = names.into_iter().map(|name| setting(file, &groups, name));
    let pairs = file.ab().iter().map(|ab| Pairs {
        name: format!("{}: {} beside {}", ab.name, ab.b, ab.a),
        table: tables::pairs(ab),
    });
    let page = Page {
        title: file.title(),
        started_at: format!("{:.0}", provenance.started_at),
        warnings: warnings(file),
        headline: headline(file, &groups),
        pairs: pairs.collect(),
        summary: tables::summary(file),
        counted: tables::counted(file),
        legend: provenance.servers.iter().map(|server| server.name.as_str()).collect(),
        kind_colour: KIND_COLOUR,
        overview: overview(file, &groups)?,
        settings: settings.collect::<Result<_, _>>()?,
        origin: origin(file),
        servers: provenance.servers.iter().map(server).collect(),
        arguments: provenance.arguments.join(" "),
        bench_settings: format!("{:#}", provenance.settings),
    };
    let mut pages = Environment::new();
    pages.add_template("report.html", PAGE).map_err(ReportError::Page)?;
    let template = pages.get_template("report.html").map_err(ReportError::Page)?;
    template.render(Serde(page)).map_err(ReportError::Page)
}

fn origin(file: &ResultFile) -> Vec<(String, String)> {
    let provenance = file.provenance();
    let build = if provenance.bench.is_optimized { "optimized" } else { "for debugging" };
    let host = &provenance.host;
    let memory = host.memory_bytes.known().map(|bytes| format!("{} GiB", bytes >> 30));
    let governor = file.runs().iter().find_map(|run| run.machine.governor.clone());
    let mut facts = vec![
        ("Commit", provenance.bench.source.to_string()),
        (
            "Benchmark",
            format!("{}, built {build} by {}", provenance.bench.version, provenance.bench.rustc),
        ),
        ("Processor", format!("{} × {}", host.n_cpus, host.cpu)),
        ("Kernel", host.kernel.to_string()),
    ];
    facts.extend(memory.map(|memory| ("Memory", memory)));
    facts.extend(governor.map(|governor| ("Governor", governor)));
    facts.push(("Requests", asked(file)));
    let mut servers: Vec<(Vec<&str>, String)> = vec![];
    for Server { name, address, source, checkpoint, process, .. } in &provenance.servers {
        let mut text = format!("{address}; commit {source}; checkpoint ");
        text += &match checkpoint {
            Fact::Known(of) => format!("{}, {:.12}", of.name, of.sha256),
            Fact::Unknown(_) => checkpoint.to_string(),
        };
        if let Some([_, arguments @ ..]) = process.known().map(|of| of.arguments.as_slice()) {
            text += &format!("; started with {}", arguments.join(" "));
        }
        match servers.iter_mut().find(|(_, known)| *known == text) {
            Some((names, _)) => names.push(name),
            None => servers.push((vec![name], text)),
        }
    }
    let mut facts: Vec<(String, String)> =
        facts.into_iter().map(|(name, fact)| (name.to_owned(), fact)).collect();
    facts.extend(servers.into_iter().map(|(names, text)| (names.join(", "), text)));
    facts
}

/// What was asked, by kind: how often in a run, and after what warm-up.
fn asked(file: &ResultFile) -> String {
    let mut kinds: Vec<(&str, Vec<(usize, u32)>)> = vec![];
    for RunResult { workload, n_warmup, .. } in file.runs() {
        let counts = (workload.n_requests, *n_warmup);
        match kinds.iter_mut().find(|(kind, _)| *kind == workload.description) {
            Some((_, known)) => known.push(counts),
            None => kinds.push((&workload.description, vec![counts])),
        }
    }
    let range = |counts: &mut dyn Iterator<Item = usize>| {
        let (least, most) = counts.fold((usize::MAX, 0), |(a, b), n| (a.min(n), b.max(n)));
        if least == most { most.to_string() } else { format!("{least} to {most}") }
    };
    let texts = kinds.into_iter().map(|(kind, counts)| {
        let n = range(&mut counts.iter().map(|(n, _)| *n));
        let n_warmup = range(&mut counts.iter().map(|(_, n)| *n as usize));
        format!("{kind}: {n} a run, after a warm-up of {n_warmup}")
    });
    texts.collect::<Vec<_>>().join("; ")
}

/// What pairs say; where there are none, each server's best throughput.
fn headline(file: &ResultFile, groups: &[Group<'_>]) -> Vec<(String, String)> {
    if !file.ab().is_empty() {
        return file.ab().iter().map(|ab| (ab.name.clone(), ab.sentence.clone())).collect();
    }
    let throughput = |group: &Group<'_>| group.spread(|run| Some(run.metrics.output_throughput));
    let of_server = |server: &str| {
        let own = groups.iter().filter(|group| group.server == server);
        let known: Vec<_> = own.filter_map(|group| Some((group, throughput(group)?))).collect();
        let (best, spread) = known.iter().max_by(|a, b| a.1.median.total_cmp(&b.1.median))?;
        let up_to = if known.len() > 1 { "up to " } else { "" };
        let throughput = tables::with_range(spread);
        let mut text = format!("{up_to}{throughput} output tokens/s at {}", best.name);
        for figure in FIGURES.iter().filter(|figure| IN_HEADLINE.contains(&figure.label)) {
            if let Some(spread) = best.spread(figure.of) {
                text += &format!(", {} {} {}", figure.short, number(spread.median), figure.unit);
            }
        }
        Some((server.to_owned(), text))
    };
    file.provenance().servers.iter().filter_map(|server| of_server(&server.name)).collect()
}

fn server(server: &Server) -> ServerPage<'_> {
    let mut facts = vec![
        ("Address", server.address.clone()),
        ("Version", server.version.to_string()),
        ("Commit", server.source.to_string()),
        ("Checkpoint", server.checkpoint.to_string()),
        ("Device", server.device.to_string()),
        ("Threads", server.threads.to_string()),
        ("Synthetic acceptance", server.synthetic_acceptance.to_string()),
    ];
    match server.process.known() {
        Some(process) => {
            let (pid, started, n) = (process.pid, process.started_at, process.n_threads);
            facts.push(("Process", format!("{pid}, started {started}, {n} threads")));
            facts.push(("Arguments", process.arguments.join(" ")));
        }
        None => facts.push(("Process", "unknown".to_owned())),
    }
    if !server.libraries.is_empty() {
        let each = server.libraries.iter().map(|(name, version)| format!("{name} {version}"));
        facts.push(("Libraries", each.collect::<Vec<_>>().join(", ")));
    }
    let config = (!server.config.is_null()).then(|| format!("{:#}", server.config));
    ServerPage { name: &server.name, facts, config }
}

fn figure(
    title: impl Into<String>,
    note: &str,
    plot: &Plot,
) -> Result<Option<Figure>, ReportError> {
    if plot.is_empty() {
        return Ok(None);
    }
    Ok(Some(Figure { title: title.into(), note: note.to_owned(), legend: &[], svg: plot.svg()? }))
}

/// Plots over all settings.
fn overview(file: &ResultFile, groups: &[Group<'_>]) -> Result<Vec<Figure>, ReportError> {
    let mut figures = vec![];
    let mut workloads: Vec<&str> = vec![];
    for run in file.runs() {
        if !workloads.contains(&run.workload.description.as_str()) {
            workloads.push(&run.workload.description);
        }
    }
    for workload in workloads {
        let of: Vec<&Group<'_>> =
            groups.iter().filter(|group| group.runs[0].workload.description == workload).collect();
        let plot = trade_off(file, &of);
        // A point alone is in the table.
        if plot.lines.iter().any(|line| line.points.len() > 1) {
            let note = format!("{workload}. Medians over repeats; beside a point its load.");
            figures.extend(figure("Throughput against latency", &note, &plot)?);
        }
    }
    let names = server_names(file);
    let bars = names.iter().enumerate().filter_map(|(server, name)| {
        let mut counted = groups.iter().filter(|of| of.server == *name).filter_map(tables::total);
        let first = counted.next()?;
        let all = counted.fold(first, |sum, counters| tables::plus(&sum, &counters));
        let heights = tables::by_position(&all).into_iter().map(|share| share * 100.0).collect();
        Some(Bars { colour: server, heights })
    });
    let plot = Plot {
        x_label: "position of the draft",
        y_label: "accepted, %",
        bars: bars.filter(|bars| !bars.heights.is_empty()).collect(),
        y_max: Some(100.0),
        ..Plot::default()
    };
    let note = "Of the drafts verified there, over all settings.";
    figures.extend(figure("Acceptance by position", note, &plot)?);
    Ok(figures)
}

fn server_names(file: &ResultFile) -> Vec<&str> {
    file.provenance().servers.iter().map(|server| server.name.as_str()).collect()
}

/// A line for each server through its settings, from the lowest latency on.
fn trade_off(file: &ResultFile, groups: &[&Group<'_>]) -> Plot {
    let line = |(server, name): (usize, &str)| {
        let point = |group: &&&Group<'_>| {
            let x = group.spread(|run| Some(run.metrics.tpot_ms?.mean))?.median;
            let y = group.spread(|run| Some(run.metrics.output_throughput))?.median;
            Some(((x, y), load_label(group.runs[0].load)))
        };
        let of_server = groups.iter().filter(|group| group.server == name);
        let mut marked: Vec<_> = of_server.filter_map(|group| point(&group)).collect();
        marked.sort_by(|a, b| a.0.0.total_cmp(&b.0.0));
        let (points, labels) = marked.into_iter().unzip();
        Line { colour: server, points, labels }
    };
    Plot {
        x_label: "TPOT, mean (ms)",
        y_label: "output tokens/s",
        lines: server_names(file).into_iter().enumerate().map(line).collect(),
        ..Plot::default()
    }
}

fn load_label(load: Load) -> String {
    match load {
        Load::Closed { concurrency } => concurrency.to_string(),
        Load::Open { rate, .. } => format!("{rate}/s"),
    }
}

/// Plots of a setting: a line for each repeat, in the colour of its server.
fn setting<'a>(
    file: &ResultFile,
    groups: &[Group<'_>],
    name: &'a str,
) -> Result<SettingPage<'a>, ReportError> {
    let names = server_names(file);
    let place = |group: &Group<'_>| names.iter().position(|name| *name == group.server);
    let runs: Vec<(usize, &RunResult)> = groups
        .iter()
        .filter(|group| group.name == name)
        .filter_map(|group| Some((place(group)?, group)))
        .flat_map(|(server, group)| group.runs.iter().map(move |run| (server, *run)))
        .collect();
    let to_p99 = "Up to the 99th percentile; a line for each repeat.";
    let over_time = "A line for each repeat.";
    let running = "Requests sent and not ended.";
    let figures = [
        figure("Time to the first token", to_p99, &cdf(&runs, "ms", |run| &run.series.ttft_ms))?,
        figure("Time between tokens", to_p99, &cdf(&runs, "ms", |run| &run.series.itl_token_ms))?,
        figure(
            "Output over time",
            over_time,
            &timeline(&runs, "tokens/s", |run| &run.series.timeline.output_throughput),
        )?,
        figure(
            "Requests over time",
            running,
            &timeline(&runs, "requests", |run| &run.series.timeline.running),
        )?,
    ];
    let of_steps = names.iter().filter_map(|name| {
        let (_, run) = runs.iter().find(|(_, run)| run.server == *name)?;
        let figure = figure(format!("Steps over time, {name}"), STEPS_NOTE, &steps(run));
        Some(figure.transpose()?.map(|figure| Figure { legend: &KINDS, ..figure }))
    });
    let of_steps = of_steps.collect::<Result<Vec<_>, _>>()?;
    let page = |(_, run): &(usize, &RunResult)| RunPage {
        title: format!("{}, repeat {}", run.server, run.repeat + 1),
        figures: tables::figures(run),
        distributions: tables::distributions(run),
    };
    Ok(SettingPage {
        name,
        figures: figures.into_iter().flatten().chain(of_steps).collect(),
        runs: runs.iter().map(page).collect(),
    })
}

/// Shares of a distribution up to each value.
#[expect(clippy::cast_precision_loss, reason = "percents")]
fn cdf(
    runs: &[(usize, &RunResult)],
    x_label: &'static str,
    of: fn(&RunResult) -> &Quantiles,
) -> Plot {
    let x_max = runs.iter().filter_map(|(_, run)| of(run).0.get(99)).copied().fold(0.0, f64::max);
    let line = |(server, run): &(usize, &RunResult)| {
        let points = of(run).0.iter().enumerate();
        let points = points.map(|(percent, value)| (*value, percent as f64)).collect();
        Line { colour: *server, points, labels: vec![] }
    };
    Plot {
        x_label,
        y_label: "% at most this",
        lines: runs.iter().map(line).collect(),
        x_max: (x_max > 0.0).then_some(x_max * 1.02),
        y_max: Some(100.0),
        ..Plot::default()
    }
}

fn timeline(
    runs: &[(usize, &RunResult)],
    y_label: &'static str,
    of: fn(&RunResult) -> &Vec<f64>,
) -> Plot {
    let line = |(server, run): &(usize, &RunResult)| over_time(*server, run, of(run));
    Plot { x_label: "seconds", y_label, lines: runs.iter().map(line).collect(), ..Plot::default() }
}

/// Steps of a run by kind.
fn steps(run: &RunResult) -> Plot {
    let StepRates { decode, prefill, mixed } = &run.series.timeline.steps;
    let is_there = |(_, parts): &(usize, &Vec<f64>)| parts.iter().any(|rate| *rate > 0.0);
    let kinds = [decode, prefill, mixed].into_iter().enumerate().filter(is_there);
    let lines = kinds.map(|(kind, parts)| over_time(KIND_COLOUR + kind, run, parts)).collect();
    Plot { x_label: "seconds", y_label: "steps/s", lines, ..Plot::default() }
}

/// A line through the middles of the parts of a timeline.
#[expect(clippy::cast_precision_loss, reason = "few parts")]
fn over_time(colour: usize, run: &RunResult, parts: &[f64]) -> Line {
    let at = |idx: usize| (idx as f64 + 0.5) * run.series.timeline.part_s;
    let points = parts.iter().enumerate().map(|(idx, value)| (at(idx), *value)).collect();
    Line { colour, points, labels: vec![] }
}

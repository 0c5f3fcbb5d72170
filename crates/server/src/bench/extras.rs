//! What single commands say beside the report that all have.

use bench::{AbResult, AbRow, Counters, ResultFile, RunResult};

use super::args::{Output, PercentileMetric};
use super::seed_table::{OFF, OFF_AGAIN, ON};

/// The figure that decides.
const THROUGHPUT: &str = "output throughput";

/// The report of a result, with the tables of its command behind the warnings.
pub(super) fn markdown(result: &ResultFile) -> String {
    let report = bench::markdown(result);
    let is_head = |line: &str| line.starts_with(['#', '>', '\n']);
    let head: String = report.split_inclusive('\n').take_while(|line| is_head(line)).collect();
    let tables = [seed_table(result), batches(result), prompts(result)].into_iter().flatten();
    let tables: String = tables.map(|table| format!("{table}\n")).collect();
    format!("{head}{tables}{}", &report[head.len()..])
}

/// How each server got its prompts.
fn prompts(result: &ResultFile) -> Option<String> {
    let servers = result.provenance().servers.iter();
    let told = servers.filter_map(|server| {
        Some(format!("{} {}", server.name, server.config["prompts"].as_str()?))
    });
    let told: Vec<String> = told.collect();
    (!told.is_empty()).then(|| format!("Prompts: {}.\n", told.join("; ")))
}

/// What batches took, one row a run.
fn batches(result: &ResultFile) -> Option<String> {
    let header = ["batch", "batches", "mean ms", "p50", "p90", "p99", "min", "max", "ms a token"];
    let rows: Vec<Vec<String>> = result.runs().iter().filter_map(batch_row).collect();
    (!rows.is_empty()).then(|| table(&header, &rows))
}

fn batch_row(run: &RunResult) -> Option<Vec<String>> {
    let of = run.batch_ms?;
    let n_tokens = run.metrics.n_output_tokens as f64 / run.metrics.n_completed.max(1) as f64;
    let times = [of.mean, of.p50, of.p90, of.p99, of.min, of.max, of.mean / n_tokens.max(1.0)];
    let row = [run.name.clone(), of.n.to_string()].into_iter();
    Some(row.chain(times.map(|time| format!("{time:.2}"))).collect())
}

/// The table of the seed protocol: for each prompt length what sharing changes, and what the server
/// without it differs by from another one without it.
fn seed_table(result: &ResultFile) -> Option<String> {
    let of = |b: &str| {
        let ab = result.ab().iter().filter(move |ab| ab.a == OFF && ab.b == b);
        ab.collect::<Vec<&AbResult>>()
    };
    let header = [
        "ISL",
        "base tok/s",
        "base again",
        "with sharing tok/s",
        "TPOT ms",
        "acceptance length",
        "acceptance rate %",
        "indexer launches",
    ];
    let rows: Vec<Vec<String>> = of(ON)
        .into_iter()
        .map(|on| {
            let again = of(OFF_AGAIN).into_iter().find(|again| again.name == on.name);
            seed_row(result, on, again)
        })
        .collect();
    (!rows.is_empty()).then(|| table(&header, &rows) + &agreement(&of(OFF_AGAIN)))
}

/// Whether the two servers without sharing are as one.
fn agreement(again: &[&AbResult]) -> String {
    let throughputs = || again.iter().filter_map(|ab| Some((ab, row(ab, THROUGHPUT)?)));
    let differ: Vec<&str> = throughputs()
        .filter(|(_, row)| row.is_above_noise)
        .map(|(ab, _)| ab.name.as_str())
        .collect();
    if !differ.is_empty() {
        return format!(
            "\n**The two servers without sharing differ** by more than the noise with {}: what \
             sharing changes there is not known.\n",
            differ.join(" and ")
        );
    }
    let are_told = throughputs().all(|(_, row)| row.interval.is_some());
    let text = if are_told { "agree within the noise" } else { "ran too few times to compare" };
    format!("\nThe two servers without sharing {text}.\n")
}

fn row<'a>(ab: &'a AbResult, figure: &str) -> Option<&'a AbRow> {
    ab.rows.iter().find(|row| row.figure == figure)
}

fn seed_row(result: &ResultFile, on: &AbResult, again: Option<&AbResult>) -> Vec<String> {
    let pair = |figure: &str, n_digits: usize| {
        let row = row(on, figure);
        row.map_or_else(none, |row| {
            format!("{:.n_digits$} → {:.n_digits$}", row.a.median, row.b.median)
        })
    };
    let base = row(on, THROUGHPUT).map_or_else(none, |row| format!("{:.1}", row.a.median));
    let launches = |server: &str| {
        let runs = result.runs().iter().filter(|run| run.name == on.name && run.server == server);
        let counters = runs.filter_map(|run| run.counters.as_ref());
        counters.map(|counters: &Counters| counters.indexer_launches).sum::<u64>()
    };
    vec![
        on.name.trim_end_matches(" tokens in").to_owned(),
        base,
        again.and_then(|again| row(again, THROUGHPUT)).map_or_else(none, changed),
        row(on, THROUGHPUT).map_or_else(none, changed),
        pair("TPOT, mean", 2),
        pair("acceptance length", 2),
        pair("acceptance rate", 1),
        format!("{} → {}", launches(OFF), launches(ON)),
    ]
}

/// The second value of pairs with its ratio to the first, and whether that means anything.
fn changed(row: &AbRow) -> String {
    let percent = |ratio: f64| format!("{:+.1} %", (ratio - 1.0) * 100.0);
    let finding = match (row.interval, row.is_above_noise) {
        (None, _) => "too few pairs to tell".to_owned(),
        (Some((low, high)), is_above) => {
            let noise = if is_above { "" } else { ", noise" };
            format!("{} to {}{noise}", percent(low), percent(high))
        }
    };
    format!("{:.1} ({}; {finding})", row.b.median, percent(row.ratio))
}

fn none() -> String {
    "–".to_owned()
}

/// The percentiles that the flags ask for.
pub(super) fn percentiles(result: &ResultFile, output: &Output) -> Option<String> {
    let metrics = &output.percentile_metrics;
    let names: Vec<String> = output.metric_percentiles.iter().map(|p| format!("p{p}")).collect();
    let header = ["setting", "server", "run", "ms"].into_iter();
    let header: Vec<&str> = header.chain(names.iter().map(String::as_str)).collect();
    let mut rows = vec![];
    for run in result.runs() {
        for metric in metrics {
            let (name, quantiles) = match metric {
                PercentileMetric::Ttft => ("TTFT", &run.series.ttft_ms),
                PercentileMetric::Tpot => ("TPOT", &run.series.tpot_ms),
                PercentileMetric::Itl => ("ITL per token", &run.series.itl_token_ms),
                PercentileMetric::E2el => ("E2EL", &run.series.e2el_ms),
            };
            let number = (run.repeat + 1).to_string();
            let row = [run.name.clone(), run.server.clone(), number, name.to_owned()].into_iter();
            let of = output.metric_percentiles.iter();
            let values = of.map(|p| quantiles.0.get(usize::from(*p)));
            let values = values.map(|value| value.map_or_else(none, |ms| format!("{ms:.2}")));
            rows.push(row.chain(values).collect());
        }
    }
    (!rows.is_empty()).then(|| table(&header, &rows))
}

/// A Markdown table.
fn table(header: &[&str], rows: &[Vec<String>]) -> String {
    let line = |cells: &[&str]| format!("| {} |\n", cells.join(" | "));
    let mut text = line(header);
    text += &line(&vec!["---:"; header.len()]);
    for row in rows {
        text += &line(&row.iter().map(String::as_str).collect::<Vec<_>>());
    }
    text
}

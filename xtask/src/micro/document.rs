//! Results: read from criterion, kept as JSON, shown as a table.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

const SCHEMA: &str = "tandem-micro/1";

/// The share of all processors that others may use on a machine that is called quiet.
const QUIET_SHARE: f64 = 0.05;

/// The least difference that is told from noise: as much comes of where memory lies.
const EFFECT_MIN: f64 = 0.01;

/// Results with where they come from.
#[derive(Debug, PartialEq)]
pub(super) struct Document {
    pub(super) origin: Value,
    /// By id.
    pub(super) benches: Vec<Bench>,
}

/// What criterion says of a bench, in nanoseconds an iteration.
#[derive(Debug, PartialEq)]
pub(super) struct Bench {
    pub(super) id: String,
    pub(super) mean: f64,
    /// The mean's 95 % confidence interval, over the samples of this run.
    pub(super) interval: [f64; 2],
    pub(super) median: f64,
}

/// What criterion left in its folder, by id.
pub(super) fn read_benches(criterion: &Path) -> Result<Vec<Bench>> {
    let mut benches = vec![];
    let mut folders = vec![criterion.to_owned()];
    while let Some(folder) = folders.pop() {
        let of = |name: &str| read_json(&folder.join("new").join(name));
        if folder.join("new/estimates.json").is_file() {
            let bench = Bench::of_criterion(&of("benchmark.json")?, &of("estimates.json")?);
            benches.push(bench.with_context(|| format!("not criterion's: {}", folder.display()))?);
        }
        let Ok(entries) = fs::read_dir(&folder) else { continue };
        folders.extend(entries.flatten().map(|entry| entry.path()).filter(|path| path.is_dir()));
    }
    benches.sort_by(|a, b| a.id.cmp(&b.id));
    Ok(benches)
}

fn read_json(path: &Path) -> Result<Value> {
    let text = fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
    serde_json::from_str(&text).with_context(|| format!("{} is no JSON", path.display()))
}

impl Bench {
    fn of_criterion(benchmark: &Value, estimates: &Value) -> Option<Self> {
        let mean = &estimates["mean"];
        let bound = |name: &str| mean["confidence_interval"][name].as_f64();
        Some(Self {
            id: benchmark["full_id"].as_str()?.to_owned(),
            mean: mean["point_estimate"].as_f64()?,
            interval: [bound("lower_bound")?, bound("upper_bound")?],
            median: estimates["median"]["point_estimate"].as_f64()?,
        })
    }

    fn of_json(json: &Value) -> Option<Self> {
        let number = |value: &Value| value.as_f64();
        let interval = &json["mean_interval_ns"];
        Some(Self {
            id: json["id"].as_str()?.to_owned(),
            mean: number(&json["mean_ns"])?,
            interval: [number(&interval[0])?, number(&interval[1])?],
            median: number(&json["median_ns"])?,
        })
    }

    fn json(&self) -> Value {
        json!({
            "id": self.id,
            "mean_ns": self.mean,
            "mean_interval_ns": self.interval,
            "median_ns": self.median,
        })
    }

    /// What the difference to an earlier result means.
    pub(super) fn finding(&self, earlier: &Self) -> &'static str {
        let ([low, high], [earlier_low, earlier_high]) = (self.interval, earlier.interval);
        let effect = (self.mean / earlier.mean - 1.0).abs();
        if low <= earlier_high && earlier_low <= high || effect <= EFFECT_MIN {
            "noise"
        } else if self.mean < earlier.mean {
            "faster"
        } else {
            "slower"
        }
    }
}

impl Document {
    pub(super) fn read(path: &Path) -> Result<Self> {
        let json = read_json(path)?;
        ensure!(json["schema"] == SCHEMA, "{} is not of {SCHEMA}", path.display());
        let benches = json["benches"].as_array().into_iter().flatten().map(Bench::of_json);
        let benches = benches.collect::<Option<Vec<_>>>();
        let benches = benches.with_context(|| format!("{} is incomplete", path.display()))?;
        Ok(Self { origin: json["origin"].clone(), benches })
    }

    pub(super) fn write(&self, path: &Path) -> Result<()> {
        let benches: Vec<Value> = self.benches.iter().map(Bench::json).collect();
        let json = json!({"schema": SCHEMA, "origin": self.origin, "benches": benches});
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder).with_context(|| format!("make {}", folder.display()))?;
        }
        fs::write(path, format!("{json:#}\n")).with_context(|| format!("write {}", path.display()))
    }

    /// A table, and what to know beside it.
    pub(super) fn markdown(&self, baseline: Option<&Self>) -> String {
        let mut header = vec!["bench", "mean", "95 % interval", "median"];
        if baseline.is_some() {
            header.extend(["baseline", "ratio", "finding"]);
        }
        let mut rows = vec![header.into_iter().map(str::to_owned).collect::<Vec<_>>()];
        for bench in &self.benches {
            let [low, high] = bench.interval.map(time);
            let id = bench.id.replace('|', "\\|");
            let mut row = vec![id, time(bench.mean), format!("{low} – {high}"), time(bench.median)];
            if let Some(baseline) = baseline {
                let earlier = baseline.benches.iter().find(|earlier| earlier.id == bench.id);
                row.extend(earlier.map_or(["–".into(), "–".into(), "new".into()], |earlier| {
                    let ratio = bench.mean / earlier.mean;
                    [time(earlier.mean), format!("{ratio:.3}"), bench.finding(earlier).into()]
                }));
            }
            rows.push(row);
        }
        let mut text = table(&rows);
        for (which, document) in [("These", Some(self)), ("The baseline", baseline)] {
            text.extend(document.map(|document| document.source(which)));
        }
        if baseline.is_some_and(|baseline| baseline.origin["cpu"] != self.origin["cpu"]) {
            text += "\nThe processors differ: these ratios compare machines.\n";
        }
        text
    }

    /// Where it comes from, in a sentence, and another one of a machine that was not quiet.
    fn source(&self, which: &str) -> String {
        let word = |name: &str| self.origin[name].as_str().unwrap_or("unknown").to_owned();
        let changes = if self.origin["is_dirty"] == true { ", with changes" } else { "" };
        let (commit, n_cpus, cpu) = (word("commit"), &self.origin["n_cpus"], word("cpu"));
        let mut text = format!("\n{which}: commit {commit:.12}{changes}, on {n_cpus} × {cpu}.");
        match self.origin["others_share"].as_f64() {
            Some(share) if share > QUIET_SHARE => {
                let percent = share * 100.0;
                text += &format!(
                    " The machine was not quiet: others used {percent:.0} % of all processors."
                );
            }
            Some(_) => {}
            None => text += " Whether the machine was quiet is not known.",
        }
        text + "\n"
    }
}

/// A time for readers, of nanoseconds.
fn time(ns: f64) -> String {
    let units = [(1e9, "s"), (1e6, "ms"), (1e3, "µs")];
    let unit = units.into_iter().find(|(size, _)| ns >= *size);
    let (size, unit) = unit.unwrap_or((1.0, "ns"));
    let value = ns / size;
    let n_decimals = if value >= 100.0 { 1 } else { 2 };
    format!("{value:.n_decimals$} {unit}")
}

/// Columns of one width each: the first to the left, figures to the right.
fn table(rows: &[Vec<String>]) -> String {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max();
    let widths: Vec<usize> = (0..rows[0].len()).filter_map(width).collect();
    let mut text = String::new();
    for (idx, row) in rows.iter().enumerate() {
        for (column, (cell, &width)) in row.iter().zip(&widths).enumerate() {
            let written = match column {
                0 => write!(text, "| {cell:<width$} "),
                _ => write!(text, "| {cell:>width$} "),
            };
            written.expect("a string takes any text");
        }
        text += "|\n";
        if idx == 0 {
            let dashes = widths.iter().enumerate().map(|(column, &width)| {
                let dashes = "-".repeat(width + 1);
                if column == 0 { format!("|:{dashes}") } else { format!("|{dashes}:") }
            });
            text.extend(dashes);
            text += "|\n";
        }
    }
    text
}

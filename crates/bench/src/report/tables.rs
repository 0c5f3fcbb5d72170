//! What reports show as tables.

use serde::Serialize;

use super::{number, percent};
use crate::compare::ab::signed_percent;
use crate::compare::{AbResult, FIGURES, Group, Spread, groups};
use crate::result::{ResultFile, RunResult};
use crate::summary::Summary;
use crate::target::Counters;

/// What stands where there is nothing.
pub(super) const NONE: &str = "–";

/// A table of text; the first columns name what a row is about, the others are figures.
#[derive(Debug, Serialize)]
pub(super) struct Table {
    pub(super) n_names: usize,
    pub(super) header: Vec<String>,
    pub(super) rows: Vec<Vec<String>>,
}

impl Table {
    fn new<'a>(n_names: usize, header: impl IntoIterator<Item = &'a str>) -> Self {
        let header = header.into_iter().map(str::to_owned).collect();
        Self { n_names, header, rows: vec![] }
    }

    /// Without the columns of figures that no row has.
    fn trimmed(mut self) -> Self {
        let is_kept: Vec<bool> = (0..self.header.len())
            .map(|idx| idx < self.n_names || self.rows.iter().any(|row| row[idx] != NONE))
            .collect();
        let trim = |row: &mut Vec<String>| {
            let mut is_kept = is_kept.iter();
            row.retain(|_| is_kept.next().copied().unwrap_or_default());
        };
        trim(&mut self.header);
        self.rows.iter_mut().for_each(trim);
        self
    }
}

fn or_none(text: Option<String>) -> String {
    text.unwrap_or_else(|| NONE.to_owned())
}

/// A median with its range, where there is one.
pub(super) fn with_range(spread: &Spread) -> String {
    let median = number(spread.median);
    if spread.n == 1 {
        return median;
    }
    format!("{median} ({}–{})", number(spread.min), number(spread.max))
}

/// A row for each setting and server: medians over repeats, and the range of the throughput.
pub(super) fn summary(file: &ResultFile) -> Table {
    let figures = FIGURES.iter().map(|figure| figure.short);
    let header = ["setting", "server"].into_iter().chain(figures).chain(["repeats", "failed"]);
    let mut table = Table::new(2, header);
    for group in groups(file.runs()) {
        let n_failed: u64 = group.runs.iter().flat_map(|run| run.metrics.failures.values()).sum();
        let mut row = vec![group.name.to_owned(), group.server.to_owned()];
        row.extend(FIGURES.iter().enumerate().map(|(idx, figure)| {
            let text = |spread: Spread| match idx {
                0 => with_range(&spread),
                _ => number(spread.median),
            };
            or_none(group.spread(figure.of).map(text))
        }));
        row.push(group.runs.len().to_string());
        row.push(if n_failed == 0 { NONE.to_owned() } else { n_failed.to_string() });
        table.rows.push(row);
    }
    table.trimmed()
}

/// What servers counted, over the repeats of each setting.
pub(super) fn counted(file: &ResultFile) -> Option<Table> {
    let header = [
        "setting",
        "server",
        "drafts",
        "acceptance by position",
        "decode steps",
        "prefill steps",
        "mixed steps",
        "preemptions",
        "cache hits",
        "indexer launches",
        "scored keys",
    ];
    let mut table = Table::new(2, header);
    for group in groups(file.runs()) {
        let Some(counters) = total(&group) else { continue };
        let count = |n: u64| if n == 0 { NONE.to_owned() } else { n.to_string() };
        let positions: Vec<String> = by_position(&counters).into_iter().map(percent).collect();
        table.rows.push(vec![
            group.name.to_owned(),
            group.server.to_owned(),
            count(counters.draft_tokens),
            if positions.is_empty() { NONE.to_owned() } else { positions.join(", ") },
            count(counters.decode_steps),
            count(counters.prefill_steps),
            count(counters.mixed_steps),
            count(counters.preemptions),
            or_none(share(counters.prefix_hit_tokens, counters.prefix_queried_tokens).map(percent)),
            count(counters.indexer_launches),
            count(counters.indexer_scored_keys),
        ]);
    }
    (!table.rows.is_empty()).then(|| table.trimmed())
}

/// The sum over repeats.
pub(super) fn total(group: &Group<'_>) -> Option<Counters> {
    let mut counted = group.runs.iter().filter_map(|run| run.counters.as_ref());
    let first = counted.next()?.clone();
    Some(counted.fold(first, |sum, counters| plus(&sum, counters)))
}

pub(super) fn plus(a: &Counters, b: &Counters) -> Counters {
    let each = |a: &[u64], b: &[u64]| -> Vec<u64> {
        let at = |of: &[u64], idx: usize| of.get(idx).copied().unwrap_or_default();
        (0..a.len().max(b.len())).map(|idx| at(a, idx) + at(b, idx)).collect()
    };
    Counters {
        verify_steps: a.verify_steps + b.verify_steps,
        draft_tokens: a.draft_tokens + b.draft_tokens,
        accepted_tokens: a.accepted_tokens + b.accepted_tokens,
        drafted_per_position: each(&a.drafted_per_position, &b.drafted_per_position),
        accepted_per_position: each(&a.accepted_per_position, &b.accepted_per_position),
        decode_steps: a.decode_steps + b.decode_steps,
        prefill_steps: a.prefill_steps + b.prefill_steps,
        mixed_steps: a.mixed_steps + b.mixed_steps,
        preemptions: a.preemptions + b.preemptions,
        prefix_queried_tokens: a.prefix_queried_tokens + b.prefix_queried_tokens,
        prefix_hit_tokens: a.prefix_hit_tokens + b.prefix_hit_tokens,
        indexer_launches: a.indexer_launches + b.indexer_launches,
        indexer_scored_keys: a.indexer_scored_keys + b.indexer_scored_keys,
    }
}

/// Share of the drafts at each position that were accepted.
pub(super) fn by_position(counters: &Counters) -> Vec<f64> {
    let pairs = counters.accepted_per_position.iter().zip(&counters.drafted_per_position);
    pairs.map_while(|(accepted, drafted)| share(*accepted, *drafted)).collect()
}

#[expect(clippy::cast_precision_loss, reason = "counts stay far below 2^52")]
fn share(part: u64, all: u64) -> Option<f64> {
    (all > 0).then(|| part as f64 / all as f64)
}

/// The figures of a pair of servers.
pub(super) fn pairs(ab: &AbResult) -> Table {
    let mut table = Table::new(1, ["figure", "change", "finding", &ab.a, &ab.b, "98 % interval"]);
    for row in &ab.rows {
        let interval = row
            .interval
            .map(|(low, high)| format!("{} to {}", signed_percent(low), signed_percent(high)));
        let finding = match (row.interval, row.is_above_noise) {
            (None, _) => "too few pairs",
            (_, true) => "above the noise",
            (_, false) => "noise",
        };
        table.rows.push(vec![
            format!("{} ({})", row.figure, row.unit),
            signed_percent(row.ratio),
            finding.to_owned(),
            with_range(&row.a),
            with_range(&row.b),
            or_none(interval),
        ]);
    }
    table
}

/// Every distribution of a run.
pub(super) fn distributions(run: &RunResult) -> Table {
    let header = ["distribution", "mean", "std", "min", "p50", "p90", "p95", "p99", "max", "n"];
    let metrics = &run.metrics;
    let all = [
        ("TTFT (ms)", metrics.ttft_ms),
        ("TPOT (ms)", metrics.tpot_ms),
        ("ITL per token (ms)", metrics.itl_token_ms),
        ("ITL per message (ms)", metrics.itl_message_ms),
        ("E2EL (ms)", metrics.e2el_ms),
        ("batch (ms)", run.batch_ms),
        ("tokens per message", metrics.tokens_per_message),
        ("send lag (ms)", metrics.send_lag_ms),
    ];
    let mut table = Table::new(1, header);
    for (name, summary) in all {
        let Some(Summary { n, mean, std, min, p50, p90, p95, p99, max }) = summary else {
            continue;
        };
        let figures = [mean, std, min, p50, p90, p95, p99, max].map(number);
        let row = std::iter::once(name.to_owned()).chain(figures);
        table.rows.push(row.chain([n.to_string()]).collect());
    }
    table
}

/// The single figures of a run.
pub(super) fn figures(run: &RunResult) -> Vec<(String, String)> {
    let metrics = &run.metrics;
    let mut figures = vec![];
    let mut add = |name: &str, value: String| figures.push((name.to_owned(), value));
    add("requests", metrics.n_requests.to_string());
    add("completed", metrics.n_completed.to_string());
    for (class, n) in &metrics.failures {
        add(&format!("failed: {class}"), n.to_string());
    }
    add("cut short", metrics.n_cut.to_string());
    add("prompt tokens", metrics.n_prompt_tokens.to_string());
    add("output tokens", metrics.n_output_tokens.to_string());
    add("duration (s)", number(metrics.duration_s));
    add("mean concurrency", number(metrics.mean_concurrency));
    add("requests/s", number(metrics.request_throughput));
    add("output tokens/s", number(metrics.output_throughput));
    add("peak output tokens/s", number(metrics.peak_output_throughput));
    add("prompt and output tokens/s", number(metrics.total_throughput));
    if let Some(goodput) = metrics.goodput {
        add("goodput (requests/s)", number(goodput));
    }
    add("warm-up requests", run.n_warmup.to_string());
    add("seed", run.seed.to_string());
    let machine = &run.machine;
    for (when, window) in [("before", &machine.before), ("during", &machine.during)] {
        let shares = format!(
            "server {}, generator {}, others {}; load average {:.2}",
            percent(window.server),
            percent(window.generator),
            percent(window.others),
            window.load_average
        );
        add(&format!("processors {when}"), shares);
    }
    if let Some(mhz) = machine.during.mhz {
        add("processor frequency (MHz)", format!("{:.0} to {:.0}", mhz.min, mhz.max));
    }
    if let Some(generator) = &run.generator {
        add("generator (processors)", number(generator.cpus));
    }
    figures
}

//! The table.

use std::fmt::Write;

use clap::ValueEnum;

use crate::Args;
use crate::measure::Run;

/// A column: its title, digits behind the point, and its value of a run.
type Column = (&'static str, usize, fn(&Run) -> f64);

const COLUMNS: [Column; 9] = [
    ("output tokens/s", 0, |run| run.tokens_per_s),
    ("mean TPOT, ms", 3, |run| run.mean_tpot_ms),
    ("acceptance length", 3, |run| run.acceptance_length),
    ("acceptance rate, %", 2, |run| 100.0 * run.acceptance_rate),
    ("indexer launches", 0, |run| run.launches[0] as f64),
    ("launches of drafts", 0, |run| run.launches[1] as f64),
    ("scored keys", 0, |run| run.scored_keys[0] as f64),
    ("scored keys of drafts", 0, |run| run.scored_keys[1] as f64),
    ("launches per propose", 2, |run| run.launches_per_propose),
];

/// Smallest, middle and largest of some runs.
#[derive(Clone, Copy)]
struct Spread {
    min: f64,
    median: f64,
    max: f64,
}

impl Spread {
    fn of(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        let n = values.len();
        let median = f64::midpoint(values[(n - 1) / 2], values[n / 2]);
        Self { min: values[0], median, max: values[n - 1] }
    }

    fn overlaps(self, other: Self) -> bool {
        self.min <= other.max && other.min <= self.max
    }

    fn show(self, digits: usize) -> String {
        let Self { min, median, max } = self;
        if !median.is_finite() {
            return "0 / 0".to_owned();
        }
        if min == max {
            return format!("**{median:.digits$}**");
        }
        format!("{min:.digits$} / **{median:.digits$}** / {max:.digits$}")
    }
}

/// What was run, and the head of the table.
pub(crate) fn header(args: &Args) -> String {
    let Args { repeats, output_len, concurrency, k, dtype, threads, .. } = args;
    let dtype = dtype.to_possible_value().map(|value| value.get_name().to_owned());
    let dtype = dtype.unwrap_or_default();
    let threads = threads.map_or_else(|| "one a core".to_owned(), |n| n.to_string());
    let mut text = format!(
        "tiny-glm52, {dtype}, k = {k}, {concurrency} concurrent requests, {output_len} output \
         tokens each, threads: {threads}, repeats: {repeats}; minimum / **median** / maximum, or \
         one number where all are equal\n\n| input tokens | sharing |"
    );
    COLUMNS.iter().for_each(|(title, ..)| text += &format!(" {title} |"));
    text += "\n|---|---|";
    COLUMNS.iter().for_each(|_| text += "---|");
    text
}

/// The rows of one length: off, on, and on as a multiple of off.
pub(crate) fn rows(length: usize, [off, on]: &[Vec<Run>; 2]) -> String {
    let mut lines = ["off", "on", "on / off"].map(|setting| format!("| {length} | {setting} |"));
    for (_, digits, value) in COLUMNS {
        let values = |runs: &[Run]| runs.iter().map(value).collect::<Vec<_>>();
        let spreads = [off, on].map(|runs| Spread::of(values(runs)));
        // Each run on against the run off right before it: slow drifts cancel.
        let ratios = values(off).iter().zip(values(on)).map(|(off, on)| on / off).collect();
        let is_noise = spreads[0].overlaps(spreads[1]);
        let verdict = if is_noise { "within the noise" } else { "above the noise" };
        let [off, on] = spreads.map(|spread| spread.show(digits));
        let cells = [off, on, format!("{}, {verdict}", Spread::of(ratios).show(3))];
        for (line, cell) in lines.iter_mut().zip(cells) {
            write!(line, " {cell} |").expect("a string takes everything");
        }
    }
    lines.join("\n") + "\n"
}

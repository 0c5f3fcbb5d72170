//! The table.

use std::fmt::Write;

use clap::ValueEnum;

use crate::Args;
use crate::measure::Run;

/// A column: its title, digits behind the point, and its value of a run.
struct Column {
    title: String,
    digits: usize,
    value: Box<dyn Fn(&Run) -> f64>,
}

fn columns(k: u32) -> Vec<Column> {
    let column = |title: &str, digits, value: fn(&Run) -> f64| Column {
        title: title.to_owned(),
        digits,
        value: Box::new(value),
    };
    let mut columns = vec![
        column("output tokens/s", 0, |run| run.tokens_per_s),
        column("mean TPOT, ms", 3, |run| run.mean_tpot_ms),
        column("acceptance length", 3, |run| run.acceptance_length),
        column("acceptance rate, %", 2, |run| 100.0 * run.acceptance_rate),
    ];
    columns.extend((0..k as usize).map(|idx| Column {
        title: format!("of draft {}, %", idx + 1),
        digits: 2,
        value: Box::new(move |run| 100.0 * run.rate_at[idx]),
    }));
    columns.extend([
        column("indexer launches", 0, |run| run.launches[0] as f64),
        column("launches of drafts", 0, |run| run.launches[1] as f64),
        column("scored keys", 0, |run| run.scored_keys[0] as f64),
        column("scored keys of drafts", 0, |run| run.scored_keys[1] as f64),
        column("launches per propose", 2, |run| run.launches_per_propose),
    ]);
    columns
}

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
    let columns = columns(*k);
    columns.iter().for_each(|column| text += &format!(" {} |", column.title));
    text += "\n|---|---|";
    columns.iter().for_each(|_| text += "---|");
    text
}

/// The rows of one length: off, on, and on as a multiple of off.
pub(crate) fn rows(length: usize, k: u32, [off, on]: &[Vec<Run>; 2]) -> String {
    let mut lines = ["off", "on", "on / off"].map(|setting| format!("| {length} | {setting} |"));
    for Column { digits, value, .. } in columns(k) {
        let values = |runs: &[Run]| runs.iter().map(&value).collect::<Vec<_>>();
        let spreads = [off, on].map(|runs| Spread::of(values(runs)));
        // Each run on against the run off right before it: slow drifts cancel.
        let ratios = values(off).iter().zip(values(on)).map(|(off, on)| on / off).collect();
        let verdict = match () {
            () if off.len() == 1 => "one run each",
            () if spreads[0].overlaps(spreads[1]) => "within the noise",
            () => "above the noise",
        };
        let [off, on] = spreads.map(|spread| spread.show(digits));
        let cells = [off, on, format!("{}, {verdict}", Spread::of(ratios).show(3))];
        for (line, cell) in lines.iter_mut().zip(cells) {
            write!(line, " {cell} |").expect("a string takes everything");
        }
    }
    lines.join("\n") + "\n"
}

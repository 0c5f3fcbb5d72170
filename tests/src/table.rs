//! Markdown tables that compare runs with something off and on.

use std::fmt::Write;

/// A column: its title, digits behind the point, and its value of a run.
pub struct Column<R> {
    title: String,
    digits: usize,
    value: Box<dyn Fn(&R) -> f64>,
}

impl<R> Column<R> {
    /// A column.
    pub fn new(title: &str, digits: usize, value: impl Fn(&R) -> f64 + 'static) -> Self {
        Self { title: title.to_owned(), digits, value: Box::new(value) }
    }
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
        Self { min: values[0], median: median(&values), max: values[n - 1] }
    }

    fn overlaps(self, other: Self) -> bool {
        self.min <= other.max && other.min <= self.max
    }

    fn show(self, digits: usize) -> String {
        let Self { min, median, max } = self;
        if median.is_nan() {
            return "0 / 0".to_owned();
        }
        if median.is_infinite() {
            return "from 0 on".to_owned();
        }
        if min == max {
            return format!("**{median:.digits$}**");
        }
        format!("{min:.digits$} / **{median:.digits$}** / {max:.digits$}")
    }
}

/// The middle of `sorted` values.
///
/// # Panics
///
/// If there are none.
#[must_use]
pub fn median(sorted: &[f64]) -> f64 {
    let n = sorted.len();
    f64::midpoint(sorted[(n - 1) / 2], sorted[n / 2])
}

/// How to read a cell.
pub const LEGEND: &str = "minimum / **median** / maximum, or one number where all are equal";

/// The head of a table whose first columns are `labels`.
#[must_use]
pub fn head<R>(labels: &[&str], columns: &[Column<R>]) -> String {
    let titles = columns.iter().map(|column| column.title.as_str());
    let (mut names, mut rule) = ("|".to_owned(), "|".to_owned());
    for title in labels.iter().copied().chain(titles) {
        write!(names, " {title} |").expect("a string takes everything");
        rule += "---|";
    }
    format!("{names}\n{rule}")
}

/// Three rows: off, on, and on as a multiple of off, in the last of the label columns. `before` are
/// the cells before it, each with its end.
#[must_use]
pub fn rows<R>(before: &str, columns: &[Column<R>], [off, on]: &[Vec<R>; 2]) -> String {
    let mut lines = ["off", "on", "on / off"].map(|setting| format!("|{before} {setting} |"));
    for Column { digits, value, .. } in columns {
        let values = |runs: &[R]| runs.iter().map(value).collect::<Vec<_>>();
        let spreads = [off, on].map(|runs| Spread::of(values(runs)));
        // Each run on against the run off right before it: slow drifts cancel.
        let ratios = values(off).iter().zip(values(on)).map(|(off, on)| on / off).collect();
        let verdict = match () {
            () if off.len() == 1 => "one run each",
            () if spreads[0].overlaps(spreads[1]) => "within the noise",
            () => "above the noise",
        };
        let [off, on] = spreads.map(|spread| spread.show(*digits));
        let cells = [off, on, format!("{}, {verdict}", Spread::of(ratios).show(3))];
        for (line, cell) in lines.iter_mut().zip(cells) {
            write!(line, " {cell} |").expect("a string takes everything");
        }
    }
    lines.join("\n") + "\n"
}

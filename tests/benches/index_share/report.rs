//! The table.

use integration_tests::table::{self, Column, LEGEND};

use crate::Args;
use crate::measure::Run;

fn columns(k: u32) -> Vec<Column<Run>> {
    let column = |title: &str, digits, value: fn(&Run) -> f64| Column::new(title, digits, value);
    let mut columns = vec![
        column("output tokens/s", 0, |run| run.tokens_per_s),
        column("mean TPOT, ms", 3, |run| run.mean_tpot_ms),
        column("acceptance length", 3, |run| run.acceptance_length),
        column("acceptance rate, %", 2, |run| 100.0 * run.acceptance_rate),
    ];
    columns.extend((0..k as usize).map(|idx| {
        let title = format!("of draft {}, %", idx + 1);
        Column::new(&title, 2, move |run: &Run| 100.0 * run.rate_at[idx])
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

/// What was run, and the head of the table.
pub(crate) fn header(args: &Args) -> String {
    let Args { output_len, concurrency, options, .. } = args;
    let head = table::head(&["input tokens", "sharing"], &columns(options.k));
    format!(
        "tiny-glm52, {}: {concurrency} concurrent requests, {output_len} output tokens each; \
         {LEGEND}\n\n{head}",
        options.describe()
    )
}

/// The rows of one length.
pub(crate) fn rows(length: usize, k: u32, runs: &[Vec<Run>; 2]) -> String {
    table::rows(&format!(" {length} |"), &columns(k), runs)
}

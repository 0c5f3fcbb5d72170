//! Results as Markdown: aligned tables that read well as plain text too.

use std::fmt::Write as _;

use super::tables::{self, Table, with_range};
use super::{percent, warnings};
use crate::compare::ab::signed_percent;
use crate::compare::{Comparison, Finding};
use crate::result::ResultFile;

/// The warnings, what pairs say, and a row for each setting and server.
#[must_use]
pub fn markdown(file: &ResultFile) -> String {
    let provenance = file.provenance();
    let mut text = format!("# {}\n\n", escape(file.title()));
    for warning in warnings(file) {
        push(&mut text, format_args!("> **{}.** {}\n>\n", warning.title, escape(&warning.text)));
    }
    if text.ends_with("\n>\n") {
        text.truncate(text.len() - 2);
        text.push('\n');
    }
    for ab in file.ab() {
        push(&mut text, format_args!("**{}**: {}\n\n", escape(&ab.name), escape(&ab.sentence)));
        text.push_str(&table(&tables::pairs(ab)));
        text.push('\n');
    }
    text.push_str(&table(&tables::summary(file)));
    if let Some(counted) = tables::counted(file) {
        text.push('\n');
        text.push_str(&table(&counted));
    }
    let (source, host) = (provenance.bench.source.to_string(), provenance.host.to_string());
    push(
        &mut text,
        format_args!(
            "\nMeasured {} by commit {} on {}. Medians over repeats; latencies in milliseconds.\n",
            provenance.started_at,
            escape(&source),
            escape(&host)
        ),
    );
    let generators = || file.runs().iter().filter_map(|run| run.generator.as_ref());
    if let Some(cpus) = generators().map(|of| of.cpus).max_by(f64::total_cmp) {
        let share = percent(cpus);
        push(&mut text, format_args!("The generator used {share} of one processor at most.\n"));
    }
    text
}

/// Ratios, what they mean, and what fails a build.
#[must_use]
pub fn comparison_markdown(comparison: &Comparison) -> String {
    let mut text = String::new();
    for differs in &comparison.forced {
        push(&mut text, format_args!("> **Not the same.** {}\n", escape(differs)));
    }
    for caution in &comparison.cautions {
        push(&mut text, format_args!("> {}\n", escape(caution)));
    }
    for setting in &comparison.settings {
        let (a, b) = &setting.servers;
        let server = if a == b { a.clone() } else { format!("{a}, then {b}") };
        push(&mut text, format_args!("\n**{}**, {}\n\n", escape(&setting.name), escape(&server)));
        let header = ["figure", "first", "second", "change", "finding"].map(str::to_owned).to_vec();
        let rows = setting.rows.iter().map(|row| {
            let finding = match row.finding {
                Finding::Noise => "noise",
                Finding::Better => "better",
                Finding::Worse => "worse",
            };
            vec![
                format!("{} ({})", row.figure, row.unit),
                with_range(&row.a),
                with_range(&row.b),
                if row.ratio.is_finite() { signed_percent(row.ratio) } else { tables::NONE.into() },
                finding.to_owned(),
            ]
        });
        text.push_str(&table(&Table { n_names: 1, header, rows: rows.collect() }));
    }
    let regressions = comparison.regressions();
    if regressions.is_empty() {
        text.push_str("\nNo regression.\n");
    }
    for regression in regressions {
        push(&mut text, format_args!("\n**Regression**: {}\n", escape(&regression)));
    }
    text
}

fn push(text: &mut String, arguments: std::fmt::Arguments<'_>) {
    text.write_fmt(arguments).expect("a string takes any text");
}

/// Text without what Markdown or HTML would read as markup.
fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\n' | '\r' => escaped.push(' '),
            '<' => escaped.push_str("&lt;"),
            '&' => escaped.push_str("&amp;"),
            '|' | '*' | '`' | '[' | ']' | '\\' => escaped.extend(['\\', c]),
            _ => escaped.push(c),
        }
    }
    escaped
}

/// Columns of one width each, figures to the right.
fn table(table: &Table) -> String {
    let cells = |row: &[String]| row.iter().map(|cell| escape(cell)).collect::<Vec<_>>();
    let rows: Vec<Vec<String>> =
        std::iter::once(&table.header).chain(&table.rows).map(|row| cells(row)).collect();
    let width = |column: usize| {
        let widths = rows.iter().map(|row| row[column].chars().count());
        widths.max().unwrap_or_default().max(3)
    };
    let widths: Vec<usize> = (0..table.header.len()).map(width).collect();
    let mut text = String::new();
    for (idx, row) in rows.iter().enumerate() {
        for (column, (cell, &width)) in row.iter().zip(&widths).enumerate() {
            if column < table.n_names {
                push(&mut text, format_args!("| {cell:<width$} "));
            } else {
                push(&mut text, format_args!("| {cell:>width$} "));
            }
        }
        text.push_str("|\n");
        if idx == 0 {
            for (column, &width) in widths.iter().enumerate() {
                let dashes = "-".repeat(width + 1);
                let (left, right) = if column < table.n_names { (":", "") } else { ("", ":") };
                push(&mut text, format_args!("|{left}{dashes}{right}"));
            }
            text.push_str("|\n");
        }
    }
    text
}

//! Findings as text: for the terminal and for `MUTANTS.md`.

use anyhow::{Context, Result};

use super::list::Fault;
use super::trial::{Finding, Verdict};

const BEGIN: &str = "<!-- The table is written by `cargo xtask mutants --write`. -->";
const END: &str = "<!-- Here it ends. -->";

/// One finding on one line.
pub(super) fn line(finding: &Finding) -> String {
    let (by, message) = outcome(finding);
    let Fault { name, file, .. } = finding.fault;
    format!("{name:<30} {file:<32} {:>5.1} s  {by}: {message}", finding.time.as_secs_f64())
}

/// By what a fault was killed, or what else came of it; and what was said.
fn outcome(finding: &Finding) -> (String, String) {
    match (&finding.verdict, &finding.fault.equivalent) {
        (Verdict::Killed { by, message }, _) => (by.clone(), message.clone()),
        (Verdict::Survived, Some(reason)) => ("equivalent".to_owned(), reason.clone()),
        (Verdict::Survived, None) => ("SURVIVED".to_owned(), String::new()),
        (Verdict::NotCompiled(error), _) => ("NOT COMPILED".to_owned(), error.clone()),
    }
}

/// What was found, in one sentence.
pub(super) fn summary(findings: &[Finding], n_seeds: u64) -> String {
    let count = |is: fn(&Finding) -> bool| findings.iter().filter(|f| is(f)).count();
    let by_seed = count(|f| matches!(&f.verdict, Verdict::Killed { by, .. } if !is_test(by)));
    let by_test = count(|f| matches!(&f.verdict, Verdict::Killed { by, .. } if is_test(by)));
    let n_equivalent = count(|f| f.problem().is_none() && f.verdict == Verdict::Survived);
    format!(
        "{} faults: {by_seed} killed by {n_seeds} seeds of the simulation, {by_test} by a unit \
         test, {n_equivalent} equivalent.",
        findings.len()
    )
}

fn is_test(by: &str) -> bool {
    by.starts_with("test ")
}

/// `document` with the table of `findings` in place of the one that it has.
pub(super) fn written(document: &str, findings: &[Finding], n_seeds: u64) -> Result<String> {
    let (before, _, after) = parts(document)?;
    let mut table = format!("{}\n\n", summary(findings, n_seeds));
    table.push_str("| fault | in | killed by | first message |\n|---|---|---|---|\n");
    for finding in findings {
        let (by, message) = outcome(finding);
        let message = message.replace('|', "\\|");
        table.push_str(&format!("{} {by} | {message} |\n", row_start(finding.fault)));
    }
    Ok(format!("{before}{BEGIN}\n\n{table}\n{END}{after}"))
}

/// In what the table of `document` differs from the list.
pub(super) fn differences(document: &str, faults: &[Fault]) -> Result<Vec<String>> {
    let (_, table, _) = parts(document)?;
    let rows: Vec<&str> = table.lines().filter(|line| line.starts_with("| `")).collect();
    let starts: Vec<String> = faults.iter().map(row_start).collect();
    let missing = starts.iter().zip(faults).filter(|(start, _)| {
        let n = rows.iter().filter(|row| row.starts_with(start.as_str())).count();
        n != 1
    });
    let mut differences: Vec<String> = missing
        .map(|(_, fault)| format!("`{}` of {} has no row of its own", fault.name, fault.file))
        .collect();
    let unknown = rows.iter().filter(|row| !starts.iter().any(|start| row.starts_with(start)));
    differences.extend(unknown.map(|row| format!("no fault is that of the row {row}")));
    Ok(differences)
}

/// How the row of a fault begins.
fn row_start(fault: &Fault) -> String {
    format!("| `{}` | `{}` |", fault.name, fault.file)
}

/// What stands before, in and after the written part of a document.
fn parts(document: &str) -> Result<(&str, &str, &str)> {
    let (before, rest) = document.split_once(BEGIN).with_context(|| format!("no `{BEGIN}`"))?;
    let (table, after) = rest.split_once(END).with_context(|| format!("no `{END}`"))?;
    Ok((before, table, after))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const LIST: &str = "a | c/src/f.rs | x | y\nb | c/src/g.rs | x | y | c::t\n\
                        d | c/src/f.rs | x | z | | equivalent: the same\n";

    fn findings(faults: &[Fault]) -> Vec<Finding<'_>> {
        let killed = |by: &str| Verdict::Killed { by: by.into(), message: "a || b".into() };
        let verdicts = [killed("seed 3"), killed("test `c::t`"), Verdict::Survived];
        let time = Duration::from_millis(1500);
        let pairs = faults.iter().zip(verdicts);
        pairs.map(|(fault, verdict)| Finding { fault, verdict, time }).collect()
    }

    #[test]
    fn the_table_is_replaced_and_the_rest_is_kept() {
        let faults = super::super::list::parse(LIST).unwrap();
        let document = format!("# Title\n\n{BEGIN}\nold\n{END}\n\nA remark.\n");
        let text = written(&document, &findings(&faults), 2000).unwrap();
        let table = "3 faults: 1 killed by 2000 seeds of the simulation, 1 by a unit test, \
                     1 equivalent.\n\n\
                     | fault | in | killed by | first message |\n|---|---|---|---|\n\
                     | `a` | `c/src/f.rs` | seed 3 | a \\|\\| b |\n\
                     | `b` | `c/src/g.rs` | test `c::t` | a \\|\\| b |\n\
                     | `d` | `c/src/f.rs` | equivalent | the same |\n";
        assert_eq!(text, format!("# Title\n\n{BEGIN}\n\n{table}\n{END}\n\nA remark.\n"));
        assert_eq!(written(&text, &findings(&faults), 2000).unwrap(), text);
        assert_eq!(differences(&text, &faults).unwrap(), Vec::<String>::new());
        assert!(written("# Title\n", &findings(&faults), 2000).is_err());
    }

    #[test]
    fn list_and_table_cannot_drift_apart() {
        let faults = super::super::list::parse(LIST).unwrap();
        let document = format!("{BEGIN}\n{END}");
        let text = written(&document, &findings(&faults), 1).unwrap();
        let less = differences(&text, &faults[1..]).unwrap();
        assert_eq!(less.len(), 1);
        assert!(less[0].contains("the row | `a` |"), "{less:?}");
        let moved = super::super::list::parse(&LIST.replace("c/src/g.rs", "c/src/h.rs")).unwrap();
        let moved = differences(&text, &moved).unwrap();
        assert_eq!(moved.len(), 2);
        assert_eq!(moved[0], "`b` of c/src/h.rs has no row of its own");
    }

    #[test]
    fn a_line_has_what_matters() {
        let faults = super::super::list::parse(LIST).unwrap();
        let findings = findings(&faults);
        let words: Vec<_> = line(&findings[0]).split_whitespace().map(str::to_owned).collect();
        assert_eq!(words.join(" "), "a c/src/f.rs 1.5 s seed 3: a || b");
    }
}

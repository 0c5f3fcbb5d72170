//! Counts of what calls came to.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use serde_json::{Value, json};

use crate::answer::Repeated;

/// How many unexpected ends are kept to be shown.
const SHOWN_MAX: usize = 20;

/// What calls came to, by what they set out to do.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    counts: BTreeMap<(&'static str, &'static str), u64>,
    n_unexpected: u64,
    unexpected: Vec<String>,
    pub(crate) n_tokens: u64,
    /// Answers compared with an earlier one of the same request.
    pub(crate) n_compared: u64,
    pub(crate) repeated: Repeated,
}

impl Tally {
    /// Counts a call; an error says what is wrong with it.
    pub(crate) fn count(&mut self, what: &'static str, outcome: Result<&'static str, String>) {
        let outcome = outcome.unwrap_or_else(|message| {
            self.n_unexpected += 1;
            if self.unexpected.len() < SHOWN_MAX {
                self.unexpected.push(format!("{what}: {message}"));
            }
            "unexpected"
        });
        *self.counts.entry((what, outcome)).or_default() += 1;
    }

    pub(crate) fn n_unexpected(&self) -> u64 {
        self.n_unexpected
    }

    pub(crate) fn n_outcomes(&self) -> u64 {
        self.counts.values().sum()
    }

    /// A Markdown table, and the first unexpected ends.
    pub(crate) fn table(&self) -> String {
        let outcomes: BTreeSet<_> = self.counts.keys().map(|(_, outcome)| *outcome).collect();
        let scenarios: BTreeSet<_> = self.counts.keys().map(|(what, _)| *what).collect();
        let mut table = "| calls |".to_owned();
        for outcome in &outcomes {
            let _ = write!(table, " {outcome} |");
        }
        let _ = write!(table, " all |\n|---|{}---:|", "---:|".repeat(outcomes.len()));
        for what in scenarios {
            let _ = write!(table, "\n| {what} |");
            let mut n_all = 0;
            for outcome in &outcomes {
                let n = self.counts.get(&(what, *outcome)).copied().unwrap_or(0);
                n_all += n;
                let cell = if n == 0 { String::new() } else { n.to_string() };
                let _ = write!(table, " {cell} |");
            }
            let _ = write!(table, " {n_all} |");
        }
        for message in &self.unexpected {
            let _ = write!(table, "\nunexpected: {message}");
        }
        table.push('\n');
        table
    }

    pub(crate) fn json(&self) -> Value {
        let mut calls = BTreeMap::<_, BTreeMap<_, _>>::new();
        for ((what, outcome), n) in &self.counts {
            calls.entry(*what).or_default().insert(*outcome, *n);
        }
        json!({
            "calls": calls,
            "unexpected": self.unexpected,
            "tokens": self.n_tokens,
            "compared": self.n_compared,
        })
    }
}

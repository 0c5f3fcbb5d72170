//! Lists of names of modules, as quantisation tools write them.

use std::collections::BTreeSet;

use fancy_regex::Regex;
use globset::{Glob, GlobSet, GlobSetBuilder};

/// Marks an entry as a regular expression, in Python's syntax, for the beginning of a name.
const REGEX_MARK: &str = "re:";

/// Modules that engines fuse, by the end of the parts' names; tools exclude them by either name.
const FUSED: &[(&str, &str)] = &[
    ("gate_proj", "gate_up_proj"),
    ("up_proj", "gate_up_proj"),
    ("q_proj", "qkv_proj"),
    ("k_proj", "qkv_proj"),
    ("v_proj", "qkv_proj"),
    ("q_a_proj", "fused_qkv_a_proj"),
    ("kv_a_proj_with_mqa", "fused_qkv_a_proj"),
    ("q_a_proj", "fused_qkv_a_proj_with_mqa"),
    ("kv_a_proj_with_mqa", "fused_qkv_a_proj_with_mqa"),
    ("indexer.wk", "indexer.wk_weights_proj"),
    ("indexer.weights_proj", "indexer.wk_weights_proj"),
    // GLM's checkpoints say so of what their files call the other.
    ("indexer.weights_proj", "indexers_proj"),
];

/// The names that a tensor can be meant by: its own, its module's, and those of fused modules.
pub(super) fn names_of(tensor: &str) -> Vec<String> {
    let module = tensor.rsplit_once('.').map_or(tensor, |(module, _)| module);
    let fused = FUSED.iter().filter_map(|(part, fused)| {
        let around = module.strip_suffix(part)?;
        (around.is_empty() || around.ends_with('.')).then(|| format!("{around}{fused}"))
    });
    [tensor.to_owned(), module.to_owned()].into_iter().chain(fused).collect()
}

/// Entries of which each is an exact name, the name of a module around it, a glob (`*`, `?`,
/// `[...]`), or `re:` and a regular expression.
#[derive(Clone, Debug, Default)]
pub(super) struct NamePatterns {
    entries: Vec<String>,
    /// Entries without anything special in them; there can be thousands.
    plain: BTreeSet<String>,
    globs: GlobSet,
    /// The entries that the globs are of.
    glob_entries: Vec<usize>,
    regexes: Vec<(usize, Regex)>,
}

impl PartialEq for NamePatterns {
    fn eq(&self, other: &Self) -> bool {
        self.entries == other.entries
    }
}

impl NamePatterns {
    /// Reads entries; what is wrong with one of them is the error.
    pub(super) fn new(entries: Vec<String>) -> Result<Self, String> {
        let mut patterns = Self::default();
        let mut globs = GlobSetBuilder::new();
        let unusable = |entry: &str, error: String| format!("has the entry `{entry}`: {error}");
        for (idx, entry) in entries.iter().enumerate() {
            if let Some(expression) = entry.strip_prefix(REGEX_MARK) {
                let regex = Regex::new(&format!("^(?:{expression})"))
                    .map_err(|error| unusable(entry, error.to_string()))?;
                patterns.regexes.push((idx, regex));
            } else if entry.contains(['*', '?', '[']) {
                globs.add(Glob::new(entry).map_err(|error| unusable(entry, error.to_string()))?);
                patterns.glob_entries.push(idx);
            } else {
                patterns.plain.insert(entry.trim_end_matches('.').to_owned());
            }
        }
        patterns.globs = globs.build().map_err(|error| format!("is unusable: {error}"))?;
        patterns.entries = entries;
        Ok(patterns)
    }

    /// The entry that covers one of the names of a tensor.
    pub(super) fn find(&self, names: &[String]) -> Option<&str> {
        names.iter().find_map(|name| {
            let plain = around(name).find_map(|name| self.plain.get(name));
            plain.map(String::as_str).or_else(|| self.find_pattern(name))
        })
    }

    fn find_pattern(&self, name: &str) -> Option<&str> {
        let glob = self.globs.matches(name).first().map(|&idx| self.glob_entries[idx]);
        // An expression that takes too long on a name does not match it.
        let matches = |regex: &Regex| regex.is_match(name).unwrap_or(false);
        let regex = || self.regexes.iter().find(|(_, regex)| matches(regex)).map(|(idx, _)| *idx);
        glob.or_else(regex).map(|idx| self.entries[idx].as_str())
    }
}

/// A name and the modules around it, innermost first.
fn around(name: &str) -> impl Iterator<Item = &str> {
    std::iter::successors(Some(name), |name| name.rsplit_once('.').map(|(outer, _)| outer))
}

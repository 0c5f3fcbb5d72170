//! The table of all settings.

use std::fmt::Write as _;

use crate::tree::{self, Key};

/// Every key with its default and its help: a Markdown table for each section.
pub fn reference() -> String {
    let mut text = String::new();
    let mut section = String::new();
    for key in tree::keys() {
        if key.section != section {
            let gap = if section.is_empty() { "" } else { "\n" };
            section.clone_from(&key.section);
            let head = "| key | default | meaning |\n|---|---|---|\n";
            let _ = write!(text, "{gap}### `[{section}]`\n\n{head}");
        }
        let (default, help) = described(&key);
        let _ = writeln!(text, "| `{}` | {default} | {help} |", key.name);
    }
    text
}

/// The default and the help. A default that is no value is said at the end of the help.
fn described(key: &Key) -> (String, String) {
    let help = key.arg.get_help().map(ToString::to_string).unwrap_or_default();
    let (mut help, default) = match help.rsplit_once(" [default: ") {
        Some((help, default)) => (help.to_owned(), default.trim_end_matches(']').to_owned()),
        None if key.is_switch() => (help, "`false`".to_owned()),
        None => {
            let values = key.arg.get_default_values().iter().map(|value| value.to_string_lossy());
            let values: Vec<_> = values.map(|value| format!("`{value}`")).collect();
            (help, values.join(", "))
        }
    };
    let choices = if key.is_switch() { vec![] } else { key.arg.get_possible_values() };
    if !choices.is_empty() {
        let choices: Vec<_> =
            choices.iter().map(|choice| format!("`{}`", choice.get_name())).collect();
        let _ = write!(help, " ({})", choices.join(", "));
    }
    (default, help)
}

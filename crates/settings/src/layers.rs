//! File, environment and flags become one tree.
//!
//! The values of the file and of the environment are checked one by one and then stand among the
//! arguments as the flags that they stand for, so that each has one parser, one range, one default.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use clap::{ArgMatches, Command, Parser, parser::ValueSource};

use crate::SettingsError;
use crate::tree::{self, Key};

/// The command that all sections are for, and the section of the others.
const SERVE: &str = "serve";
const ENGINE: &str = "engine";

/// Names the file where no flag does.
const CONFIG_VARIABLE: &str = "TANDEM_CONFIG";

/// Where the values are from that are neither flags nor defaults.
#[derive(Clone, Debug, Default)]
pub struct Sources(BTreeMap<String, String>);

impl Sources {
    /// A flag as an error names it, behind it the place that its value is from.
    pub(crate) fn name(&self, flag: &str, value: impl std::fmt::Display) -> String {
        match self.0.get(flag.trim_start_matches("--")) {
            Some(place) => format!("{flag} {value} ({place})"),
            None => format!("{flag} {value}"),
        }
    }
}

/// A value and the place that it is from, as an error names it.
struct Value {
    /// None if it is no single value.
    text: Option<OsString>,
    place: String,
}

/// Reads a command line, program name first, whose flags override `variables`, which override the
/// file that `--config` or, for `serve`, `TANDEM_CONFIG` names.
///
/// Another command than `serve` takes of both what is in `[engine]` and a flag of its own, or, if
/// it has no `--config`, nothing.
///
/// # Errors
///
/// The command line, with its own way to end the program; a file that cannot be read; and, all at
/// once, each key that does not exist and each value that its flag would not take, with the file or
/// the variable.
pub fn parse<C: Parser>(
    mut args: Vec<OsString>,
    variables: impl IntoIterator<Item = (OsString, OsString)>,
) -> Result<(C, Sources), SettingsError> {
    let command = C::command();
    let matches = command.clone().try_get_matches_from(&args)?;
    let mut sources = Sources::default();
    if let Some((name, given)) = matches.subcommand()
        && let Some(command) = command.find_subcommand(name)
        && command.get_arguments().any(|arg| arg.get_id() == "config")
    {
        let mut variables = relevant(variables);
        let named = variables.remove(CONFIG_VARIABLE).filter(|_| name == SERVE);
        let file = given.get_one("config").cloned().or(named.map(PathBuf::from));
        let values = read(file.as_deref(), variables)?;
        for (key, value) in values {
            if !(name == SERVE || key.section == ENGINE) || !is_open(command, given, &key.name) {
                continue;
            }
            let text = value.text.unwrap_or_default();
            args.splice(2..2, argument(&key, &text));
            sources.0.insert(key.name, value.place);
        }
    }
    Ok((C::try_parse_from(args)?, sources))
}

/// Whether a command has a flag that was not given.
fn is_open(command: &Command, given: &ArgMatches, flag: &str) -> bool {
    let arg = command.get_arguments().find(|arg| arg.get_long() == Some(flag));
    arg.is_some_and(|arg| {
        given.value_source(arg.get_id().as_str()) != Some(ValueSource::CommandLine)
    })
}

/// The variables of this program that say something.
fn relevant(
    variables: impl IntoIterator<Item = (OsString, OsString)>,
) -> BTreeMap<String, OsString> {
    let variables = variables.into_iter().filter(|(_, value)| !value.is_empty());
    let named = variables.filter_map(|(name, value)| Some((name.into_string().ok()?, value)));
    named.filter(|(name, _)| name.starts_with("TANDEM_")).collect()
}

/// What file and variables say of each key.
fn read(
    file: Option<&Path>,
    mut variables: BTreeMap<String, OsString>,
) -> Result<Vec<(Key, Value)>, SettingsError> {
    let mut table = file.map_or_else(|| Ok(toml::Table::new()), read_file)?;
    let file = file.map(|file| file.display().to_string()).unwrap_or_default();
    let (mut values, mut faults) = (Vec::new(), Vec::new());
    for key in tree::keys() {
        let section = table.get_mut(&key.section).and_then(toml::Value::as_table_mut);
        let value = section.and_then(|section| section.remove(&key.name));
        let in_file = value.map(|value| Value {
            text: to_text(&value),
            place: format!("{}.{} in {file}", key.section, key.name),
        });
        let variable = key.variable();
        let in_environment =
            variables.remove(&variable).map(|text| Value { text: Some(text), place: variable });
        for value in [&in_file, &in_environment].into_iter().flatten() {
            faults.extend(check(&key, value));
        }
        values.extend(in_environment.or(in_file).map(|value| (key, value)));
    }
    faults.extend(unknown_keys(&table, &file));
    faults.extend(variables.into_keys().map(|name| {
        format!("{name}: there is no such setting; correct the name or unset the variable")
    }));
    SettingsError::of_faults(faults).map(|()| values)
}

fn read_file(file: &Path) -> Result<toml::Table, SettingsError> {
    let text = std::fs::read_to_string(file)
        .map_err(|source| SettingsError::Unreadable { file: file.to_owned(), source })?;
    let parsed = text.parse();
    parsed.map_err(|source| SettingsError::NotToml { file: file.to_owned(), source })
}

/// A value of a file as its flag takes it; none if it is several.
fn to_text(value: &toml::Value) -> Option<OsString> {
    let text = match value {
        toml::Value::String(text) => text.clone(),
        toml::Value::Array(_) | toml::Value::Table(_) => return None,
        value => value.to_string(),
    };
    Some(text.into())
}

/// The flag with its value; a switch that is off is no flag.
fn argument(key: &Key, text: &OsStr) -> Option<OsString> {
    let mut argument = OsString::from(format!("--{}", key.name));
    if key.is_switch() {
        return (text == "true").then_some(argument);
    }
    argument.push("=");
    argument.push(text);
    Some(argument)
}

/// What the flag has against a value.
fn check(key: &Key, Value { text, place }: &Value) -> Option<String> {
    let Some(text) = text else { return Some(format!("{place}: give a single value")) };
    let shown = text.to_string_lossy();
    if key.is_switch() {
        let is_known = matches!(&*shown, "true" | "false");
        return (!is_known).then(|| format!("{place}: `{shown}` is neither true nor false"));
    }
    let error = tree::command().try_get_matches_from(argument(key, text)).err()?.to_string();
    // Behind the reason there is only where to find help.
    let reason = error.split("\n\n").next().unwrap_or_default().trim_start_matches("error: ");
    let reason = reason.split_whitespace().collect::<Vec<_>>().join(" ");
    Some(format!("{place}: {reason}"))
}

/// What is left of a file when its keys are taken out.
fn unknown_keys(table: &toml::Table, file: &str) -> Vec<String> {
    let keys = tree::keys();
    let sections = || keys.iter().map(|key| key.section.as_str());
    let mut faults = Vec::new();
    for (section, value) in table {
        match value {
            toml::Value::Table(left) if sections().any(|known| known == section) => {
                faults.extend(left.keys().map(|name| unknown_key(&keys, section, name)));
            }
            toml::Value::Table(_) => {
                let mut known: Vec<_> = sections().collect();
                known.dedup();
                let known = known.join(", ");
                faults.push(format!("there is no section [{section}], but {known}"));
            }
            _ => faults.push(unknown_key(&keys, "", section)),
        }
    }
    faults.into_iter().map(|fault| format!("{file}: {fault}")).collect()
}

fn unknown_key(keys: &[Key], section: &str, name: &str) -> String {
    let place =
        if section.is_empty() { "outside the sections".into() } else { format!("in [{section}]") };
    match keys.iter().find(|key| key.name == name.replace('_', "-")) {
        Some(key) => format!("`{name}` {place} is `{}` of [{}]", key.name, key.section),
        None => format!("there is no setting `{name}` {place}"),
    }
}

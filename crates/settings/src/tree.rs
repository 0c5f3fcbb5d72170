//! The whole tree, and what is known of each of its keys.

use std::path::PathBuf;

use clap::{ArgAction, Args, Command, FromArgMatches as _};
use serde::Serialize;

use crate::{
    AuthSettings, CompatSettings, EngineSettings, HttpSettings, ListenSettings, TelemetrySettings,
    TlsSettings,
};

/// Every setting of a server; a field is a section of the file, a field of it a key.
#[derive(Clone, Debug, PartialEq, Args, Serialize)]
pub struct ServeSettings {
    /// What runs.
    #[command(flatten)]
    pub engine: EngineSettings,
    /// The gRPC port.
    #[command(flatten)]
    pub listen: ListenSettings,
    /// Its certificate.
    #[command(flatten, next_help_heading = "TLS")]
    pub tls: TlsSettings,
    /// Who may call.
    #[command(flatten, next_help_heading = "Keys")]
    pub auth: AuthSettings,
    /// Metrics, health, the page.
    #[command(flatten, next_help_heading = "HTTP listener")]
    pub http: HttpSettings,
    /// Other engines' protocols.
    #[command(flatten, next_help_heading = "Gateways")]
    pub compat: CompatSettings,
    /// Log and traces.
    #[command(flatten, next_help_heading = "Telemetry")]
    pub telemetry: TelemetrySettings,
}

impl Default for ServeSettings {
    fn default() -> Self {
        let matches = command().get_matches_from([""; 0]);
        Self::from_arg_matches(&matches).expect("every setting has a default or may be absent")
    }
}

impl ServeSettings {
    /// The tree as a file that gives the same tree back. Keys without a value are left out.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).expect("sections of plain values")
    }
}

/// What `tandem serve` takes: the settings, and what is done with them.
#[derive(Clone, Debug, Args)]
pub struct ServeArgs {
    /// TOML file with settings, which variables (TANDEM_PORT is --port) and flags override
    /// [default: TANDEM_CONFIG, if that is set]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Print the settings of file, environment and flags together as TOML, and stop
    #[arg(long)]
    pub print_config: bool,
    /// The settings.
    #[command(flatten)]
    pub settings: ServeSettings,
}

/// A key of the tree.
pub(crate) struct Key {
    pub(crate) section: String,
    /// Its name in the file; the flag's without the dashes.
    pub(crate) name: String,
    pub(crate) arg: clap::Arg,
}

impl Key {
    /// The variable that sets it.
    pub(crate) fn variable(&self) -> String {
        format!("TANDEM_{}", self.name.to_uppercase().replace('-', "_"))
    }

    /// Whether its flag takes no value.
    pub(crate) fn is_switch(&self) -> bool {
        matches!(self.arg.get_action(), ArgAction::SetTrue)
    }
}

/// A command with the flags of the tree and no other, whose first argument is a flag.
pub(crate) fn command() -> Command {
    let command = Command::new("settings").no_binary_name(true).disable_help_flag(true);
    ServeSettings::augment_args(command)
}

/// The keys in the order of the tree. Each section is a group of the command.
pub(crate) fn keys() -> Vec<Key> {
    let command = command();
    let mut keys = Vec::new();
    for group in command.get_groups() {
        for id in group.get_args() {
            let arg = command.get_arguments().find(|arg| arg.get_id() == id);
            let arg = arg.expect("a group holds arguments of its command").clone();
            let name = arg.get_long().expect("every setting is a long flag").to_owned();
            keys.push(Key { section: group.get_id().to_string(), name, arg });
        }
    }
    keys
}

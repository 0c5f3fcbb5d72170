//! The settings of a server: one typed tree from a file, the environment and flags.
//!
//! **Owns** every setting of `tandem serve`, its name, default, range and help, and the way from a
//! TOML file, `TANDEM_*` variables and flags to [`ServeSettings`]. **Must not know** what a setting
//! does: values are plain data, and what is in the files that they name is not read.
//!
//! Invariants:
//! * A setting is declared once. The flag `--max-num-seqs`, the variable `TANDEM_MAX_NUM_SEQS` and
//!   the key `max-num-seqs` are one field, one parser, one default, one help text.
//! * Flags override variables, variables override the file, the file overrides defaults.
//! * Nothing is ignored: an unknown key or variable is a fault, also where something overrides it.
//! * A fault names the setting and the file or variable that its value is from.
//! * What [`ServeSettings::to_toml`] writes reads back as the same tree. It holds no secret: keys
//!   and tokens are files, and settings only name them.
//!
//! # Example
//!
//! ```
//! use clap::{Parser, Subcommand};
//! use settings::ServeArgs;
//!
//! #[derive(Parser)]
//! struct Cli {
//!     #[command(subcommand)]
//!     command: Command,
//! }
//!
//! #[derive(Subcommand)]
//! enum Command {
//!     Serve(ServeArgs),
//! }
//!
//! let args = ["tandem", "serve", "--port", "0"].map(Into::into).to_vec();
//! let variables = [("TANDEM_PORT", "1"), ("TANDEM_MAX_NUM_SEQS", "8")];
//! let variables = variables.map(|(name, value)| (name.into(), value.into()));
//! let (Cli { command: Command::Serve(args) }, sources) = settings::parse(args, variables)?;
//! args.settings.validate(&sources)?;
//! assert_eq!((args.settings.listen.port, args.settings.engine.max_num_seqs), (0, 8));
//! # Ok::<(), settings::SettingsError>(())
//! ```

mod engine;
mod error;
mod layers;
mod reference;
mod seconds;
mod sections;
mod tree;
mod validate;

#[cfg(test)]
mod tests;

pub use engine::{
    DEFAULT_MODEL, DraftSamplingArg, DraftingArg, Dtype, EngineSettings, IndexCacheArg,
    IndexShareArg, LoadFormatArg, OutputModeArg, PolicyArg,
};
pub use error::SettingsError;
pub use layers::{Sources, parse};
pub use reference::reference;
pub use sections::{
    AuthSettings, CompatSettings, HttpPromptsArg, HttpSettings, ListenSettings, LogFormatArg,
    MetricsCompatArg, ReflectionArg, TelemetrySettings, TlsSettings,
};
pub use tree::{ServeArgs, ServeSettings};

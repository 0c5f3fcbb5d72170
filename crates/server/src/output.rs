//! Results go to standard output, everything else to the log on standard error.

use std::io::{self, Write};

use anyhow::{Context, Result};
use serde::Serialize;

/// Prints one JSON document on a line of its own.
pub(crate) fn json_line(value: &impl Serialize) -> Result<()> {
    let mut line = serde_json::to_string(value).context("serialise the result")?;
    line.push('\n');
    text(&line)
}

/// Prints text as it is, at once.
pub(crate) fn text(text: &str) -> Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).context("write to standard output")
}

/// Says on standard error why the command failed, with every cause.
pub(crate) fn error(error: &anyhow::Error) {
    // Nothing is left to tell if standard error is closed.
    let _ = writeln!(io::stderr(), "error: {error:#}");
}

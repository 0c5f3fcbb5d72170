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
    let _ = writeln!(io::stderr(), "error: {}", with_causes(error));
}

/// The error and its causes, less those that the message before them already quotes.
fn with_causes(error: &anyhow::Error) -> String {
    let mut message = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !message.contains(&cause) {
            message.push_str(": ");
            message.push_str(&cause);
        }
    }
    message
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_is_said_once() {
        let cause = || anyhow::Error::from(io::Error::other("no such thing"));
        let quoting = cause().context("cannot read a.json: no such thing");
        assert_eq!(with_causes(&quoting), "cannot read a.json: no such thing");
        let silent = cause().context("cannot read a.json");
        assert_eq!(with_causes(&silent), "cannot read a.json: no such thing");
        assert_eq!(with_causes(&silent.context("load")), "load: cannot read a.json: no such thing");
    }
}

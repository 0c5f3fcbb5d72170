//! Child processes and stages with their time.

use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};

/// A cargo command in the workspace, with the cargo that runs this task.
pub(crate) fn cargo<I, S>(args: I) -> Command
where
    I: IntoIterator<Item = S>,
    S: AsRef<std::ffi::OsStr>,
{
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    // Build scripts that ask for the package in the environment would run anew after a build by
    // hand, and all behind them: cargo tells this task its own.
    let is_own = |name: &str| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_");
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(is_own) {
            command.env_remove(name);
        }
    }
    command.args(args).current_dir(crate::workspace::root());
    command
}

/// Runs a command that shows its own output.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let shown = show(command);
    let status = command.status().with_context(|| format!("cannot start `{shown}`"))?;
    if !status.success() {
        bail!("`{shown}` failed ({status})");
    }
    Ok(())
}

/// Runs a command and returns its standard output; standard error is shown.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let shown = show(command);
    let output = command
        .stderr(std::process::Stdio::inherit())
        .output()
        .with_context(|| format!("cannot start `{shown}`"))?;
    if !output.status.success() {
        bail!("`{shown}` failed ({})", output.status);
    }
    String::from_utf8(output.stdout).with_context(|| format!("`{shown}` printed no UTF-8"))
}

/// Runs `python3` with these arguments and returns its standard output; an error is the last line
/// of what it says.
pub(crate) fn python(args: &[&str]) -> Result<String> {
    let output = Command::new("python3").args(args).output().context("python3 was not found")?;
    ensure!(output.status.success(), "{}", last_line(&output.stderr));
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The last line that says something.
pub(crate) fn last_line(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    let last = text.lines().rev().find(|line| !line.trim().is_empty());
    last.unwrap_or("no message").trim().trim_start_matches("ERROR: ").to_owned()
}

/// Runs one stage of a longer task between a heading and its time.
pub(crate) fn stage<T>(name: &str, run: impl FnOnce() -> Result<T>) -> Result<T> {
    eprintln!("== {name}");
    let start = Instant::now();
    let result = run().with_context(|| format!("stage `{name}`"))?;
    eprintln!("== {name}: done in {:.1} s", start.elapsed().as_secs_f64());
    Ok(result)
}

fn show(command: &Command) -> String {
    let program = command.get_program().to_string_lossy();
    let program = program.rsplit('/').next().unwrap_or_default().to_owned();
    let args = command.get_args().map(|arg| arg.to_string_lossy().into_owned());
    std::iter::once(program).chain(args).collect::<Vec<_>>().join(" ")
}

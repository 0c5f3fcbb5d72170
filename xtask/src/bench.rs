//! `cargo xtask bench`: measure servers.

use std::process::Command;

use anyhow::Result;

use crate::{libtorch, micro, process, serve, setup};

pub(crate) const HELP: &str = "\
Arguments are those of `tandem-bench`: serve, ab, sweep, compare, report; `cargo xtask bench serve
--help` lists the options of one. Builds `tandem` as well, which --start, --a and --b run:

  cargo xtask bench serve --start '--model tiny-glm52' --max-concurrency 16 --output result.json
  cargo xtask bench ab --a '--index-share on' --b '--index-share off' --output ab.json";

pub(crate) fn run(args: &[String]) -> Result<()> {
    if args.first().is_some_and(|name| name == "micro") {
        return micro::run(&args[1..]);
    }
    let bench = serve::build(&["-p", "bench"])?;
    let mut command = Command::new(bench);
    // The others measure nothing.
    if matches!(args.first().map(String::as_str), Some("serve" | "ab" | "sweep")) {
        setup::ensure_libtorch()?;
        command.envs(libtorch::loader_path()?);
        serve::build(&["-p", "server"])?;
    }
    process::run(command.args(args))
}

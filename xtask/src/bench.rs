//! `cargo xtask bench`: measure servers and engines.

use anyhow::Result;

use crate::{micro, serve};

pub(crate) const HELP: &str = "\
Builds and runs `tandem bench` with these arguments, so that results name the commit; `cargo xtask
bench serve --help` lists the options of one command:

  cargo xtask bench serve --start '--model tiny-glm52' --max-concurrency 16 --output result.json
  cargo xtask bench ab --a '--index-share on' --b '--index-share off' --output ab.json
  cargo xtask bench latency --batch-size 8 --input-len 32 --output-len 128
  cargo xtask bench seed-table --scale 16 --output seed.json

`micro` runs criterion's benches instead.";

pub(crate) fn run(args: &[String]) -> Result<()> {
    match args.first() {
        Some(name) if name == "micro" => micro::run(&args[1..]),
        _ => serve::run_tandem("bench", args),
    }
}

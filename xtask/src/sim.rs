//! `cargo xtask sim`: the simulation, in release.

use anyhow::Result;

use crate::process;

pub(crate) const HELP: &str = "\
Random workloads through scheduler and block manager, with an executor whose tokens depend on every
KV slot that is read through the block table; checked against a serial oracle after every step, and
against statistics recomputed from plans and outcomes. Says every 30 s how far it is.

  --seeds N     number of seeds (default 2000; with --minutes, no bound)
  --minutes M   begin no seed after this time
  --start S     first seed (default 0)
  --seed S      replay one seed";

pub(crate) fn run(args: &[String]) -> Result<()> {
    let base = ["run", "--quiet", "--release", "-p", "engine-sim", "--bin", "engine-sim", "--"];
    process::run(process::cargo(base).args(args))
}

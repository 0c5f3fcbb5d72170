//! `cargo xtask codegen`: the gRPC types, generated without a system `protoc`.

use anyhow::{Result, bail};

use crate::process;

pub(crate) const HELP: &str = "\
Writes crates/grpc-api/src/gen from proto/, and crates/compat-smg/src/gen from proto-compat/, with
the generator in crates/grpc-codegen.

  --check   write nothing; fail and name the files that are out of date";

pub(crate) fn run(args: &[String]) -> Result<()> {
    let check = match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => false,
        ["--check"] => true,
        _ => bail!("codegen takes --check or nothing, not `{}`", args.join(" ")),
    };
    let mut command = process::cargo(["run", "--quiet", "-p", "grpc-codegen", "--"]);
    if check {
        command.arg("--check");
    }
    command.args(["proto", "crates/grpc-api/src/gen"]);
    process::run(command.args(["proto-compat", "crates/compat-smg/src/gen"]))
}

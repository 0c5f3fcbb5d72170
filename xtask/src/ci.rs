//! `cargo xtask ci`: what a change must pass.

use std::process::Command;

use anyhow::{Result, bail};

use crate::test::{CONTROL, DEVICE};
use crate::{codegen, process, setup, test, tidy, tools, workspace};

pub(crate) const HELP: &str = "\
  lint          format, tidy, proto, generated code, clippy and docs of what builds without
                libtorch
  proto         buf's rules for proto/, and what breaks clients of the last release tag
  device-lint   clippy and docs of the rest

Without an argument: lint, then every test, then device-lint.";

pub(crate) fn run(args: &[String]) -> Result<()> {
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => process::stage("every check", || {
            lint()?;
            test::run(&[])?;
            device_lint()
        }),
        ["lint"] => lint(),
        ["proto"] => proto(),
        ["device-lint"] => device_lint(),
        _ => bail!("ci takes lint, proto, device-lint or nothing, not `{}`", args.join(" ")),
    }
}

fn lint() -> Result<()> {
    process::stage("format", || process::run(&mut process::cargo(["fmt", "--all", "--check"])))?;
    process::stage("tidy", || tidy::run(&[]))?;
    process::stage("proto", proto)?;
    process::stage("generated code", || codegen::run(&["--check".to_owned()]))?;
    clippy_and_docs(CONTROL, &[])
}

fn proto() -> Result<()> {
    let (program, root) = (tools::buf()?, workspace::root());
    let buf = |args: &[&str]| process::run(Command::new(&program).args(args).current_dir(&root));
    buf(&["lint", "proto"])?;
    buf(&["format", "--diff", "--exit-code", "proto"])?;
    let mut tags = Command::new("git");
    tags.args(["tag", "--list", "v*", "--merged", "HEAD", "--sort=-version:refname"]);
    let tags = process::output(tags.current_dir(&root))?;
    let Some(last) = tags.lines().next() else {
        eprintln!("there is no release tag yet that proto/ could break with");
        return Ok(());
    };
    buf(&["breaking", "proto", "--against", &format!(".git#tag={last},subdir=proto")])
}

fn device_lint() -> Result<()> {
    process::stage("libtorch", setup::ensure_libtorch)?;
    // In release, to share the compiled binding with tests and server.
    clippy_and_docs(DEVICE, &["--release"])
}

fn clippy_and_docs(planes: &[&str], profile: &[&str]) -> Result<()> {
    let packages = workspace::packages_of(planes)?;
    let of = planes.join(", ");
    process::stage(&format!("clippy ({of})"), || {
        let mut command = process::cargo(["clippy", "--quiet", "--all-targets"]);
        process::run(command.args(profile).args(&packages).args(["--", "-D", "warnings"]))
    })?;
    process::stage(&format!("docs ({of})"), || {
        let mut command = process::cargo(["doc", "--quiet", "--no-deps"]);
        command.args(profile).args(&packages);
        process::run(command.env("RUSTDOCFLAGS", "-D warnings"))
    })
}

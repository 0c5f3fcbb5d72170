//! Generates the code of `grpc-api` from `proto/`, without a system `protoc`.
//!
//! `grpc-codegen PROTO_DIR OUT_DIR` writes the files; with `--check` it writes nothing, names the
//! files that are out of date and exits with 1.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, Result, bail, ensure};
use prost::Message;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Nothing can be done about a closed stderr.
            let _ = writeln!(std::io::stderr(), "grpc-codegen: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let (flags, folders): (Vec<_>, Vec<_>) =
        std::env::args().skip(1).partition(|argument| argument.starts_with("--"));
    let check = match flags.as_slice() {
        [] => false,
        [flag] if flag == "--check" => true,
        _ => bail!("unknown flags: {}", flags.join(" ")),
    };
    let [proto_dir, out_dir] = folders.as_slice() else {
        bail!("usage: grpc-codegen [--check] PROTO_DIR OUT_DIR");
    };
    let out_dir = Path::new(out_dir);
    let generated = generate(Path::new(proto_dir))?;
    if check {
        let stale = stale_files(&generated, out_dir)?;
        ensure!(stale.is_empty(), "out of date, run codegen: {}", stale.join(", "));
        return Ok(());
    }
    fs::create_dir_all(out_dir).with_context(|| out_dir.display().to_string())?;
    for (name, content) in &generated {
        let path = out_dir.join(name);
        fs::write(&path, content).with_context(|| path.display().to_string())?;
    }
    Ok(())
}

/// Generates every file, by name.
fn generate(proto_dir: &Path) -> Result<BTreeMap<String, Vec<u8>>> {
    let mut protos = vec![];
    collect_protos(proto_dir, &mut protos)?;
    protos.sort();
    ensure!(!protos.is_empty(), "{}: no .proto file", proto_dir.display());
    let descriptors = protox::compile(&protos, [proto_dir])?;
    let mut files = BTreeMap::from([("descriptors.bin".to_owned(), descriptors.encode_to_vec())]);
    let out_dir = tempfile::tempdir()?;
    tonic_prost_build::configure()
        .out_dir(out_dir.path())
        .emit_rerun_if_changed(false)
        .compile_fds(descriptors)?;
    for entry in fs::read_dir(out_dir.path())? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        files.insert(name, format_rust(&fs::read(&path)?)?);
    }
    Ok(files)
}

fn collect_protos(folder: &Path, protos: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        if path.is_dir() {
            collect_protos(&path, protos)?;
        } else if path.extension().is_some_and(|extension| extension == "proto") {
            protos.push(path);
        }
    }
    Ok(())
}

/// Formats with the toolchain's rustfmt, so that `cargo fmt --check` agrees with the result.
fn format_rust(source: &[u8]) -> Result<Vec<u8>> {
    let mut rustfmt = Command::new("rustfmt")
        .args(["--edition", "2024", "--config", "max_width=100,use_small_heuristics=Max"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .context("rustfmt")?;
    let mut stdin = rustfmt.stdin.take().context("rustfmt has no standard input")?;
    let source = [b"//! Generated from `proto/`; not edited by hand.\n\n", source].concat();
    let writer = std::thread::spawn(move || stdin.write_all(&source));
    let output = rustfmt.wait_with_output()?;
    writer.join().ok().context("the writer panicked")??;
    ensure!(output.status.success(), "rustfmt failed");
    Ok(output.stdout)
}

/// Names the files in `out_dir` that differ from `generated`, are missing or do not belong there.
fn stale_files(generated: &BTreeMap<String, Vec<u8>>, out_dir: &Path) -> Result<Vec<String>> {
    let mut stale: Vec<String> = generated
        .iter()
        .filter(|(name, content)| fs::read(out_dir.join(name)).ok().as_ref() != Some(*content))
        .map(|(name, _)| out_dir.join(name).display().to_string())
        .collect();
    for entry in fs::read_dir(out_dir).with_context(|| out_dir.display().to_string())? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if !generated.contains_key(name.as_ref()) {
            stale.push(path.display().to_string());
        }
    }
    Ok(stale)
}

//! What is known of where a result comes from, and what is not.

use std::io::ErrorKind;
use std::process::Command;
use std::{fs, thread};

use super::*;

#[test]
fn a_version_may_name_its_commit() {
    let source = |version| Source::of_version(version).known().cloned();
    let told = |is_dirty| Some(Source { commit: "4769999a".to_owned(), is_dirty });
    assert_eq!(source("0.1.0+4769999a"), told(false));
    assert_eq!(source("0.1.0+4769999a.dirty"), told(true));
    assert_eq!(source("0.1.0"), None);
    assert_eq!(source("0.1.0+cpu"), None);
    let dirty = Source::of_version("0.1.0+4769999a.dirty");
    assert_eq!(dirty.to_string(), "4769999a, with changes");
}

/// A checkpoint with one shard of this header and data.
fn checkpoint(header: &str, data: &[u8]) -> (tempfile::TempDir, u64) {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("config.json"), "{}").unwrap();
    fs::write(folder.path().join("README.md"), "not hashed").unwrap();
    let length = (header.len() as u64).to_le_bytes();
    let shard = [length.as_slice(), header.as_bytes(), data].concat();
    fs::write(folder.path().join("model.safetensors"), &shard).unwrap();
    (folder, 2 + shard.len() as u64)
}

#[test]
fn small_checkpoints_are_hashed_whole() {
    let of = |header: &str, data: &[u8]| {
        let (folder, n_bytes) = checkpoint(header, data);
        let checkpoint = Checkpoint::of(folder.path()).unwrap();
        assert_eq!((checkpoint.covers, checkpoint.n_bytes), (Covers::WholeFiles, n_bytes));
        checkpoint.sha256
    };
    // By `printf 'config.json\n2\n{}model.safetensors\n13\n\x02\0\0\0\0\0\0\0{}abc' | sha256sum`.
    assert_eq!(
        of("{}", b"abc"),
        "b791c5b47140bc216691aaff5a3b37bb63c2f2a8910f423fc3029c008f53bf3b"
    );
    assert_ne!(of("{}", b"abc"), of("{}", b"abd"));
    assert!(Checkpoint::of(tempfile::tempdir().unwrap().path()).is_err());
}

#[test]
fn large_checkpoints_are_told_apart_by_headers_and_sizes() {
    let of = |header: &str, size: u64| {
        let (folder, _) = checkpoint(header, b"");
        let shard = fs::File::options().write(true).open(folder.path().join("model.safetensors"));
        // Sparse: the data takes no room and is not read.
        shard.unwrap().set_len(size).unwrap();
        let checkpoint = Checkpoint::of(folder.path()).unwrap();
        assert_eq!(checkpoint.covers, Covers::HeadersAndSizes);
        checkpoint.sha256
    };
    let first = of("{\"a\":1}", 1 << 40);
    assert_eq!(first, of("{\"a\":1}", 1 << 40));
    assert_ne!(first, of("{\"a\":2}", 1 << 40));
    assert_ne!(first, of("{\"a\":1}", 1 << 39));
}

#[test]
fn secrets_are_masked_and_counts_of_tokens_are_not() {
    let arguments =
        "serve --api-key abc --token=def --max-num-batched-tokens 64 --admin_key g --x y";
    let arguments: Vec<String> = arguments.split(' ').map(str::to_owned).collect();
    let expected =
        "serve --api-key *** --token=*** --max-num-batched-tokens 64 --admin_key *** --x y";
    assert_eq!(masked(&arguments).join(" "), expected);
}

#[test]
fn a_process_tells_its_program_and_when_it_started() {
    let me = Process::of(std::process::id()).unwrap();
    assert_eq!(me.program, std::env::current_exe().unwrap().to_string_lossy());
    assert!(!me.is_replaced && me.n_threads >= 1 && !me.arguments.is_empty());
    let age = Timestamp::now().duration_since(me.started_at);
    assert!(age.as_secs() >= -2 && age.as_hours() < 24, "{age:?}");
    assert!(Process::of(u32::MAX).is_err());
}

#[test]
fn a_replaced_program_is_seen() {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("sleep");
    fs::copy("/bin/sleep", &program).unwrap();
    // The file is busy while a process that another test starts still has it open.
    let mut sleeper = loop {
        match Command::new(&program).arg("600").spawn() {
            Err(error) if error.kind() == ErrorKind::ExecutableFileBusy => thread::yield_now(),
            spawned => break spawned.unwrap(),
        }
    };
    // A program that has just been started has no arguments yet.
    let before = loop {
        match Process::of(sleeper.id()).unwrap() {
            process if process.arguments.len() < 2 => thread::yield_now(),
            process => break process,
        }
    };
    fs::remove_file(&program).unwrap();
    let after = Process::of(sleeper.id()).unwrap();
    sleeper.kill().unwrap();
    sleeper.wait().unwrap();
    assert!(!before.is_replaced && after.is_replaced);
    assert_eq!(before.program, after.program);
    assert_eq!(after.arguments[1], "600");
}

#[test]
fn this_machine_is_described_and_the_document_reads_back() {
    let build = Build::of_this_program("0.1.0+4769999a");
    let provenance =
        Provenance::now(build, &["--api-key".into(), "x".into()], serde_json::json!({"k": 3}));
    assert_eq!(provenance.arguments[1], "***");
    assert!(provenance.host.n_cpus.known().is_some_and(|n| *n >= 1));
    assert!(provenance.bench.rustc.starts_with("rustc 1."));
    let json = serde_json::to_value(&provenance).unwrap();
    assert!(json["started_at"].as_str().unwrap().ends_with('Z'));
    assert_eq!(serde_json::from_value::<Provenance>(json).unwrap(), provenance);
    let without = serde_json::json!({"started_at": "2026-01-01T00:00:00Z"});
    assert!(serde_json::from_value::<Provenance>(without).is_err());
}

//! Running the program, and checkpoint folders to break.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;
use tempfile::TempDir;

pub(crate) const INDEX: &str = "model.safetensors.index.json";
/// The shard with the MTP layer.
pub(crate) const LAST_SHARD: &str = "model-00002-of-00002.safetensors";
/// Prefix of the MTP layer's tensors, behind five layers of the target.
pub(crate) const MTP_PREFIX: &str = "model.layers.5.";

/// The program without arguments.
pub(crate) fn tandem() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tandem"));
    command.env_remove("RUST_LOG");
    command
}

fn run(args: &[&str]) -> Output {
    tandem().args(args).output().unwrap()
}

/// Runs a command that must succeed and be silent on standard error; its standard output.
pub(crate) fn succeed(args: &[&str]) -> String {
    let output = run(args);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && stderr.is_empty(), "{args:?}: {stderr}");
    String::from_utf8(output.stdout).unwrap()
}

/// Runs a command that must print one JSON document.
pub(crate) fn succeed_json(args: &[&str]) -> Value {
    serde_json::from_str(&succeed(args)).unwrap()
}

/// Runs a command that must fail and print no result; what it says behind its log.
pub(crate) fn fail(args: &[&str]) -> String {
    let output = run(args);
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success(), "{args:?} succeeds");
    assert!(output.stdout.is_empty(), "{args:?}: {}", String::from_utf8_lossy(&output.stdout));
    let is_log = |line: &&str| line.contains(" INFO ");
    let message = stderr.lines().skip_while(is_log).collect::<Vec<_>>().join("\n");
    assert!(message.starts_with("error: "), "{args:?}: {stderr}");
    message
}

/// Runs a command that must fail with each of `expected` in its message.
pub(crate) fn fail_with(args: &[&str], expected: &[&str]) {
    let message = fail(args);
    for expected in expected {
        assert!(message.contains(expected), "{args:?}: {message}\nis without {expected}");
    }
}

/// The reference's cases for the model that runs where none is named.
pub(crate) fn cases() -> Vec<Value> {
    cases_of("tiny-glm52")
}

pub(crate) fn cases_of(model: &str) -> Vec<Value> {
    let path = format!("../../tests/data/oracle-{model}/cases.json");
    let text = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap();
    serde_json::from_str(&text).unwrap()
}

/// Token ids as the command line takes them.
pub(crate) fn id_list(ids: &Value) -> String {
    let ids: Vec<String> = ids.as_array().unwrap().iter().map(Value::to_string).collect();
    ids.join(",")
}

/// A writable copy of the bundled checkpoint.
pub(crate) struct Checkpoint {
    dir: TempDir,
}

impl Checkpoint {
    pub(crate) fn copy() -> Self {
        Self::copy_of("tiny-dsv3")
    }

    pub(crate) fn copy_of(name: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let source = bundled_checkpoints::resolve(name, None).unwrap();
        for entry in fs::read_dir(source).unwrap() {
            let entry = entry.unwrap();
            // Bytes, not the file: the copy is writable whatever the original is.
            let bytes = fs::read(entry.path()).unwrap();
            fs::write(dir.path().join(entry.file_name()), bytes).unwrap();
        }
        Self { dir }
    }

    pub(crate) fn as_str(&self) -> &str {
        self.dir.path().to_str().unwrap()
    }

    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Changes the index's map from tensors to shards.
    pub(crate) fn edit_weight_map(&self, edit: impl FnOnce(&mut serde_json::Map<String, Value>)) {
        let text = fs::read_to_string(self.file(INDEX)).unwrap();
        let mut index: Value = serde_json::from_str(&text).unwrap();
        edit(index["weight_map"].as_object_mut().unwrap());
        fs::write(self.file(INDEX), index.to_string()).unwrap();
    }
}

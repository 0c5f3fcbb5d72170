//! The tree itself, and what the documentation and the files for deployment say of it.

use std::fs;
use std::path::{Path, PathBuf};

use super::{file, serve};
use crate::tree;

/// Flags that those files name and that are others' or no settings.
const OTHER_FLAGS: &[&str] = &[
    "build-arg",
    "config",
    "device",
    "env",
    "example",
    "file",
    "from",
    "from-file",
    "git",
    "gpus",
    "group-add",
    "home-dir",
    "interval",
    "no-install-recommends",
    "print-config",
    "publish",
    "release",
    "retries",
    "rm",
    "runtime",
    "shell",
    "start-period",
    "system",
    "tag",
    "time",
    "timeout",
    "uid",
    "volume",
    "yes",
];

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn read(name: &str) -> String {
    fs::read_to_string(repository().join(name)).unwrap()
}

#[test]
fn names_are_kebab_case_unique_and_described() {
    let keys = tree::keys();
    for tree::Key { name, arg, .. } in &keys {
        assert!(name.chars().all(|c| c.is_ascii_lowercase() || c == '-'), "{name}");
        assert!(arg.get_help().is_some_and(|help| !help.to_string().is_empty()), "{name}");
        assert_eq!(keys.iter().filter(|other| other.name == *name).count(), 1, "{name}");
    }
}

#[test]
fn the_documented_tables_are_those_of_the_tree() {
    assert!(
        read("docs/configuration.md").ends_with(&format!("-->\n\n{}", crate::reference())),
        "put what `cargo run -p settings --example reference` prints there"
    );
}

#[test]
fn the_documented_file_is_taken() {
    let text = read("docs/configuration.md");
    let example = text.split("```toml\n").nth(1).unwrap().split("```").next().unwrap();
    let (_folder, name) = file(example);
    let settings = serve(&["--config", &name], &[]).unwrap();
    assert_eq!(settings.engine.max_num_seqs, 32);
}

/// What stands behind `prefix` in a text, as far as `is_part` goes.
fn names<'a>(text: &'a str, prefix: &str, is_part: fn(char) -> bool) -> Vec<&'a str> {
    let behind = text.split(prefix).skip(1);
    let names = behind.map(|text| text.split(|c| !is_part(c)).next().unwrap_or_default());
    names.filter(|name| name.starts_with(|c: char| c.is_ascii_alphabetic())).collect()
}

#[test]
fn what_is_named_elsewhere_exists() {
    let mut files = vec![repository().join("docs/configuration.md")];
    let deploy = fs::read_dir(repository().join("deploy")).unwrap();
    files.extend(deploy.map(|entry| entry.unwrap().path()));
    let keys = tree::keys();
    let (mut n_variables, mut n_flags) = (0, 0);
    for path in files {
        let text = fs::read_to_string(&path).unwrap();
        for name in names(&text, "TANDEM_", |c| c.is_ascii_uppercase() || c == '_') {
            let variable = format!("TANDEM_{name}");
            let exists = name == "CONFIG" || keys.iter().any(|key| key.variable() == variable);
            assert!(exists, "{}: {variable}", path.display());
            n_variables += 1;
        }
        for name in names(&text, "--", |c| c.is_ascii_lowercase() || c == '-') {
            let exists = OTHER_FLAGS.contains(&name) || keys.iter().any(|key| key.name == name);
            assert!(exists, "{}: --{name}", path.display());
            n_flags += 1;
        }
    }
    assert!(n_variables > 30 && n_flags > 30, "{n_variables} variables, {n_flags} flags");
}

//! Settings from a file and from the environment, and the scripts of shells.

use std::fs;

use crate::harness::{cases, fail_with, succeed, tandem};

/// What `tandem` prints with these arguments and variables, when all goes well.
fn run(args: &[&str], variables: &[(&str, &str)]) -> String {
    let output = tandem().args(args).envs(variables.iter().copied()).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && stderr.is_empty(), "{args:?}: {stderr}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn the_printed_settings_are_those_of_all_layers_and_read_back() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tandem.toml");
    let name = file.to_str().unwrap();
    fs::write(&file, "[listen]\nport = 1\n[engine]\nblock-size = 32\nmax-num-seqs = 2\n").unwrap();
    let variables = [("TANDEM_CONFIG", name), ("TANDEM_MAX_NUM_SEQS", "3")];
    let printed = run(&["serve", "--port", "4", "--print-config"], &variables);
    for line in ["port = 4", "block-size = 32", "max-num-seqs = 3", "model = \"tiny-glm52\""] {
        assert!(printed.lines().any(|printed| printed == line), "{line} is not in\n{printed}");
    }
    fs::write(&file, &printed).unwrap();
    assert_eq!(succeed(&["serve", "--config", name, "--print-config"]), printed);
}

#[test]
fn generate_takes_the_engine_section() {
    let case = &cases()[0];
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tandem.toml");
    fs::write(&file, "[engine]\ndtype = \"float32\"\n[listen]\nport = 1\n").unwrap();
    let prompt = case["prompt"].as_str().unwrap();
    let generate = ["generate", "--prompt", prompt, "--max-tokens", "48"];
    let expected = format!("{}\n", case["greedy_text"].as_str().unwrap());
    let config = ["--config", file.to_str().unwrap()];
    assert_eq!(run(&[&generate[..], &config].concat(), &[]), expected);
    assert_eq!(run(&generate, &[("TANDEM_DTYPE", "float32")]), expected);
    fs::write(&file, "[engine]\nscheduling-policy = \"lifo\"\n").unwrap();
    let place = format!("engine.scheduling-policy in {}", config[1]);
    fail_with(&[&generate[..], &config].concat(), &[&place, "lifo", "fcfs, priority"]);
}

#[test]
fn a_variable_that_is_wrong_is_named() {
    let output = tandem().args(["serve"]).env("TANDEM_HOST", "0.0.0.0").output().unwrap();
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && output.stdout.is_empty());
    assert!(message.starts_with("error: --host 0.0.0.0 (TANDEM_HOST): "), "{message}");
}

#[test]
fn shells_get_scripts_that_know_the_flags() {
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let script = succeed(&["completions", shell]);
        assert!(script.contains("max-num-seqs"), "{shell}");
    }
}

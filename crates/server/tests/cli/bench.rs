//! `tandem bench`: what its results hold. Speeds are nobody's business here.

mod peer;
mod signals;

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::Command;

use serde_json::Value;
use tempfile::TempDir;

use crate::harness::{fail_with, tandem};

/// Where a result goes, with the reports beside it.
struct Place {
    folder: TempDir,
}

impl Place {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    fn file(&self) -> PathBuf {
        self.folder.path().join("result.json")
    }

    /// `tandem bench` with these arguments and the result here.
    fn command(&self, args: &[&str]) -> Command {
        let mut command = tandem();
        command.arg("bench").args(args).arg("--output").arg(self.file());
        command
    }

    /// A program here that is this script.
    fn program(&self, name: &str, script: &str) -> String {
        let program = self.folder.path().join(name);
        fs::write(&program, script).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        program.to_str().unwrap().to_owned()
    }

    fn result(&self) -> Value {
        serde_json::from_str(&fs::read_to_string(self.file()).unwrap()).unwrap()
    }

    /// Measures; the result and what is printed.
    fn measure(&self, args: &[&str]) -> (Value, String) {
        let output = self.command(args).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{args:?}: {stderr}");
        assert!(stderr.contains("run 1 of ") || args[0] == "latency", "{stderr}");
        for extension in ["md", "html"] {
            let report = fs::read_to_string(self.file().with_extension(extension)).unwrap();
            assert!(report.len() > 500, "{report}");
        }
        (self.result(), String::from_utf8(output.stdout).unwrap())
    }
}

fn measure(args: &[&str]) -> (Value, String) {
    Place::new().measure(args)
}

/// Completed requests, prompt tokens and generated tokens of each run.
fn counts(result: &Value) -> Vec<(u64, u64, u64)> {
    let count = |run: &Value, name: &str| run["metrics"][name].as_u64().unwrap();
    let of = |run: &Value| {
        let (n_prompt, n_output) = (count(run, "n_prompt_tokens"), count(run, "n_output_tokens"));
        (count(run, "n_completed"), n_prompt, n_output)
    };
    result["runs"].as_array().unwrap().iter().map(of).collect()
}

fn known<'a>(server: &'a Value, name: &str) -> &'a Value {
    let known = &server[name]["known"];
    assert!(!known.is_null(), "{name}: {}", server[name]);
    known
}

/// Nothing of what a reader must know of one of our servers is missing.
fn assert_is_told(server: &Value, model: &str) {
    assert!(known(server, "version").as_str().unwrap().starts_with(env!("CARGO_PKG_VERSION")));
    assert_eq!(known(server, "device"), "cpu");
    assert!(known(server, "threads").as_u64().unwrap() >= 1);
    assert_eq!(known(server, "checkpoint")["name"], model);
    assert_eq!(known(server, "checkpoint")["sha256"].as_str().unwrap().len(), 64);
    assert_eq!(known(server, "synthetic_acceptance"), false);
    assert!(known(server, "process")["n_threads"].as_u64().unwrap() >= 1);
    assert!(server["libraries"]["libtorch"].as_str().unwrap().starts_with("2."));
    assert_eq!(server["config"]["settings"]["engine"]["model"], model);
}

#[test]
fn a_server_is_started_and_measured() {
    let args = "serve --start=--model=tiny-glm52 --num-prompts 6 --random-input-len 16 \
                --random-output-len 8 --max-concurrency 2 --repeats 2 --num-warmups 1 \
                --percentile-metrics ttft,tpot --metric-percentiles 50,99";
    let place = Place::new();
    let (result, printed) = place.measure(&args.split_whitespace().collect::<Vec<_>>());
    assert_eq!(counts(&result), [(6, 96, 48); 2]);
    let server = &result["provenance"]["servers"][0];
    assert_is_told(server, "tiny-glm52");
    assert_eq!(server["config"]["prompts"], "sent as token ids");
    let settings = &result["provenance"]["settings"]["serve"];
    assert_eq!(settings["workload"]["num_prompts"], 6);
    assert_eq!(settings["workload"]["random_range_ratio"], 1.0, "defaults as well");
    let version = &result["provenance"]["bench"]["version"];
    assert_eq!(version, known(server, "version"), "the same program");
    for run in result["runs"].as_array().unwrap() {
        assert!(run["generator"].is_object() && run["is_partial"] == false, "{run}");
        assert!(run["counters"]["draft_tokens"].as_u64().unwrap() > 0);
        assert!(run["counters"]["indexer_launches"].as_u64().unwrap() > 0);
    }
    assert!(printed.contains("| TTFT ") && printed.contains("| p50 | p99 |"), "{printed}");
    let file = place.file();
    let compare = ["bench", "compare", file.to_str().unwrap(), file.to_str().unwrap()];
    let output = tandem().args(compare).output().unwrap();
    assert!(output.status.success(), "a result is no worse than itself");
    assert!(String::from_utf8_lossy(&output.stdout).contains("No regression"));
}

#[test]
fn batches_are_measured_in_process() {
    let args = "latency --model tiny-dsv3 --batch-size 2 --input-len 8 --output-len 4 \
                --num-iters-warmup 1 --num-iters 3 --threads 1";
    let (result, printed) = measure(&args.split_whitespace().collect::<Vec<_>>());
    assert_eq!(counts(&result), [(6, 48, 24)]);
    let run = &result["runs"][0];
    assert_eq!(run["batch_ms"]["n"], 3);
    assert!(run["batch_ms"]["mean"].as_f64().unwrap() > 0.0);
    assert!(run["generator"].is_null(), "{run}");
    let server = &result["provenance"]["servers"][0];
    assert_is_told(server, "tiny-dsv3");
    assert_eq!(server["config"]["settings"]["engine"]["drafting"], "fixed", "what runs");
    assert_eq!((&server["address"], known(server, "threads")), (&"in process".into(), &1.into()));
    assert!(printed.contains("| batches of 2 | 3 |"), "{printed}");
}

#[test]
fn built_in_prompts_are_measured_in_process() {
    let args = "throughput --dataset-name builtin --num-prompts 5 --output-len 4 --repeats 1 \
                --max-num-seqs 2 --max-queued-requests 1 --num-warmups 1";
    let (result, _) = measure(&args.split_whitespace().collect::<Vec<_>>());
    let (n_completed, n_prompt, n_output) = counts(&result)[0];
    assert_eq!((n_completed, n_output), (5, 20));
    assert!(n_prompt > 25, "{n_prompt}");
    let run = &result["runs"][0];
    assert_eq!(run["workload"]["description"], "built-in prompts, as text");
    assert!(run["generator"].is_null() && run["batch_ms"].is_null(), "{run}");
    let server = &result["provenance"]["servers"][0];
    assert_is_told(server, "tiny-glm52");
    assert_eq!(server["config"]["prompts"], "sent as text");
}

#[test]
fn two_settings_of_two_programs_are_interleaved() {
    let args = [
        "ab",
        "--a=--model tiny-dsv3",
        "--b=--model tiny-dsv3 --num-speculative-tokens 0",
        concat!("--b-tandem=", env!("CARGO_BIN_EXE_tandem")),
        "--pairs=2",
        "--num-prompts=4",
        "--random-input-len=8",
        "--random-output-len=4",
        "--num-warmups=1",
    ];
    let (result, _) = measure(&args);
    assert_eq!(counts(&result), [(4, 32, 16); 4]);
    let runs = result["runs"].as_array().unwrap();
    let order: Vec<&str> = runs.iter().map(|run| run["server"].as_str().unwrap()).collect();
    assert_eq!(order, ["A", "B", "B", "A"]);
    assert_eq!((&result["ab"][0]["a"], &result["ab"][0]["b"]), (&"A".into(), &"B".into()));
    let servers = result["provenance"]["servers"].as_array().unwrap();
    servers.iter().for_each(|server| assert_is_told(server, "tiny-dsv3"));
    let drafts = |idx: usize| &servers[idx]["config"]["num_speculative_tokens"];
    assert_eq!((drafts(0), drafts(1)), (&3.into(), &0.into()));
    let hash = |idx: usize| &runs[idx]["workload"]["sha256"];
    assert_eq!((hash(0), hash(2)), (hash(1), hash(3)), "both are asked the same");
    assert_ne!(hash(0), hash(2), "and another time something else");
}

#[test]
fn the_seed_protocol_runs_scaled_down_and_is_refused_where_it_does_not_fit() {
    let args = ["seed-table", "--scale", "256", "--repeats", "1", "--title", "Mine"];
    let (result, printed) = measure(&args);
    let runs = result["runs"].as_array().unwrap();
    let order: Vec<&str> = runs.iter().map(|run| run["server"].as_str().unwrap()).collect();
    assert_eq!(order[..3], ["off", "on", "off again"]);
    let expected: Vec<_> = [4, 32, 40].iter().flat_map(|n| [(16, 16 * n, 64); 3]).collect();
    assert_eq!(counts(&result), expected);
    let title = result["title"].as_str().unwrap();
    assert!(title.starts_with("Mine: ") && title.contains("scaled down by 256"), "{title}");
    let servers = result["provenance"]["servers"].as_array().unwrap();
    servers.iter().for_each(|server| assert_is_told(server, "tiny-glm52"));
    let shares: Vec<&Value> = servers.iter().map(|of| &of["config"]["index_share"]).collect();
    assert_eq!(shares, [false, true, false]);
    let row = printed.lines().find(|line| line.starts_with("| 40 |")).unwrap();
    assert_eq!(row.matches('→').count(), 4, "{row}");
    fail_with(&["bench", "seed-table"], &["--scale 1", "11264 tokens", "give --scale"]);
}

#[test]
fn what_cannot_be_measured_is_refused_by_name() {
    fail_with(
        &["bench", "serve", "--start=--model nowhere", "--num-prompts", "1"],
        &["`tandem serve --model nowhere` ended"],
    );
    fail_with(
        &["bench", "serve", "--start=--max-num-seqs 0"],
        &["`tandem serve --max-num-seqs 0`", "--max-num-seqs"],
    );
    fail_with(&["bench", "latency", "--output-len", "100000"], &["100032 tokens", "shorter"]);
}

#[test]
fn faults_of_flags_are_told_before_a_server_is_started() {
    let serve = ["bench", "serve", "--start=--model nowhere"];
    for (args, expected) in [
        (&["--output", "a.md"][..], "beside the JSON"),
        (&["--output", "Cargo.toml/a.json"], "--output Cargo.toml/a.json"),
        (&["--request-rate=-1"], "--request-rate -1"),
        (&["--dataset-path", "nowhere.jsonl"], "nowhere.jsonl"),
        (&["--random-input-len", "0"], "--random-input-len"),
    ] {
        fail_with(&[&serve[..], args].concat(), &[expected]);
    }
    let sweep = ["bench", "sweep", "--start=--model nowhere", "--concurrencies", "1,4,1"];
    fail_with(&sweep, &["--concurrencies: 1 is there twice"]);
    let ab = ["bench", "ab", "--a", "http://127.0.0.1:1", "--b", "http://127.0.0.1:1"];
    fail_with(&ab, &["one server"]);
    fail_with(&["bench", "serve"], &["--url", "--port", "--start"]);
    fail_with(
        &["bench", "serve", "--port", "1", "--url", "http://127.0.0.1:1"],
        &["cannot be used"],
    );
}

#[test]
fn a_sweep_names_what_it_drafts() {
    let fixed = "sweep --concurrencies 1 --num-prompts 1 --random-input-len 4 --num-warmups 0 \
                 --random-output-len 2";
    let args = |start: &'static str, widths: &'static str| -> Vec<&'static str> {
        let more = ["--start", start, "--num-speculative-tokens", widths];
        fixed.split_whitespace().chain(more).collect()
    };
    let (result, _) = measure(&args("--model tiny-dsv3", "0,2"));
    let servers = result["provenance"]["servers"].as_array().unwrap();
    let names: Vec<&str> = servers.iter().map(|of| of["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["k = 0", "k <= 2"], "serve makes fewer where they do not pay");
    let (result, _) = measure(&args("--model tiny-dsv3 --drafting fixed", "2"));
    assert_eq!(result["runs"][0]["server"], "k = 2");
    let most = args("--model tiny-dsv3 --num-speculative-tokens 1", "1,2");
    fail_with(&[&["bench"], &most[..]].concat(), &["--num-speculative-tokens 2", "1 at most"]);
}

#[test]
fn results_that_cannot_be_compared_are_no_regression() {
    let compare = ["bench", "compare", "nowhere.json", "nowhere.json"];
    assert_eq!(tandem().args(compare).output().unwrap().status.code(), Some(2));
}

#[test]
fn a_bundled_name_of_another_build_is_not_known() {
    let place = Place::new();
    let script = format!("#!/bin/sh\nexec {} \"$@\"\n", env!("CARGO_BIN_EXE_tandem"));
    let other = place.program("other", &script);
    let args = ["serve", "--start=--model tiny-dsv3", "--tandem", &other];
    let few = "--repeats 1 --num-prompts 1 --random-output-len 2 --num-warmups 0";
    let (result, _) = place.measure(&args.into_iter().chain(few.split(' ')).collect::<Vec<_>>());
    let checkpoint = &result["provenance"]["servers"][0]["checkpoint"];
    assert!(checkpoint["unknown"].as_str().unwrap().contains("--model a folder"), "{checkpoint}");
}

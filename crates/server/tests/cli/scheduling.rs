//! The flags that say how the scheduler decides, and `--n`.

use std::fs;

use serde_json::{Value, json};

use crate::harness::{cases, cases_of, fail_with, id_list, succeed};

const GENERATE: [&str; 6] = ["generate", "--dtype", "float32", "--max-tokens", "32", "--json"];

/// Runs a file of prompts; an object for each result.
fn generate(lines: &[Value], args: &[&str]) -> Vec<Value> {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("prompts.jsonl");
    let text: Vec<String> = lines.iter().map(Value::to_string).collect();
    fs::write(&file, text.join("\n")).unwrap();
    let prompts = ["--prompts", file.to_str().unwrap()];
    parse(&succeed(&[&GENERATE, &prompts[..], args].concat()))
}

fn parse(output: &str) -> Vec<Value> {
    output.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn prompt(case: &Value) -> Value {
    json!({"prompt_ids": case["prompt_ids"]})
}

/// How a step is put together, and when its tokens are looked at, changes no token and no draft.
#[test]
fn output_modes_and_chunks_give_the_same_lines() {
    for model in ["tiny-glm52", "tiny-dsv3"] {
        let cases = cases_of(model);
        let lines: Vec<Value> = cases.iter().map(prompt).collect();
        let run = |args: &[&str]| {
            // Which prompt comes first decides what the others find in the cache.
            let fixed = ["--model", model, "--no-prefix-caching", "--drafting", "fixed"];
            let mut found = generate(&lines, &[&fixed[..], args].concat());
            // These counts go by steps.
            found.iter_mut().for_each(|line| drop(line.as_object_mut().unwrap().remove("indexer")));
            found
        };
        let plain = run(&[]);
        let settings: [&[&str]; 4] = [
            &["--output-mode", "deferred"],
            &["--long-prefill-token-threshold", "64"],
            &["--output-mode", "deferred", "--long-prefill-token-threshold", "16"],
            &["--scheduling-policy", "priority", "--output-mode", "deferred"],
        ];
        for args in settings {
            assert_eq!(run(args), plain, "{model}: {args:?}");
        }
    }
}

#[test]
fn adaptive_drafting_gives_the_reference_text_with_no_more_drafts() {
    let cases = cases();
    let lines: Vec<Value> = cases.iter().map(prompt).collect();
    let [fixed, adaptive] = ["fixed", "adaptive"].map(|policy| {
        let args = ["--drafting", policy, "--num-speculative-tokens", "8"];
        generate(&lines, &args)
    });
    for (case, (fixed, adaptive)) in cases.iter().zip(fixed.iter().zip(&adaptive)) {
        let expected = case["greedy_ids"].as_array().unwrap();
        let n_tokens = expected.len().min(32);
        for found in [fixed, adaptive] {
            assert_eq!(found["token_ids"].as_array().unwrap()[..], expected[..n_tokens]);
        }
        let n_drafts = |found: &Value| found["spec_decode"]["num_draft_tokens"].as_u64().unwrap();
        let widths = |found: &Value| -> Vec<usize> {
            let steps = found["spec_decode"]["drafts_per_step"].as_array().unwrap();
            steps.iter().map(|drafts| drafts.as_array().unwrap().len()).collect()
        };
        assert_eq!(widths(fixed)[0], 8, "{}", case["name"]);
        assert!(n_drafts(adaptive) < n_drafts(fixed), "{}: {:?}", case["name"], widths(adaptive));
    }
}

/// The first line runs when the others come. What the second of two equal prompts finds in the
/// cache tells which of them ran first.
#[test]
fn the_better_priority_starts_first() {
    let cases = cases();
    let line = |priority| json!({"prompt_ids": cases[12]["prompt_ids"], "priority": priority});
    let lines = [json!({"prompt_ids": [0, 5], "ignore_eos": true}), line(1), line(-1)];
    let cached = |args: &[&str]| {
        let found = generate(&lines, &[&["--max-num-seqs", "1"], args].concat());
        [1, 2].map(|idx| found[idx]["usage"]["cached_tokens"].as_u64().unwrap())
    };
    assert_eq!(cached(&["--scheduling-policy", "fcfs"]), [0, 320]);
    assert_eq!(cached(&["--scheduling-policy", "priority"]), [320, 0]);
    let aging = ["--scheduling-policy", "priority", "--priority-aging-steps", "50"];
    assert_eq!(cached(&aging), [320, 0]);
}

#[test]
fn who_waits_too_long_ends_without_tokens() {
    let line = json!({"prompt_ids": [0, 5], "max_tokens": 1000, "ignore_eos": true});
    let lines = [line.clone(), line];
    let found = generate(&lines, &["--max-num-seqs", "1", "--max-queue-wait", "0.01"]);
    assert_eq!(found[0]["usage"]["completion_tokens"], 1000);
    assert_eq!(found[1]["finish_reason"], "deadline_exceeded");
    assert_eq!(found[1]["usage"]["completion_tokens"], 0);
}

#[test]
fn n_continuations_are_n_lines() {
    let case = &cases()[12];
    let ids = id_list(&case["prompt_ids"]);
    let prompt = ["--prompt-ids", &ids];
    let alone = parse(&succeed(&[&GENERATE, &prompt[..]].concat())).remove(0);
    assert_eq!(alone.get("index"), None);
    for mode in ["immediate", "deferred"] {
        let args = ["--n", "3", "--output-mode", mode];
        let found = parse(&succeed(&[&GENERATE, &prompt[..], &args].concat()));
        assert_eq!(found.len(), 3);
        for (idx, found) in found.iter().enumerate() {
            assert_eq!(found["index"], idx);
            for field in ["prompt_ids", "token_ids", "text", "finish_reason", "spec_decode"] {
                assert_eq!(found[field], alone[field], "{field} of continuation {idx}, {mode}");
            }
        }
    }
    let two = ["generate", "--dtype", "float32", "--max-tokens", "32", "--n", "2"];
    let text = case["greedy_text"].as_str().unwrap();
    assert_eq!(succeed(&[&two[..], &prompt].concat()), format!("{text}\n{text}\n"));
}

#[test]
fn flags_out_of_range_are_refused_by_name() {
    let with = |args: &[&'static str]| [&["generate", "--prompt", "a"], args].concat();
    let table: [(&[&str], &[&str]); 14] = [
        (&["--output-mode", "late"], &["--output-mode", "immediate, deferred"]),
        (&["--scheduling-policy", "lifo"], &["--scheduling-policy", "fcfs, priority"]),
        (&["--drafting", "off"], &["--drafting", "fixed", "adaptive"]),
        (&["--chunk-alignment", "0"], &["--chunk-alignment", "1.."]),
        (&["--n", "0"], &["--n", "1..=256"]),
        (
            &["--scheduling-policy", "priority", "--priority-aging-steps", "0"],
            &["--priority-aging-steps", "1.."],
        ),
        (
            &["--priority-aging-steps", "5"],
            &["--priority-aging-steps", "only with --scheduling-policy priority"],
        ),
        (
            &["--long-prefill-token-threshold", "15"],
            &["--long-prefill-token-threshold 15", "at least --block-size 16", "0 for no limit"],
        ),
        (&["--max-queue-wait", "0"], &["--max-queue-wait", "seconds above 0"]),
        (&["--max-queue-wait", "1e30"], &["--max-queue-wait", "seconds above 0"]),
        (&["--max-queue-wait", "NaN"], &["--max-queue-wait", "seconds above 0"]),
        (&["--max-queue-wait", "soon"], &["--max-queue-wait", "seconds above 0"]),
        (&["--max-queue-wait=-1"], &["--max-queue-wait", "seconds above 0"]),
        (&["--max-queued-requests=-1"], &["--max-queued-requests"]),
    ];
    for (args, expected) in table {
        fail_with(&with(args), expected);
    }
}

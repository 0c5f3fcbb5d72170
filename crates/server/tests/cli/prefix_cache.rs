//! Prefix caching as `generate` shows it.

use std::fs;

use serde_json::{Value, json};

use crate::harness::{cases, fail_with, succeed};

/// Runs prompts one after the other; an object for each.
fn generate(lines: &[Value], args: &[&str]) -> Vec<Value> {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("prompts.jsonl");
    let text: Vec<String> = lines.iter().map(Value::to_string).collect();
    fs::write(&file, text.join("\n")).unwrap();
    let fixed = ["generate", "--dtype", "float32", "--max-tokens", "32", "--json"];
    let prompts = ["--prompts", file.to_str().unwrap(), "--max-num-seqs", "1"];
    let output = succeed(&[&fixed[..], &prompts, args].concat());
    output.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn cached_tokens(found: &[Value]) -> Vec<u64> {
    found.iter().map(|found| found["usage"]["cached_tokens"].as_u64().unwrap()).collect()
}

/// Both are longer than the model's `index_topk`, and none is a whole number of blocks.
fn long_cases() -> [Value; 2] {
    let cases = cases();
    let long = [cases[12].clone(), cases[13].clone()];
    assert_eq!(
        long.each_ref().map(|case| case["prompt_ids"].as_array().unwrap().len()),
        [331, 795]
    );
    long
}

/// Fault case L13: text and drafts after a hit are those of a run without the cache.
#[test]
fn a_repeated_prompt_is_cached_and_its_text_and_drafts_are_the_same() {
    let [short, long] = long_cases();
    let cases = [&short, &long, &short, &long];
    let mut lines = cases.map(|case| json!({"prompt_ids": case["prompt_ids"]})).to_vec();
    // The next turn of a conversation: the first prompt, its output and some more text.
    let turn = ["prompt_ids", "greedy_ids", "prompt_ids"];
    let turn: Vec<&Value> = turn.iter().flat_map(|part| short[part].as_array().unwrap()).collect();
    lines.push(json!({"prompt_ids": turn}));

    let with = generate(&lines, &[]);
    let without = generate(&lines, &["--no-prefix-caching"]);
    // Whole blocks of 16: of 331, of 795, and of the 363 tokens of the first line.
    assert_eq!(cached_tokens(&with), [0, 0, 320, 784, 352]);
    assert_eq!(cached_tokens(&without), [0; 5]);
    for (case, found) in cases.iter().zip(&with) {
        assert_eq!(found["token_ids"], case["greedy_ids"]);
    }
    for field in ["prompt_ids", "token_ids", "text", "finish_reason", "spec_decode"] {
        for (idx, (with, without)) in with.iter().zip(&without).enumerate() {
            assert!(!with[field].is_null());
            assert_eq!(with[field], without[field], "{field} of line {}", idx + 1);
        }
    }
}

#[test]
fn lines_share_by_their_salt_and_the_flag_is_the_salt_of_the_rest() {
    let [case, _] = long_cases();
    let line = |salt: Option<&str>| json!({"prompt_ids": case["prompt_ids"], "cache_salt": salt});
    let lines = [Some("a"), Some("b"), None, Some("a"), Some("c"), None].map(line);
    let found = generate(&lines, &[]);
    assert_eq!(cached_tokens(&found), [0, 0, 0, 320, 0, 320]);
    assert!(found.iter().all(|found| found["token_ids"] == case["greedy_ids"]));
    let found = generate(&lines, &["--cache-salt", "c"]);
    assert_eq!(cached_tokens(&found), [0, 0, 0, 320, 320, 320]);
}

#[test]
fn a_salt_that_is_too_long_is_refused_by_its_length() {
    let prompt = ["generate", "--prompt-ids", "0,5", "--max-tokens", "1", "--cache-salt"];
    // Bytes count, not characters.
    let longest = "ß".repeat(128);
    succeed(&[&prompt[..], &[&longest]].concat());
    let too_long = longest + "x";
    fail_with(&[&prompt[..], &[&too_long]].concat(), &["cache_salt: 257 bytes", "at most 256"]);
}

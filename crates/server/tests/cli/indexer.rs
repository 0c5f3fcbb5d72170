//! What `generate --json` says of indexers, and the flags that change it.

use std::fs;

use serde_json::{Value, json};

use crate::generate::fields;
use crate::harness::{cases, fail_with, id_list, succeed, succeed_json};

/// Indexer launches of each draft step.
fn draft_launches(indexer: &Value) -> Vec<u64> {
    let steps = indexer["draft_steps"].as_array().unwrap();
    steps.iter().map(|counts| counts["launches"].as_u64().unwrap()).collect()
}

/// The first `max_tokens` of a case with three drafts a step, and the `indexer` of that.
fn run(case: &Value, max_tokens: usize, args: &[&str]) -> (Value, Value) {
    let (ids, max_tokens) = (id_list(&case["prompt_ids"]), max_tokens.to_string());
    let fixed = ["generate", "--dtype", "float32", "--json", "--max-tokens", &max_tokens];
    let found = succeed_json(&[&fixed[..], &["--prompt-ids", &ids], args].concat());
    let indexer = found["indexer"].clone();
    (found, indexer)
}

/// Checks the drafts against a run of the reference; the token limit may cut the last step.
fn check_accepted(found: &Value, expected: &Value) {
    let found = found["spec_decode"]["accepted_per_step"].as_array().unwrap();
    let expected = expected["accepted_per_step"].as_array().unwrap();
    assert_eq!(found.len(), expected.len());
    assert_eq!(found[..found.len() - 1], expected[..expected.len() - 1]);
}

#[test]
fn drafts_run_one_indexer_a_propose_with_sharing_and_one_a_step_without() {
    // This case is longer than `index_topk`, and its drafts differ between the two.
    let case = &cases()[12];
    let speculation = &case["speculation"];
    let (shared, with) = run(case, 32, &["--index-share", "on"]);
    let (plain, without) = run(case, 32, &["--index-share", "off"]);
    for (found, indexer, expected) in [
        (&shared, &with, &speculation["k=3"]),
        (&plain, &without, &speculation["k=3,no_index_share"]),
    ] {
        assert_eq!(found["token_ids"], case["greedy_ids"]);
        check_accepted(found, expected);
        let names = ["draft_steps", "index_share", "target_prefill", "target_verify"];
        assert_eq!(fields(indexer), names);
        assert_eq!(fields(&indexer["target_verify"]), ["launches", "rows", "scored_keys"]);
        // Three of the target's five layers have an indexer; the prompt is one pass.
        assert_eq!(indexer["target_prefill"]["launches"], 3);
        let n_steps = found["spec_decode"]["accepted_per_step"].as_array().unwrap().len();
        assert_eq!(indexer["target_verify"]["launches"], 3 * n_steps);
        assert!(indexer["target_verify"]["scored_keys"].as_u64().unwrap() > 0);
    }
    assert_eq!((&with["index_share"], &without["index_share"]), (&json!(true), &json!(false)));

    // One propose behind the prompt, one behind each verify step.
    let n_proposes = |found: &Value| {
        1 + found["spec_decode"]["drafts_per_step"].as_array().unwrap().len() as u64
    };
    assert_eq!(draft_launches(&with), [n_proposes(&shared), 0, 0]);
    assert_eq!(with["draft_steps"][1], json!({"launches": 0, "rows": 0, "scored_keys": 0}));
    let launches = draft_launches(&without);
    assert_eq!(launches[0], n_proposes(&plain));
    // Near its end a request asks for fewer drafts.
    assert!(launches[2] + 2 >= launches[0] && launches.is_sorted_by(|a, b| a >= b), "{launches:?}");
    let (_, auto) = run(case, 32, &[]);
    assert_eq!(auto, with, "the checkpoint's config turns sharing on");
}

#[test]
fn contexts_within_index_topk_score_no_key_whatever_the_index_cache() {
    let case = &cases()[11];
    let tokens = &case["greedy_ids"].as_array().unwrap()[..40];
    for dtype in ["auto", "fp8"] {
        let (found, indexer) = run(case, 40, &["--index-cache-dtype", dtype]);
        assert_eq!(found["token_ids"].as_array().unwrap(), tokens, "{dtype}");
        for kind in ["target_prefill", "target_verify"] {
            assert_eq!(indexer[kind]["scored_keys"], 0, "{dtype}");
            assert_ne!(indexer[kind]["rows"], 0, "{dtype}");
        }
    }
}

#[test]
fn an_fp8_index_cache_serves_contexts_beyond_index_topk() {
    let case = &cases()[12];
    let (found, indexer) = run(case, 32, &["--index-cache-dtype", "fp8"]);
    assert_eq!(found["usage"]["completion_tokens"], 32);
    assert_ne!(indexer["target_verify"]["scored_keys"], 0);
}

#[test]
fn counts_are_of_the_whole_run_and_stop_at_the_drafts_of_the_run() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("prompts.jsonl");
    let cases = cases();
    let lines = cases[..3].iter().map(|case| json!({"prompt_ids": case["prompt_ids"]}));
    fs::write(&file, lines.map(|line| format!("{line}\n")).collect::<String>()).unwrap();
    let args = ["generate", "--prompts", file.to_str().unwrap(), "--max-tokens", "8", "--json"];
    for k in [0, 2] {
        let k_arg = k.to_string();
        let output = succeed(&[&args[..], &["--num-speculative-tokens", &k_arg]].concat());
        let lines: Vec<Value> =
            output.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines.len(), 3);
        let indexer = &lines[0]["indexer"];
        assert!(lines.iter().all(|line| line["indexer"] == *indexer));
        assert_eq!(indexer["index_share"], k > 0);
        assert_eq!(indexer["draft_steps"].as_array().unwrap().len(), k);
        // Three layers of the target select for every token of every prompt.
        let n_tokens: usize =
            lines.iter().map(|line| line["prompt_ids"].as_array().unwrap().len()).sum();
        assert!(indexer["target_prefill"]["rows"].as_u64().unwrap() >= 3 * n_tokens as u64);
    }
}

#[test]
fn sharing_is_refused_where_nothing_can_be_shared() {
    let on = ["generate", "--prompt-ids", "0,5", "--index-share", "on"];
    let with = |args: &[&'static str]| [&on, args].concat();
    let way_out = ["--index-share on", "auto"];
    let dense = with(&["--model", "tiny-dsv3"]);
    fail_with(&dense, &[&way_out[..], &["attention is dense"]].concat());
    let undrafted = with(&["--num-speculative-tokens", "0"]);
    fail_with(&undrafted, &[&way_out[..], &["num_speculative_tokens is 0"]].concat());
    let fp8 = ["--index-cache-dtype", "fp8"];
    let dense_keys = [&["generate", "--prompt-ids", "0,5", "--model", "tiny-dsv3"], &fp8[..]];
    fail_with(&dense_keys.concat(), &["--index-cache-dtype fp8", "dense", "auto"]);
    fail_with_usage("--index-share", "maybe", "auto, on, off");
    fail_with_usage("--index-cache-dtype", "fp4", "auto, fp8");
}

/// A value that is not one of a flag's is refused with those that are.
fn fail_with_usage(flag: &str, value: &str, values: &str) {
    fail_with(&["generate", "--prompt-ids", "0", flag, value], &[flag, value, values]);
}

//! `tandem generate`: results, their schema, their order, and refusals.

use std::fs;

use serde_json::{Value, json};

use crate::harness::{
    Checkpoint, cases, cases_of, fail_with, id_list, succeed, succeed_json, tandem,
};

/// The fields of a line; `indexer` is there for models with sparse attention only.
const FIELDS: [&str; 7] =
    ["finish_reason", "indexer", "prompt_ids", "spec_decode", "text", "token_ids", "usage"];
const SPEC_DECODE_FIELDS: [&str; 5] = [
    "acceptance_length",
    "accepted_per_step",
    "drafts_per_step",
    "num_accepted_tokens",
    "num_draft_tokens",
];

/// Names of an object's fields, sorted.
pub(crate) fn fields(object: &Value) -> Vec<&str> {
    let mut fields: Vec<&str> = object.as_object().unwrap().keys().map(String::as_str).collect();
    fields.sort_unstable();
    fields
}

fn generate_json(args: &[&str]) -> Value {
    let fixed = ["generate", "--dtype", "float32", "--max-tokens", "48", "--json"];
    succeed_json(&[&fixed[..], args].concat())
}

#[test]
fn json_has_every_field_and_the_reference_values() {
    let case = &cases()[0];
    let ids = id_list(&case["prompt_ids"]);
    let found = generate_json(&["--prompt-ids", &ids, "--num-speculative-tokens", "3"]);
    assert_eq!(fields(&found), FIELDS);
    assert_eq!(fields(&found["usage"]), ["cached_tokens", "completion_tokens", "prompt_tokens"]);
    let spec_decode = &found["spec_decode"];
    assert_eq!(fields(spec_decode), SPEC_DECODE_FIELDS);

    assert_eq!(found["prompt_ids"], case["prompt_ids"]);
    assert_eq!(found["token_ids"], case["greedy_ids"]);
    assert_eq!(found["text"], case["greedy_text"]);
    assert_eq!(found["finish_reason"], "length");
    let n_prompt = case["prompt_ids"].as_array().unwrap().len();
    let usage = json!({"prompt_tokens": n_prompt, "completion_tokens": 48, "cached_tokens": 0});
    assert_eq!(found["usage"], usage);

    let list = |value: &Value| value.as_array().unwrap().clone();
    let accepted = list(&spec_decode["accepted_per_step"]);
    let expected = list(&case["speculation"]["k=3"]["accepted_per_step"]);
    // The token limit cuts the last step; the reference counts it whole.
    assert_eq!(accepted[..accepted.len() - 1], expected[..expected.len() - 1]);
    let drafts = list(&spec_decode["drafts_per_step"]);
    assert_eq!((drafts.len(), &drafts[0]), (accepted.len(), &case["first_drafts"]));
    let n_accepted: u64 = accepted.iter().map(|count| count.as_u64().unwrap()).sum();
    let n_drafts: usize = drafts.iter().map(|drafts| list(drafts).len()).sum();
    assert_eq!(spec_decode["num_accepted_tokens"], n_accepted);
    assert_eq!(spec_decode["num_draft_tokens"], n_drafts);
    let length = 1.0 + n_accepted as f64 / accepted.len() as f64;
    assert!((spec_decode["acceptance_length"].as_f64().unwrap() - length).abs() < 1e-9);
}

#[test]
fn without_drafting_the_text_is_the_same_and_no_step_is_counted() {
    let case = &cases()[0];
    let prompt = case["prompt"].as_str().unwrap();
    let found = generate_json(&["--prompt", prompt, "--num-speculative-tokens", "0"]);
    assert_eq!(found["prompt_ids"], case["prompt_ids"]);
    assert_eq!(found["text"], case["greedy_text"]);
    let nothing = json!({
        "num_draft_tokens": 0, "num_accepted_tokens": 0, "accepted_per_step": [],
        "drafts_per_step": [], "acceptance_length": null,
    });
    assert_eq!(found["spec_decode"], nothing);
}

#[test]
fn both_bundled_models_run_by_name() {
    for (model, has_indexer) in [("tiny-glm52", true), ("tiny-dsv3", false)] {
        let case = &cases_of(model)[0];
        let ids = id_list(&case["prompt_ids"]);
        let found = generate_json(&["--model", model, "--prompt-ids", &ids]);
        assert_eq!(found["token_ids"], case["greedy_ids"], "{model}");
        assert_eq!(found.get("indexer").is_some(), has_indexer, "{model}");
    }
}

#[test]
fn plain_output_is_the_text_alone() {
    let case = &cases()[0];
    let prompt = case["prompt"].as_str().unwrap();
    let args = ["generate", "--dtype", "float32", "--max-tokens", "48", "--prompt", prompt];
    assert_eq!(succeed(&args), format!("{}\n", case["greedy_text"].as_str().unwrap()));
}

#[test]
fn the_log_goes_to_standard_error_without_colours_for_a_file() {
    let mut command = tandem();
    command.args(["generate", "--prompt-ids", "0,5", "--max-tokens", "3", "--json"]);
    let output = command.env("RUST_LOG", "info").output().unwrap();
    let result: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(result["usage"]["completion_tokens"], 3);
    let log = String::from_utf8(output.stderr).unwrap();
    assert!(log.contains("loading") && log.contains("tokens_per_second"), "{log}");
    assert!(!log.contains('\x1b'), "{log:?}");
}

#[test]
fn a_folder_without_tokenizer_takes_ids_and_refuses_text() {
    let checkpoint = Checkpoint::copy_of("tiny-glm52");
    fs::remove_file(checkpoint.file("tokenizer.json")).unwrap();
    fs::remove_file(checkpoint.file("tokenizer_config.json")).unwrap();
    let case = &cases()[1];
    let ids = id_list(&case["prompt_ids"]);
    let found = generate_json(&["--model", checkpoint.as_str(), "--prompt-ids", &ids]);
    assert_eq!(found["token_ids"], case["greedy_ids"]);
    assert_eq!(found.get("text"), None);
    assert_eq!(fields(&found), FIELDS.into_iter().filter(|f| *f != "text").collect::<Vec<_>>());

    let text = ["generate", "--model", checkpoint.as_str(), "--prompt", "hello"];
    fail_with(&text, &["no tokenizer.json", "give token ids"]);
}

#[test]
fn a_file_of_prompts_gives_a_line_each_in_order() {
    // This model ends the case of the last line with EOS.
    let cases = cases_of("tiny-dsv3");
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("prompts.jsonl");
    let mut lines = String::new();
    // Limits fall, so that later prompts end before earlier ones; the last line sets its own k.
    for (idx, case) in cases[..8].iter().enumerate() {
        let line = match idx % 2 {
            0 => json!({"prompt": case["prompt"], "max_tokens": 44 - 4 * idx}),
            _ => json!({"prompt_ids": case["prompt_ids"], "max_tokens": 44 - 4 * idx}),
        };
        lines += &format!("{line}\n\n");
    }
    let last = json!({"prompt_ids": cases[8]["prompt_ids"], "num_speculative_tokens": 0});
    fs::write(&file, format!("{lines}{last}")).unwrap();

    let file = file.to_str().unwrap();
    let args = ["generate", "--model", "tiny-dsv3", "--dtype", "float32", "--max-tokens", "48"];
    let output = succeed(&[&args[..], &["--prompts", file, "--json"]].concat());
    let found: Vec<Value> =
        output.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(found.len(), 9);
    for (idx, (found, case)) in found[..8].iter().zip(&cases).enumerate() {
        let expected = &case["greedy_ids"].as_array().unwrap()[..44 - 4 * idx];
        assert_eq!(found["prompt_ids"], case["prompt_ids"]);
        assert_eq!(found["token_ids"].as_array().unwrap(), expected, "line of case {idx}");
    }
    assert_eq!(found[8]["token_ids"], cases[8]["greedy_ids"]);
    assert_eq!(found[8]["finish_reason"], "stop");
    assert_eq!(found[8]["spec_decode"]["num_draft_tokens"], 0);
}

#[test]
fn bad_lines_are_refused_by_number() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("prompts.jsonl");
    let path = file.to_str().unwrap();
    let bad = [
        (r#"{"prompt":"#, "EOF"),
        ("[]", "prompts.jsonl"),
        ("{}", "exactly one of `prompt` and `prompt_ids`"),
        (r#"{"prompt":"a","prompt_ids":[1]}"#, "exactly one of `prompt` and `prompt_ids`"),
        (r#"{"prompt":""}"#, "`prompt` is empty"),
        (r#"{"prompt_ids":[]}"#, "`prompt_ids` is empty"),
        (r#"{"prompt_ids":[0,4096]}"#, "4096 is not a token id"),
        (r#"{"prompt_ids":[-1]}"#, "-1 is not a token id"),
        (r#"{"prompt":"a","max_tokens":0}"#, "max_tokens"),
        (r#"{"prompt":"a","num_speculative_tokens":4}"#, "num_speculative_tokens: 4"),
        (r#"{"prompt":"a","stop_token_ids":[4096]}"#, "stop_token_ids"),
        (r#"{"prompt":"a","max_token":3}"#, "max_token"),
        (r#"{"prompt":"a","cache_salt":""}"#, "cache_salt: it is empty"),
        (r#"{"prompt":"a","cache_salt":7}"#, "expected a string"),
    ];
    for (line, expected) in bad {
        fs::write(&file, format!("{{\"prompt\":\"a\",\"max_tokens\":2}}\n\n{line}\n")).unwrap();
        fail_with(&["generate", "--json", "--prompts", path], &["line 3", expected]);
    }
    fs::write(&file, "\n").unwrap();
    fail_with(&["generate", "--prompts", path], &["holds no prompt"]);
    let absent = dir.path().join("absent.jsonl");
    fail_with(&["generate", "--prompts", absent.to_str().unwrap()], &["absent.jsonl"]);
}

#[test]
fn a_stop_text_ends_the_text_right_before_it() {
    let case = &cases()[0];
    let (text, ids) = (case["greedy_text"].as_str().unwrap(), id_list(&case["prompt_ids"]));
    // Three characters from the middle, wherever tokens divide them.
    let start = text.char_indices().nth(text.chars().count() / 2).unwrap().0;
    let stop: String = text[start..].chars().take(3).collect();
    let start = text.find(&stop).unwrap();
    for k in ["0", "3"] {
        let found = generate_json(&[
            "--prompt-ids",
            &ids,
            "--num-speculative-tokens",
            k,
            "--stop",
            "\u{1}",
            "--stop",
            &stop,
        ]);
        assert_eq!(found["text"], text[..start], "k = {k}");
        assert_eq!(found["finish_reason"], "stop");
        let tokens = found["token_ids"].as_array().unwrap();
        assert_eq!(tokens[..], case["greedy_ids"].as_array().unwrap()[..tokens.len()]);
        assert_eq!(found["usage"]["completion_tokens"], tokens.len());
    }
}

#[test]
fn sampled_continuations_differ_and_a_seed_makes_them_reproducible() {
    let run = |seed: &str| -> Vec<Value> {
        let args = ["generate", "--json", "--prompt", "def f(x):\n", "--max-tokens", "24"];
        let sampling = ["--ignore-eos", "--temperature", "0.9", "--n", "2", "--seed", seed];
        let output = succeed(&[&args[..], &sampling, &["--logprobs", "2"]].concat());
        output.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let first = run("7");
    assert_eq!(first.len(), 2);
    assert_ne!(first[0]["token_ids"], first[1]["token_ids"]);
    assert_ne!(run("8")[0]["token_ids"], first[0]["token_ids"]);
    for (again, first) in run("7").iter().zip(&first) {
        assert_eq!(again["token_ids"], first["token_ids"]);
        assert_eq!(again["logprobs"], first["logprobs"]);
        let logprobs = first["logprobs"].as_array().unwrap();
        assert_eq!(logprobs.len(), 24);
        for entry in logprobs {
            let top = entry["top"].as_array().unwrap();
            let likeliest = top[0]["logprob"].as_f64().unwrap();
            assert!(top.len() == 2 && likeliest <= 0.0, "{entry}");
            assert!(entry["logprob"].as_f64().unwrap() <= likeliest, "{entry}");
        }
    }
}

#[test]
fn bad_flags_are_refused_by_name() {
    let with = |args: &[&'static str]| [&["generate"], args].concat();
    fail_with(&with(&[]), &["--prompt"]);
    fail_with(&with(&["--prompt", "a", "--prompt-ids", "1"]), &["--prompt-ids"]);
    fail_with(&with(&["--prompt", ""]), &["`prompt` is empty"]);
    fail_with(&with(&["--prompt-ids", ""]), &["`prompt_ids` is empty"]);
    fail_with(&with(&["--prompt-ids", "-1"]), &["-1 is not a token id"]);
    fail_with(&with(&["--prompt-ids", "0,4096"]), &["4096 is not a token id"]);
    fail_with(&with(&["--prompt-ids", "0,x"]), &["`x` is not a token id"]);
    fail_with(&with(&["--prompt", "a", "--max-tokens", "0"]), &["max_tokens"]);
    let prompt = |args: &[&'static str]| [&["generate", "--prompt", "a"], args].concat();
    fail_with(&prompt(&["--temperature", "-1"]), &["temperature: it is -1", "at least 0"]);
    fail_with(&prompt(&["--temperature", "NaN"]), &["temperature: it is NaN"]);
    fail_with(&prompt(&["--top-p", "0"]), &["top_p: it is 0", "above 0"]);
    fail_with(&prompt(&["--min-p", "1.5"]), &["min_p: it is 1.5"]);
    fail_with(&prompt(&["--json", "--logprobs", "21"]), &["logprobs: it is 21", "0 to 20"]);
    fail_with(&prompt(&["--logprobs", "1"]), &["--json"]);
    fail_with(&prompt(&["--stop", ""]), &["--stop: a text is empty"]);
    fail_with(&with(&["--prompt", "a", "--cache-salt", ""]), &["cache_salt: it is empty"]);
    let nine = with(&["--prompt", "a", "--num-speculative-tokens", "9"]);
    fail_with(&nine, &["num_speculative_tokens is 9", "at most 8"]);
    fail_with(&with(&["--prompt", "a", "--model", "tiny"]), &["`tiny`", "tiny-dsv3"]);
    fail_with(&prompt(&["--device", "tpu"]), &["--device", "auto, cpu, cuda:N or rocm:N"]);
    // No machine has so many.
    fail_with(&prompt(&["--device", "rocm:4000"]), &["--device"]);
    fail_with(&prompt(&["--gpu-memory-utilization", "1.5"]), &["above 0 and up to 1"]);
}

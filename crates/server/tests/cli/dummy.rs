//! Models of a config alone: `--load-format dummy`.

use std::fs;

use serde_json::Value;
use tempfile::TempDir;

use crate::harness::{fail_with, succeed, succeed_json};

/// A folder with nothing but the configuration `glm52-lite`, made small.
pub(crate) fn small_config() -> TempDir {
    let source = bundled_checkpoints::resolve("glm52-lite", None).unwrap().join("config.json");
    let mut config: Value = serde_json::from_str(&fs::read_to_string(source).unwrap()).unwrap();
    for (field, value) in [
        ("vocab_size", 512),
        ("hidden_size", 64),
        ("intermediate_size", 64),
        ("moe_intermediate_size", 32),
        ("num_hidden_layers", 5),
        ("n_routed_experts", 16),
        ("num_attention_heads", 2),
        ("num_key_value_heads", 2),
        ("q_lora_rank", 32),
        ("kv_lora_rank", 32),
        ("index_topk", 8),
        ("index_n_heads", 2),
    ] {
        assert!(config[field].is_u64(), "{field}");
        config[field] = value.into();
    }
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    dir
}

#[test]
fn a_config_alone_generates_the_same_on_every_run() {
    let dir = small_config();
    let model = ["--model", dir.path().to_str().unwrap(), "--load-format", "dummy"];
    let run = |args: &[&str]| {
        let fixed = ["generate", "--prompt-ids", "5,3,500,7,7,1,0,2,9,10", "--max-tokens", "24"];
        succeed_json(&[&fixed[..], &["--ignore-eos", "--json"], &model, args].concat())
    };
    let found = run(&["--dtype", "float32"]);
    assert_eq!(found["usage"]["completion_tokens"], 24);
    assert_eq!(found.get("text"), None, "there is no tokenizer");
    assert_eq!(found["spec_decode"]["drafts_per_step"][0].as_array().unwrap().len(), 3);
    for args in [&["--threads", "1"][..], &["--num-speculative-tokens", "0"]] {
        let again = run(&[&["--dtype", "float32"], args].concat());
        assert_eq!(again["token_ids"], found["token_ids"], "{args:?}");
    }
    let scored =
        succeed_json(&[&["score", "--json", "--prompt-ids", "5,3,500"], &model[..]].concat());
    assert_eq!(scored["prompt_logprobs"].as_array().unwrap().len(), 2);
}

#[test]
fn text_is_refused_where_there_is_no_tokenizer() {
    let dir = small_config();
    let model = ["--model", dir.path().to_str().unwrap(), "--load-format", "dummy"];
    let refused = |args: &[&str], expected: &[&str]| fail_with(&[args, &model].concat(), expected);
    refused(&["generate", "--prompt", "a"], &["no tokenizer.json", "give token ids"]);
    refused(&["score", "--prompt", "a"], &["no tokenizer.json", "give token ids"]);
    let stop = ["generate", "--prompt-ids", "1", "--stop", "a"];
    refused(&stop, &["--stop", "no tokenizer.json", "--stop-token-ids"]);
    refused(&["chat"], &["no chat template"]);
    let template = dir.path().join("template.jinja");
    fs::write(&template, "{{ messages }}").unwrap();
    refused(&["chat", "--chat-template", template.to_str().unwrap()], &["no tokenizer.json"]);
}

#[test]
fn without_the_flag_the_missing_weights_and_the_way_out_are_named() {
    for model in ["glm52-lite", "dsv3-lite"] {
        let expected = [model, "has no weights", "--load-format dummy"];
        let prompt = ["--model", model, "--prompt-ids", "1"];
        fail_with(&[&["generate"], &prompt[..]].concat(), &expected);
        fail_with(&[&["score"], &prompt[..]].concat(), &expected);
        fail_with(&["serve", "--port", "0", "--model", model], &expected);
    }
}

#[test]
fn a_config_alone_is_described() {
    for (model, parameters, kv_bytes, index_bytes) in [
        ("glm52-lite", 4_915_372_160_u64, 19_584, Some(7 * 128 * 2)),
        ("dsv3-lite", 16_014_515_904, 32_256, None),
    ] {
        let found = succeed_json(&["inspect", "--json", model]);
        assert_eq!(found["parameters"]["total"], parameters);
        assert_eq!(found["kv_bytes_per_token"], kv_bytes);
        assert_eq!(found["index_bytes_per_token"].as_u64(), index_bytes);
        assert_eq!((&found["source"], &found["loads"]), (&"config".into(), &true.into()));
        let text = succeed(&["inspect", model]);
        assert!(text.contains("by the config: there are no weights here"), "{text}");
    }
}

//! `tandem inspect`: what a checkpoint is, also where it cannot run.

use std::fs;

use serde_json::{Value, json};

use crate::harness::{
    Checkpoint, INDEX, LAST_SHARD, MTP_PREFIX, fail_with, succeed, succeed_json, tandem,
};

/// Whether `text` has a line with `label` that ends with `value`.
fn has_line(text: &str, label: &str, value: &str) -> bool {
    text.lines().any(|line| line.trim_start().starts_with(label) && line.ends_with(value))
}

/// What is said of a checkpoint that would not load.
pub(crate) fn refused(args: &[&str]) -> String {
    let output = tandem().args(args).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(1) && stderr.is_empty(), "{args:?}: {stderr}");
    String::from_utf8(output.stdout).unwrap()
}

fn refused_json(args: &[&str]) -> Value {
    serde_json::from_str(&refused(args)).unwrap()
}

#[test]
fn the_bundled_checkpoint_is_described() {
    let found = succeed_json(&["inspect", "--json", "tiny-dsv3"]);
    let expected = json!({
        "architecture": "DeepseekV3ForCausalLM", "model_type": "deepseek_v3",
        "dtype": "bfloat16", "bytes": 15_174_208, "num_hidden_layers": 5, "num_mtp_layers": 1,
        "num_mtp_layers_present": 1, "is_mtp_complete": true, "quantization": null,
        "index_topk": null, "index_share_for_mtp_iteration": null, "source": "shards",
        "loads": true, "problems": [], "gpu": null, "loaded_bytes": 15_215_168,
        "index_bytes_per_token": null,
        // Six layers of 64 latent and 16 rope values in two bytes each.
        "kv_bytes_per_token": 960,
    });
    for (field, value) in expected.as_object().unwrap() {
        assert_eq!(&found[field], value, "{field}");
    }
    let parameters = found["parameters"].as_object().unwrap();
    assert_eq!(parameters["total"], 7_587_024);
    let sum: u64 = parameters.values().map(|count| count.as_u64().unwrap()).sum();
    assert_eq!(sum, 2 * 7_587_024, "the parts sum up to the total");

    let text = succeed(&["inspect", "tiny-dsv3"]);
    for (label, value) in [
        ("architecture", "DeepseekV3ForCausalLM"),
        ("parameters", "7,587,024"),
        ("bytes", "15,174,208"),
        ("KV bytes a token", "960"),
        ("MTP layers", "1 in the config, 1 in the files, complete"),
        ("quantisation", "none"),
    ] {
        assert!(has_line(&text, label, value), "{label} {value} is not in\n{text}");
    }
    assert!(!text.contains("cannot"), "{text}");
    assert!(!text.contains("sparse attention") && !text.contains("index bytes"), "{text}");
}

#[test]
fn sparse_attention_is_described() {
    let found = succeed_json(&["inspect", "--json", "tiny-glm52"]);
    let expected = json!({
        "architecture": "GlmMoeDsaForCausalLM", "model_type": "glm_moe_dsa",
        "bytes": 15_380_032, "num_mtp_layers_present": 1, "is_mtp_complete": true,
        "loads": true, "kv_bytes_per_token": 960, "index_topk": 64, "index_n_heads": 4,
        "index_head_dim": 32, "num_full_index_layers": 3, "num_shared_index_layers": 2,
        "index_share_for_mtp_iteration": true,
        // Three layers that select and the MTP layer, a key of 32 values in two bytes each.
        "index_bytes_per_token": 256,
    });
    for (field, value) in expected.as_object().unwrap() {
        assert_eq!(&found[field], value, "{field}");
    }
    let text = succeed(&["inspect", "tiny-glm52"]);
    for (label, value) in [
        ("architecture", "GlmMoeDsaForCausalLM"),
        ("sparse attention", "a row attends 64 keys at most"),
        ("indexer heads", "4 of width 32"),
        ("layers", "3 select, 2 share"),
        ("draft steps", "share the selection of the first"),
        ("index bytes a token", "256"),
        ("MTP layers", "1 in the config, 1 in the files, complete"),
    ] {
        assert!(has_line(&text, label, value), "{label} {value} is not in\n{text}");
    }
    assert!(!text.contains("cannot"), "{text}");
}

#[test]
fn a_checkpoint_that_cannot_run_is_described_all_the_same() {
    let checkpoint = Checkpoint::copy_of("tiny-glm52");
    let config = checkpoint.file("config.json");
    let whole = fs::read_to_string(&config).unwrap();
    for (model_type, rank) in [("glm_of_tomorrow", json!(128)), ("glm_moe_dsa", json!(null))] {
        let mut object: Value = serde_json::from_str(&whole).unwrap();
        object["model_type"] = json!(model_type);
        object["q_lora_rank"] = rank.clone();
        fs::write(&config, object.to_string()).unwrap();
        let at_fault = if rank.is_null() { "q_lora_rank" } else { model_type };

        let found = refused_json(&["inspect", "--json", checkpoint.as_str()]);
        assert_eq!(found["architecture"], "GlmMoeDsaForCausalLM");
        assert_eq!((&found["bytes"], &found["index_topk"]), (&json!(15_380_032), &json!(64)));
        assert_eq!(found["is_mtp_complete"], json!(null));
        assert_eq!(found["loads"], false);
        assert!(found["problems"][0]["text"].as_str().unwrap().contains(at_fault), "{found}");

        let text = refused(&["inspect", checkpoint.as_str()]);
        assert!(has_line(&text, "index bytes a token", "256"), "{text}");
        let refusal = text.lines().find(|line| line.starts_with("cannot load")).unwrap();
        assert!(refusal.contains(at_fault), "{refusal}");
    }
}

#[test]
fn an_incomplete_mtp_layer_shows() {
    for (model, lost) in
        [("tiny-dsv3", "eh_proj.weight"), ("tiny-glm52", "self_attn.indexer.k_norm.bias")]
    {
        let checkpoint = Checkpoint::copy_of(model);
        let gone = format!("{MTP_PREFIX}{lost}");
        checkpoint.edit_weight_map(|map| assert!(map.remove(&gone).is_some()));
        let found = refused_json(&["inspect", "--json", checkpoint.as_str()]);
        assert_eq!(found["is_mtp_complete"], false, "{model}");
        assert!(refused(&["inspect", checkpoint.as_str()]).contains("INCOMPLETE"), "{model}");
        // It loads without drafting.
        let plain = ["inspect", checkpoint.as_str(), "--num-speculative-tokens", "0"];
        let text = succeed(&plain);
        assert!(text.contains("INCOMPLETE") && !text.contains(&gone), "{text}");
        let found = succeed_json(&[&plain[..], &["--json"]].concat());
        assert_eq!((&found["is_mtp_complete"], &found["problems"]), (&json!(false), &json!([])));
    }
}

#[test]
fn what_is_no_checkpoint_is_refused() {
    fail_with(&["inspect", "no-such-model"], &["`no-such-model`", "tiny-dsv3"]);
    let empty = tempfile::tempdir().unwrap();
    fail_with(&["inspect", empty.path().to_str().unwrap()], &["config.json"]);
}

#[test]
fn a_config_with_an_index_or_alone_is_enough() {
    let checkpoint = Checkpoint::copy();
    for shard in ["model-00001-of-00002.safetensors", LAST_SHARD] {
        fs::remove_file(checkpoint.file(shard)).unwrap();
    }
    for (source, mtp) in [("index", json!(true)), ("config", json!(null))] {
        let found = succeed_json(&["inspect", "--json", checkpoint.as_str()]);
        assert_eq!((&found["source"], &found["is_mtp_complete"]), (&json!(source), &mtp));
        assert_eq!(found["parameters"]["total"], 7_587_024);
        assert!(succeed(&["inspect", checkpoint.as_str()]).contains("by the"));
        let _ = fs::remove_file(checkpoint.file(INDEX));
    }
}

#[test]
fn what_no_file_says_is_not_made_up() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("config.json"), r#"{"model_type": "other"}"#).unwrap();
    let dir = dir.path().to_str().unwrap();
    let found = refused_json(&["inspect", "--json", dir, "--gpu-memory", "80GB"]);
    for field in ["parameters", "bytes", "loaded_bytes", "kv_bytes_per_token", "gpu"] {
        assert_eq!(found[field], json!(null), "{field}");
    }
    assert!(refused(&["inspect", dir]).contains("`other`"));
}

#[test]
fn every_problem_is_listed() {
    let checkpoint = Checkpoint::copy();
    checkpoint.edit_weight_map(|map| map.retain(|name, _| !name.contains("layers.1.mlp.experts")));
    let config = fs::read_to_string(checkpoint.file("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&config).unwrap();
    config["hidden_act"] = json!("gelu");
    fs::write(checkpoint.file("config.json"), config.to_string()).unwrap();
    fs::write(checkpoint.file("tokenizer.json"), "{}").unwrap();
    fs::write(checkpoint.file("chat_template.jinja"), "{% if %}").unwrap();
    let found = refused_json(&["inspect", "--json", checkpoint.as_str()]);
    let problems = found["problems"].as_array().unwrap();
    let texts: Vec<&str> = problems.iter().map(|each| each["text"].as_str().unwrap()).collect();
    assert_eq!(texts.len(), 4, "{texts:?}");
    let lost = "model.layers.1.mlp.experts.15.up_proj.weight is missing";
    let needles = ["gelu", lost, "tokenizer.json", "chat_template.jinja:1: "];
    for (text, needle) in texts.iter().zip(needles) {
        assert!(text.contains(needle), "{text}");
    }
    // A long list is cut for readers, not for programs.
    let text = refused(&["inspect", checkpoint.as_str()]);
    assert!(text.contains("more, see --json") && !text.contains(lost), "{text}");
}

#[test]
fn a_gpu_of_a_size_is_filled() {
    let args = ["inspect", "--json", "tiny-dsv3", "--gpu-memory", "16MiB", "--context", "128"];
    let args = [&args[..], &["--batch", "4", "--gpu-memory-utilization", "1"]].concat();
    let found = succeed_json(&args);
    let gpu = &found["gpu"];
    let (usable, token) = (16 << 20, 960);
    let weights = found["loaded_bytes"].as_u64().unwrap();
    assert_eq!((&gpu["usable_bytes"], &gpu["cache_bytes"]), (&json!(usable), &json!(512 * token)));
    let expected = json!({
        "weight_bytes": weights, "left_bytes": usable - weights - 512 * token,
        "max_sequences": (usable - weights) / (128 * token),
        "max_context": (usable - weights) / (4 * token),
    });
    assert_eq!(gpu["as_loaded"], expected);
    assert_eq!(gpu["as_stored"]["weight_bytes"], found["bytes"]);
    let text = succeed(&["inspect", "tiny-dsv3", "--gpu-memory", "1GiB", "--batch", "1"]);
    // No sequence is longer than the model allows.
    assert!(has_line(&text, "context", "at most 4,096 tokens for 1 sequences"), "{text}");
    fail_with(&["inspect", "tiny-dsv3", "--gpu-memory", "much"], &["--gpu-memory", "141GiB"]);
}

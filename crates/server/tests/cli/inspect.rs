//! `tandem inspect`: what a checkpoint is, also where it cannot run.

use std::fs;

use serde_json::{Value, json};

use crate::harness::{Checkpoint, MTP_PREFIX, fail_with, succeed, succeed_json};

/// Whether `text` has a line with `label` that ends with `value`.
fn has_line(text: &str, label: &str, value: &str) -> bool {
    text.lines().any(|line| line.trim_start().starts_with(label) && line.ends_with(value))
}

#[test]
fn the_bundled_checkpoint_is_described() {
    let found = succeed_json(&["inspect", "--json", "tiny-dsv3"]);
    let expected = json!({
        "architecture": "DeepseekV3ForCausalLM", "model_type": "deepseek_v3",
        "dtype": "bfloat16", "bytes": 15_174_208, "num_hidden_layers": 5, "num_mtp_layers": 1,
        "num_mtp_layers_present": 1, "is_mtp_complete": true, "quantization": null,
        "refusal": null, "index_topk": null, "index_share_for_mtp_iteration": null,
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
        ("parameters", "7587024"),
        ("bytes", "15174208"),
        ("KV bytes a token", "960"),
        ("MTP layers", "1 in the config, 1 in the files, complete"),
        ("quantisation", "none"),
    ] {
        assert!(has_line(&text, label, value), "{label} {value} is not in\n{text}");
    }
    assert!(!text.contains("not runnable"), "{text}");
    assert!(!text.contains("sparse attention") && !text.contains("index bytes"), "{text}");
}

#[test]
fn sparse_attention_is_described() {
    let found = succeed_json(&["inspect", "--json", "tiny-glm52"]);
    let expected = json!({
        "architecture": "GlmMoeDsaForCausalLM", "model_type": "glm_moe_dsa",
        "bytes": 15_380_032, "num_mtp_layers_present": 1, "is_mtp_complete": true,
        "refusal": null, "kv_bytes_per_token": 960, "index_topk": 64, "index_n_heads": 4,
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
    assert!(!text.contains("not runnable"), "{text}");
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

        let found = succeed_json(&["inspect", "--json", checkpoint.as_str()]);
        assert_eq!(found["architecture"], "GlmMoeDsaForCausalLM");
        assert_eq!((&found["bytes"], &found["index_topk"]), (&json!(15_380_032), &json!(64)));
        assert_eq!(found["is_mtp_complete"], json!(null));
        assert!(found["refusal"].as_str().unwrap().contains(at_fault), "{found}");

        let text = succeed(&["inspect", checkpoint.as_str()]);
        assert!(has_line(&text, "index bytes a token", "256"), "{text}");
        let refusal = text.lines().find(|line| line.starts_with("not runnable")).unwrap();
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
        let found = succeed_json(&["inspect", "--json", checkpoint.as_str()]);
        assert_eq!(found["is_mtp_complete"], false, "{model}");
        assert!(succeed(&["inspect", checkpoint.as_str()]).contains("INCOMPLETE"), "{model}");
    }
}

#[test]
fn what_is_no_checkpoint_is_refused() {
    fail_with(&["inspect", "no-such-model"], &["`no-such-model`", "tiny-dsv3"]);
    let empty = tempfile::tempdir().unwrap();
    fail_with(&["inspect", empty.path().to_str().unwrap()], &["config.json"]);
}

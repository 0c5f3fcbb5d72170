//! `tandem inspect`: what a checkpoint is, also where it cannot run.

use serde_json::json;

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
        "refusal": null,
        // Five layers of 64 latent and 32 rope values in two bytes each.
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
}

#[test]
fn a_checkpoint_that_cannot_run_is_described_all_the_same() {
    let found = succeed_json(&["inspect", "--json", "tiny-glm52"]);
    assert_eq!(found["architecture"], "GlmMoeDsaForCausalLM");
    assert_eq!((&found["bytes"], &found["index_topk"]), (&json!(15_380_032), &json!(64)));
    assert_eq!(found["is_mtp_complete"], json!(null));
    assert!(found["refusal"].as_str().unwrap().contains("glm_moe_dsa"), "{found}");

    let text = succeed(&["inspect", "tiny-glm52"]);
    assert!(has_line(&text, "architecture", "GlmMoeDsaForCausalLM"), "{text}");
    let refusal = text.lines().find(|line| line.starts_with("not runnable")).unwrap();
    assert!(refusal.contains("glm_moe_dsa"), "{refusal}");
}

#[test]
fn an_incomplete_mtp_layer_shows() {
    let checkpoint = Checkpoint::copy();
    let gone = format!("{MTP_PREFIX}eh_proj.weight");
    checkpoint.edit_weight_map(|map| assert!(map.remove(&gone).is_some()));
    let found = succeed_json(&["inspect", "--json", checkpoint.as_str()]);
    assert_eq!(found["is_mtp_complete"], false);
    assert!(succeed(&["inspect", checkpoint.as_str()]).contains("INCOMPLETE"));
}

#[test]
fn what_is_no_checkpoint_is_refused() {
    fail_with(&["inspect", "no-such-model"], &["`no-such-model`", "tiny-dsv3"]);
    let empty = tempfile::tempdir().unwrap();
    fail_with(&["inspect", empty.path().to_str().unwrap()], &["config.json"]);
}

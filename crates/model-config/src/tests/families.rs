//! Tests of what DeepSeek-V2 and GLM-4.5 have of their own.

use super::*;

fn glm45_air() -> Value {
    serde_json::from_str(include_str!("../../tests/configs/glm-4.5-air.json")).unwrap()
}

fn v2_lite() -> Value {
    serde_json::from_str(include_str!("../../tests/configs/deepseek-v2-lite.json")).unwrap()
}

fn read(mut config: Value, changes: Value) -> Result<ModelConfig, ConfigError> {
    for (field, value) in changes.as_object().unwrap() {
        config[field] = value.clone();
    }
    ModelConfig::from_raw(&RawConfig::parse(&config.to_string(), "config.json")?)
}

#[test]
fn glm45_air_has_grouped_queries_and_a_draft_layer() {
    let config = read(glm45_air(), json!({})).unwrap();
    assert_eq!(config.architecture, Architecture::Glm4Moe);
    let gqa = GqaConfig {
        num_heads: 96,
        num_kv_heads: 8,
        head_dim: 128,
        rope_dim: 64,
        has_bias: true,
        has_qk_norm: false,
    };
    assert_eq!(config.attention, AttentionConfig::Gqa(gqa));
    assert_eq!(config.softmax_scale(), 128f64.powf(-0.5));
    assert_eq!(config.kv_bytes_per_token(2), 2 * 8 * 128 * 47 * 2);
    assert!(!config.rope.interleaved && config.dsa.is_none() && !config.has_indexer(46));
    let moe = config.moe.as_ref().unwrap();
    assert_eq!((moe.scoring, moe.choice), (RouterScoring::Sigmoid, ExpertChoice::NoauxTc));
    let names: BTreeSet<String> = config.mtp_tensors(0).into_iter().map(|spec| spec.name).collect();
    for name in ["eh_proj.weight", "self_attn.v_proj.bias", "mlp.gate.e_score_correction_bias"] {
        assert!(names.contains(&format!("model.layers.46.{name}")), "{name}");
    }
    assert!(!names.iter().any(|name| name.contains("q_norm") || name.contains("o_proj.bias")));
}

#[test]
fn normalised_queries_and_keys_bring_two_tensors_a_layer() {
    let config = read(glm45_air(), json!({"use_qk_norm": true, "attention_bias": false})).unwrap();
    let specs = config.target_tensors();
    let of_layer = |end: &str| {
        specs
            .iter()
            .filter(|spec| spec.name.ends_with(end))
            .map(|spec| spec.shape.clone())
            .next_back()
    };
    assert_eq!(of_layer("q_norm.weight"), Some(vec![128]));
    assert_eq!(of_layer("k_norm.weight"), Some(vec![128]));
    assert_eq!(of_layer("v_proj.bias"), None);
    assert!(specs.iter().all(|spec| !spec.name.contains("k_norm")
        || (spec.load_dtype, spec.role()) == (LoadDtype::Model, TensorRole::Norm)));
}

#[test]
fn the_rotated_part_has_two_spellings_and_a_default() {
    let rope_dim = |changes| read(glm45_air(), changes).unwrap().attention.rope_dim();
    assert_eq!(rope_dim(json!({"partial_rotary_factor": null})), 64);
    assert_eq!(rope_dim(json!({"partial_rotary_factor": 1.0})), 128);
    let new = |factor: f64| json!({"rope_theta": 1e6, "partial_rotary_factor": factor});
    let only_new = json!({"partial_rotary_factor": null, "rope_parameters": new(0.25)});
    assert_eq!(rope_dim(only_new), 32);
    let error = read(glm45_air(), json!({"rope_parameters": new(0.25)})).unwrap_err();
    assert_eq!(error.field(), Some("partial_rotary_factor"));
}

#[test]
fn what_grouped_query_attention_cannot_be_is_refused_by_name() {
    let yarn = v2_lite()["rope_scaling"].clone();
    for (changes, field) in [
        (json!({"num_key_value_heads": 7}), "num_key_value_heads"),
        (json!({"num_key_value_heads": null}), "num_key_value_heads"),
        (json!({"partial_rotary_factor": 0.0}), "partial_rotary_factor"),
        (json!({"partial_rotary_factor": 1.5}), "partial_rotary_factor"),
        (json!({"partial_rotary_factor": 0.01}), "partial_rotary_factor"),
        (json!({"head_dim": 6}), "partial_rotary_factor"),
        (json!({"rope_scaling": yarn}), "rope_scaling"),
        (json!({"index_topk": 2048}), "index_topk"),
    ] {
        let error = read(glm45_air(), changes.clone()).expect_err(&changes.to_string());
        assert_eq!(error.field(), Some(field), "{changes}: {error}");
    }
}

/// The square of 0.1 * 0.707 * ln 40 + 1 on top of `qk_head_dim^-0.5`.
#[test]
fn yarn_scales_the_scores_of_v2() {
    let config = read(v2_lite(), json!({})).unwrap();
    let scale = config.softmax_scale() * 192f64.sqrt();
    assert!((scale - 1.589_626_2).abs() < 1e-6, "{scale}");
    assert_eq!(config.rope.yarn.as_ref().unwrap().cos_sin_scale(), 1.0);
}

#[test]
fn v2_defaults_are_those_of_its_class_and_not_of_v3() {
    let removed = json!({
        "scoring_func": null, "topk_method": null, "norm_topk_prob": null,
        "routed_scaling_factor": null
    });
    assert_eq!(read(v2_lite(), removed).unwrap(), read(v2_lite(), json!({})).unwrap());
    let error = read(v2_lite(), json!({"norm_topk_prob": true})).unwrap_err();
    assert_eq!(error.field(), Some("norm_topk_prob"));
}

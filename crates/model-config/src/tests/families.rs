//! Tests of what DeepSeek-V2 and GLM-4.5 have of their own.

use super::*;

/// The fields of GLM-4.5-Air's published config that say something of its layers.
fn glm45_air() -> Value {
    json!({
        "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe",
        "attention_bias": true, "eos_token_id": [151_329, 151_336, 151_338], "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 4096, "partial_rotary_factor": 0.5,
        "intermediate_size": 10_944, "max_position_embeddings": 131_072,
        "moe_intermediate_size": 1408, "norm_topk_prob": true, "num_attention_heads": 96,
        "n_group": 1, "topk_group": 1, "n_routed_experts": 128, "n_shared_experts": 1,
        "routed_scaling_factor": 1.0, "num_experts_per_tok": 8, "first_k_dense_replace": 1,
        "num_hidden_layers": 46, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
        "rope_scaling": null, "rope_theta": 1_000_000, "num_nextn_predict_layers": 1,
        "tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_qk_norm": false,
        "vocab_size": 151_552
    })
}

/// The same of DeepSeek-V2-Lite.
fn v2_lite() -> Value {
    json!({
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2",
        "attention_bias": false, "aux_loss_alpha": 0.001, "eos_token_id": 100_001, "ep_size": 1,
        "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2048,
        "intermediate_size": 10_944, "kv_lora_rank": 512, "max_position_embeddings": 163_840,
        "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1,
        "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": false,
        "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27,
        "num_key_value_heads": 16, "pretraining_tp": 1, "q_lora_rank": null,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6,
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707,
            "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096, "type": "yarn"
        },
        "rope_theta": 10_000, "routed_scaling_factor": 1.0, "scoring_func": "softmax",
        "seq_aux": true, "topk_group": 1, "topk_method": "greedy", "v_head_dim": 128,
        "vocab_size": 102_400
    })
}

fn read(mut config: Value, changes: Value) -> Result<ModelConfig, ConfigError> {
    for (field, value) in changes.as_object().unwrap() {
        config[field] = value.clone();
    }
    ModelConfig::from_raw(&RawConfig::parse(&config.to_string(), "config.json")?)
}

fn n_parameters(config: &ModelConfig) -> usize {
    config.target_tensors().iter().map(TensorSpec::n_values).sum()
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
    // Published as 106 billion, the draft layer left out.
    assert_eq!(n_parameters(&config), 106_852_251_264);
    let names: BTreeSet<String> =
        config.mtp_tensors(0).into_iter().map(|spec| spec.name).collect();
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
        specs.iter().filter(|spec| spec.name.ends_with(end)).map(|spec| spec.shape.clone()).last()
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

#[test]
fn v2_lite_has_a_plain_softmax_router() {
    let config = read(v2_lite(), json!({})).unwrap();
    assert_eq!(config.architecture, Architecture::DeepseekV2);
    let mla = config.attention.mla().unwrap();
    assert_eq!((mla.q_lora_rank, mla.kv_lora_rank, mla.qk_head_dim()), (None, 512, 192));
    let moe = config.moe.as_ref().unwrap();
    assert_eq!((moe.scoring, moe.choice), (RouterScoring::Softmax, ExpertChoice::Greedy));
    assert!(!moe.norm_topk_prob && !moe.has_correction_bias() && config.num_mtp_layers == 0);
    // 0.1 * 0.707 * ln 40 + 1, squared.
    let scale = config.softmax_scale() * 192f64.sqrt();
    assert!((scale - 1.589_626_2).abs() < 1e-6, "{scale}");
    assert_eq!(config.rope.yarn.as_ref().unwrap().cos_sin_scale(), 1.0);
    // Published as 15.7 billion.
    assert_eq!(n_parameters(&config), 15_706_484_224);
}

#[test]
fn v2_defaults_are_those_of_its_class_and_not_of_v3() {
    let removed = json!({
        "scoring_func": null, "topk_method": null, "norm_topk_prob": null,
        "routed_scaling_factor": null
    });
    assert_eq!(read(v2_lite(), removed).unwrap(), read(v2_lite(), json!({})).unwrap());
    // DeepSeek-V2 itself.
    let grouped = json!({
        "n_routed_experts": 160, "topk_method": "group_limited_greedy", "n_group": 8,
        "topk_group": 3, "routed_scaling_factor": 16.0, "q_lora_rank": 1536
    });
    let moe = read(v2_lite(), grouped).unwrap().moe.unwrap();
    assert_eq!(moe.choice, ExpertChoice::GroupLimitedGreedy);
    assert_eq!((moe.n_group, moe.topk_group, moe.routed_scaling_factor), (8, 3, 16.0));
    let error = read(v2_lite(), json!({"norm_topk_prob": true})).unwrap_err();
    assert_eq!(error.field(), Some("norm_topk_prob"));
}

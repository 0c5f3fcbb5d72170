//! Tests of reading, refusing and listing.

mod diagnosis;
mod dsa;
mod families;
mod hostile;
mod lite;
mod moe;
mod spellings;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::*;

fn workspace(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

fn bundled(name: &str) -> PathBuf {
    workspace("crates/bundled-checkpoints/checkpoints").join(name)
}

/// A published config, as it is for a checkpoint in bfloat16.
fn public(name: &str) -> Value {
    let file = workspace("crates/model-config/tests/configs").join(format!("{name}.json"));
    let mut object: Value = serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
    object["quantization_config"] = Value::Null;
    object
}

/// The bundled DeepSeek-V3 config with some fields replaced; null removes a field.
pub(crate) fn raw_with(changes: &Value) -> Result<RawConfig, ConfigError> {
    let text = std::fs::read_to_string(bundled("tiny-dsv3").join("config.json")).unwrap();
    let mut object: serde_json::Map<String, Value> = serde_json::from_str(&text).unwrap();
    for (field, value) in changes.as_object().unwrap() {
        object.insert(field.clone(), value.clone());
    }
    RawConfig::parse(&Value::Object(object).to_string(), "dir/config.json")
}

pub(crate) fn config_with(changes: &Value) -> Result<ModelConfig, ConfigError> {
    ModelConfig::from_raw(&raw_with(changes)?)
}

#[track_caller]
fn valid(changes: Value) -> ModelConfig {
    config_with(&changes).unwrap_or_else(|error| panic!("{changes} was refused: {error}"))
}

#[test]
fn the_bundled_config_is_read_field_by_field() {
    let config = ModelConfig::load(&bundled("tiny-dsv3")).unwrap();
    let expected = ModelConfig {
        architecture: Architecture::DeepseekV3,
        vocab_size: 4096,
        hidden_size: 256,
        intermediate_size: 512,
        num_hidden_layers: 5,
        num_mtp_layers: 1,
        max_position_embeddings: 4096,
        rms_norm_eps: 1e-6,
        tie_word_embeddings: false,
        dtype: Some(StoredDtype::Bfloat16),
        eos_token_ids: vec![1],
        bos_token_id: Some(0),
        attention: AttentionConfig::Mla(MlaConfig {
            num_heads: 4,
            q_lora_rank: Some(128),
            kv_lora_rank: 64,
            qk_nope_head_dim: 32,
            qk_rope_head_dim: 16,
            v_head_dim: 32,
        }),
        dsa: None,
        rope: RopeConfig { theta: 10_000.0, interleaved: true, yarn: None },
        moe: Some(MoeConfig {
            n_routed_experts: 16,
            num_experts_per_tok: 4,
            n_shared_experts: 1,
            moe_intermediate_size: 64,
            n_group: 4,
            topk_group: 2,
            routed_scaling_factor: 2.5,
            norm_topk_prob: true,
            scoring: RouterScoring::Sigmoid,
            choice: ExpertChoice::NoauxTc,
            first_k_dense_replace: 1,
            moe_layer_freq: 1,
        }),
        quantization: None,
    };
    assert_eq!(config, expected);
    assert_eq!(config.kv_bytes_per_token(2), (64 + 16) * 6 * 2);
    assert_eq!(config.softmax_scale(), 48f64.powf(-0.5));
}

#[test]
fn every_fixture_is_read() {
    let load =
        |name: &str| ModelConfig::load(&workspace("tests/data/fixtures").join(name)).unwrap();
    let groups = load("v3-groups");
    let moe = groups.moe.unwrap();
    assert_eq!((moe.n_routed_experts, moe.n_group, moe.topk_group), (8, 4, 2));
    assert_eq!(groups.dtype, Some(StoredDtype::Float32));
    assert!(groups.rope.interleaved);
    assert!(!load("v3-half-split-rope").rope.interleaved);
    assert_eq!(load("v3-no-qlora").attention.mla().unwrap().q_lora_rank, None);
    let yarn = YarnConfig {
        factor: 4.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
        mscale: 1.0,
        mscale_all_dim: 1.0,
        original_max_position_embeddings: 64,
    };
    assert_eq!(load("v3-yarn").rope.yarn, Some(yarn));
}

#[test]
fn all_spellings_of_rope_mean_the_same() {
    let inner = json!({
        "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096
    });
    let with = |extra: Value| {
        let mut object = inner.as_object().unwrap().clone();
        object.extend(extra.as_object().unwrap().clone());
        Value::Object(object)
    };
    let expected = valid(json!({"rope_scaling": with(json!({"type": "yarn"}))})).rope;
    assert_eq!(expected.yarn.as_ref().unwrap().factor, 40.0);
    let new = with(json!({"rope_type": "yarn", "rope_theta": 10000}));
    for changes in [
        json!({"rope_scaling": with(json!({"rope_type": "yarn"}))}),
        json!({"rope_scaling": with(json!({"rope_type": "yarn", "type": "yarn"}))}),
        json!({"rope_parameters": new.clone(), "rope_theta": null}),
        json!({"rope_parameters": new.clone(), "rope_scaling": with(json!({"type": "yarn"}))}),
    ] {
        assert_eq!(valid(changes).rope, expected);
    }
    for changes in [
        json!({"rope_scaling": {"type": "default"}}),
        json!({"rope_scaling": {"rope_type": "default", "factor": 1.0}}),
        json!({"rope_parameters": {"rope_theta": 10000.0}}),
        json!({"rope_scaling": null, "rope_theta": null}),
    ] {
        assert_eq!(valid(changes).rope, RopeConfig { yarn: None, ..expected.clone() });
    }
    let moved = json!({"rope_parameters": {"rope_theta": 5e5}, "rope_theta": null});
    assert_eq!(valid(moved).rope.theta, 5e5);
    assert!(!valid(json!({"rope_interleave": false})).rope.interleaved);
}

#[test]
fn yarn_scales_follow_the_logarithm_of_the_factor() {
    let yarn = |factor: f64, mscale: f64, mscale_all_dim: f64| {
        let object = json!({
            "type": "yarn", "factor": factor, "mscale": mscale, "mscale_all_dim": mscale_all_dim,
            "original_max_position_embeddings": 4096
        });
        valid(json!({"rope_scaling": object}))
    };
    // ln 40 = 3.688879454113936.
    let m = 1.368_887_945_411_393_6_f64;
    let v3 = yarn(40.0, 1.0, 1.0);
    assert!((v3.softmax_scale() - 48f64.powf(-0.5) * m * m).abs() < 1e-12);
    assert_eq!(v3.rope.yarn.unwrap().cos_sin_scale(), 1.0);
    let plain = yarn(40.0, 1.0, 0.0).rope.yarn.unwrap();
    assert!((plain.cos_sin_scale() - m).abs() < 1e-12);
    assert_eq!(plain.softmax_scale_factor(), 1.0);
    let defaults = json!({
        "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096
    });
    assert_eq!(valid(json!({"rope_scaling": defaults})).rope.yarn, Some(plain));
}

#[test]
fn other_spellings_and_defaults() {
    let mtp = json!({"num_nextn_predict_layers": null, "num_mtp_layers": 2});
    assert_eq!(valid(mtp).num_mtp_layers, 2);
    assert_eq!(valid(json!({"num_nextn_predict_layers": null})).num_mtp_layers, 0);
    let dtype = json!({"torch_dtype": null, "dtype": "torch.float16"});
    assert_eq!(valid(dtype).dtype, Some(StoredDtype::Float16));
    assert_eq!(valid(json!({"torch_dtype": null})).dtype, None);
    assert_eq!(valid(json!({"eos_token_id": [7, 3, 7]})).eos_token_ids, [7, 3]);
    assert!(valid(json!({"eos_token_id": null})).eos_token_ids.is_empty());
    assert_eq!(valid(json!({"max_position_embeddings": null})).max_position_embeddings, 8192);
    assert_eq!(valid(json!({"n_routed_experts": null})).moe, None);
    let ungrouped = valid(json!({"n_group": null, "topk_group": null})).moe.unwrap();
    assert_eq!((ungrouped.n_group, ungrouped.topk_group), (1, 1));
    assert!(valid(json!({"tie_word_embeddings": true})).tie_word_embeddings);
    assert_eq!(valid(json!({"a_field_from_the_future": {"x": [1]}})), valid(json!({})));
}

/// Every refusal: the change, the field that must be named, and words the message must hold.
#[test]
fn contradictions_are_refused_with_the_fields_name() {
    let yarn = |field: &str, value: Value| {
        let mut object = json!({
            "type": "yarn", "factor": 4, "original_max_position_embeddings": 64
        });
        object[field] = value;
        json!({"rope_scaling": object})
    };
    let two_ropes = json!({
        "rope_scaling": {"type": "default"},
        "rope_parameters": {
            "rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 64
        }
    });
    let cases = [
        (json!({"num_hidden_layers": 1 << 20}), "num_hidden_layers", "at most 1024"),
        (json!({"num_nextn_predict_layers": 1 << 20}), "num_nextn_predict_layers", "at most 1024"),
        (json!({"n_routed_experts": 1 << 20}), "n_routed_experts", "at most 43690"),
        (json!({"n_group": 3}), "n_routed_experts", "n_group (3) does not divide"),
        (json!({"topk_group": 5}), "topk_group", "at most n_group (4)"),
        (json!({"num_experts_per_tok": 9}), "num_experts_per_tok", "hold 8 experts"),
        (json!({"n_group": 16, "topk_group": 8}), "n_group", "at most 8"),
        (json!({"qk_rope_head_dim": 15}), "qk_rope_head_dim", "must be even"),
        (json!({"qk_head_dim": 40}), "qk_head_dim", "is 48"),
        (json!({"num_key_value_heads": 2}), "num_key_value_heads", "num_attention_heads is 4"),
        (json!({"first_k_dense_replace": 6}), "first_k_dense_replace", "at most"),
        (json!({"first_k_dense_replace": null}), "first_k_dense_replace", "missing"),
        (json!({"n_shared_experts": null}), "n_shared_experts", "missing"),
        (json!({"hidden_act": "gelu"}), "hidden_act", "only `silu`"),
        (json!({"attention_bias": true}), "attention_bias", "only false"),
        (json!({"model_type": null}), "model_type", "missing"),
        (json!({"dtype": "float32"}), "dtype", "remove one"),
        (json!({"torch_dtype": "int8"}), "torch_dtype", "bfloat16"),
        (json!({"num_mtp_layers": 2}), "num_nextn_predict_layers", "remove one"),
        (json!({"eos_token_id": 4096}), "eos_token_id", "not below vocab_size"),
        (json!({"eos_token_id": "</s>"}), "eos_token_id", "a token id or a list"),
        (json!({"rms_norm_eps": 0}), "rms_norm_eps", "above 0"),
        (json!({"routed_scaling_factor": -1}), "routed_scaling_factor", "above 0"),
        (json!({"rope_theta": 0}), "rope_theta", "above 0"),
        (json!({"rope_parameters": {"rope_theta": 1e6}}), "rope_theta", "remove one"),
        (json!({"rope_scaling": {"type": "linear"}}), "rope_scaling.type", "only `yarn`"),
        (json!({"rope_scaling": {"factor": 2}}), "rope_scaling.rope_type", "missing"),
        (two_ropes, "rope_scaling", "different scalings"),
        (yarn("factor", json!(0)), "rope_scaling.factor", "at least 1"),
        (yarn("factor", json!(-4)), "rope_scaling.factor", "at least 1"),
        (yarn("factor", json!("four")), "rope_scaling.factor", "unusable"),
        (yarn("factor", json!(null)), "rope_scaling.factor", "missing"),
        (yarn("type", json!("default")), "rope_scaling.factor", "`default`"),
        (yarn("beta_fast", json!(0.5)), "rope_scaling.beta_fast", "beta_slow (1)"),
        (yarn("beta_slow", json!(0)), "rope_scaling.beta_slow", "above 0"),
        (yarn("mscale", json!(-1)), "rope_scaling.mscale", "not be negative"),
        (yarn("attention_factor", json!(2)), "rope_scaling.attention_factor", "mscale"),
        (
            yarn("original_max_position_embeddings", json!(null)),
            "rope_scaling.original_max_position_embeddings",
            "missing",
        ),
    ];
    for (changes, field, words) in cases {
        let Err(error) = config_with(&changes) else { panic!("{changes} was accepted") };
        let message = error.to_string();
        assert_eq!(error.field(), Some(field), "{changes}: {message}");
        assert!(message.contains(words), "{changes}: {message}");
        assert!(message.contains("dir/config.json"), "{changes}: {message}");
    }
}

const SIZES: &[&str] = &[
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "max_position_embeddings",
    "num_attention_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "n_group",
    "topk_group",
    "moe_layer_freq",
];

#[test]
fn zero_and_huge_sizes_are_refused() {
    for field in SIZES {
        for value in [json!(0), json!(u64::MAX), json!(1u64 << 40)] {
            // The head counts are compared first, so both are changed.
            let mut changes = json!({"num_key_value_heads": null});
            changes[field] = value;
            let Err(error) = config_with(&changes) else { panic!("{changes} was accepted") };
            assert_eq!(error.field(), Some(*field), "{changes}: {error}");
        }
    }
}

#[test]
fn missing_sizes_are_refused_unless_they_have_a_default() {
    let defaulted =
        ["q_lora_rank", "max_position_embeddings", "n_routed_experts", "n_group", "topk_group"];
    for field in SIZES.iter().filter(|field| !defaulted.contains(field)) {
        let mut changes = json!({"num_key_value_heads": null});
        changes[field] = Value::Null;
        if *field == "moe_layer_freq" {
            assert_eq!(valid(changes).moe.unwrap().moe_layer_freq, 1);
            continue;
        }
        let error = config_with(&changes).unwrap_err();
        assert!(matches!(error, ConfigError::Missing { .. }), "{error}");
        assert_eq!(error.field(), Some(*field), "{error}");
    }
}

#[test]
fn a_field_of_the_wrong_type_is_refused_by_name() {
    let text = std::fs::read_to_string(bundled("tiny-dsv3").join("config.json")).unwrap();
    let object: serde_json::Map<String, Value> = serde_json::from_str(&text).unwrap();
    let mut n_refused = 0;
    for field in object.keys() {
        for value in [json!("text"), json!(-1.5), json!([[]]), json!({"a": 1}), json!(true)] {
            let mut changes = json!({});
            changes[field] = value;
            // Unknown fields are ignored and some of these values fit; a refusal names the field.
            if let Err(error) = raw_with(&changes) {
                assert_eq!(error.field(), Some(field.as_str()), "{changes}: {error}");
                n_refused += 1;
            }
        }
    }
    assert!(n_refused > 100, "only {n_refused} were refused");
}

#[test]
fn other_model_types_are_refused_with_the_supported_ones() {
    for model_type in ["deepseek_v4", "glm4", "llama", ""] {
        let error = config_with(&json!({"model_type": model_type})).unwrap_err();
        assert!(matches!(error, ConfigError::Unsupported { .. }), "{error}");
        assert_eq!(error.field(), Some("model_type"));
        let message = error.to_string();
        assert!(message.contains(&format!("`{model_type}`")), "{message}");
        let supported = "`deepseek_v2`, `deepseek_v3`, `deepseek_v32`, `glm_moe_dsa` or `glm4_moe`";
        assert!(message.contains(supported), "{message}");
    }
}

#[test]
fn a_summary_knows_grouped_query_caches() {
    let text = r#"{"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe",
        "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2,
        "head_dim": 16, "hidden_size": 64, "dtype": "float32"}"#;
    let summary = ConfigSummary::new(&RawConfig::parse(text, "config.json").unwrap());
    assert_eq!(summary.kv_bytes_per_token, Some(2 * 2 * 16 * 3 * 4));
    assert!(summary.refusal.unwrap().contains("vocab_size"));
    let empty = ConfigSummary::new(&RawConfig::parse("{}", "config.json").unwrap());
    assert_eq!((empty.kv_bytes_per_token, empty.num_mtp_layers), (None, 0));
}

#[test]
fn files_that_are_no_config_are_refused_by_path() {
    let error = RawConfig::load(Path::new("no/such/folder")).unwrap_err();
    assert!(matches!(error, ConfigError::Read { .. }));
    assert!(error.to_string().contains("no/such/folder/config.json"), "{error}");
    for text in ["", "[]", "{", "3", r#"{"vocab_size": NaN}"#] {
        let error = RawConfig::parse(text, "dir/config.json").unwrap_err();
        assert!(matches!(error, ConfigError::Json { .. }), "{text}: {error}");
        assert!(error.to_string().contains("dir/config.json"), "{error}");
    }
}

#[test]
fn generation_config_adds_its_ends() {
    let mut config = valid(json!({"eos_token_id": 1}));
    for (text, expected) in [
        ("{}", vec![1]),
        (r#"{"eos_token_id": null}"#, vec![1]),
        (r#"{"eos_token_id": 5}"#, vec![1, 5]),
        (r#"{"eos_token_id": [1, 9, 5], "temperature": 0.6}"#, vec![1, 5, 9]),
    ] {
        let generation = GenerationConfig::parse(text, "generation_config.json").unwrap();
        config.merge_generation(&generation).unwrap();
        assert_eq!(config.eos_token_ids, expected, "{text}");
    }
    let generation = GenerationConfig::parse(r#"{"eos_token_id": 4096}"#, "g.json").unwrap();
    let error = config.merge_generation(&generation).unwrap_err();
    assert_eq!(error.field(), Some("eos_token_id"));
    assert!(error.to_string().contains("g.json"), "{error}");
    let error = GenerationConfig::parse(r#"{"eos_token_id": "x"}"#, "g.json").unwrap_err();
    assert_eq!(error.field(), Some("eos_token_id"));
    assert_eq!(GenerationConfig::load(Path::new("no/such/folder")).unwrap(), None);
}

#[test]
fn expected_tensors_are_those_of_the_bundled_indexes() {
    // Four layers of tiny-glm52 select, each with five tensors.
    for (name, n_of_indexers) in [("tiny-dsv3", 0), ("tiny-glm52", 4 * 5)] {
        check_expected_tensors(&bundled(name), n_of_indexers);
    }
}

/// The tensors that a config asks for are those that its checkpoint stores.
fn check_expected_tensors(dir: &Path, n_of_indexers: usize) {
    let text = std::fs::read_to_string(dir.join("model.safetensors.index.json")).unwrap();
    let index: Value = serde_json::from_str(&text).unwrap();
    let weight_map = index["weight_map"].as_object().unwrap();
    let stored: BTreeSet<&str> = weight_map.keys().map(String::as_str).collect();

    let config = ModelConfig::load(dir).unwrap();
    let mut specs = config.target_tensors();
    specs.extend(config.all_mtp_tensors());
    let names: BTreeSet<&str> = specs.iter().map(|spec| spec.name.as_str()).collect();
    assert_eq!(names.len(), specs.len(), "a name is listed twice");
    let optional: BTreeSet<&str> =
        specs.iter().filter(|spec| spec.is_optional).map(|spec| spec.name.as_str()).collect();
    assert_eq!(
        optional,
        ["model.layers.5.embed_tokens.weight", "model.layers.5.shared_head.head.weight"].into()
    );
    let of_indexers = names.iter().filter(|name| name.contains(".indexer."));
    assert_eq!(of_indexers.count(), n_of_indexers);
    let required: BTreeSet<&str> = names.difference(&optional).copied().collect();
    assert_eq!(required, stored.difference(&optional).copied().collect());

    // Routers, and the norm of index keys.
    let is_float32 = |name: &str| name.contains(".mlp.gate.") || name.contains(".k_norm.");
    let float32 = |spec: &TensorSpec| spec.load_dtype == LoadDtype::Float32;
    assert!(specs.iter().all(|spec| float32(spec) == is_float32(&spec.name)));
}

#[test]
fn expected_tensors_follow_the_config() {
    let names = |changes: Value| {
        let specs = valid(changes).target_tensors();
        specs.into_iter().map(|spec| spec.name).collect::<BTreeSet<_>>()
    };
    assert!(names(json!({})).contains("lm_head.weight"));
    assert!(!names(json!({"tie_word_embeddings": true})).contains("lm_head.weight"));
    let direct = names(json!({"q_lora_rank": null}));
    assert!(direct.contains("model.layers.0.self_attn.q_proj.weight"));
    assert!(!direct.iter().any(|name| name.contains("q_a_") || name.contains("q_b_")));
    assert!(!names(json!({"n_shared_experts": 0})).iter().any(|name| name.contains("shared")));
    let dense = names(json!({"n_routed_experts": null}));
    assert!(dense.contains("model.layers.4.mlp.gate_proj.weight"));
    assert!(!dense.iter().any(|name| name.contains("experts")));

    let two = valid(json!({"num_nextn_predict_layers": 2, "n_shared_experts": 3}));
    let shape = |name: &str| {
        let specs = two.mtp_tensors(1);
        specs.into_iter().find(|spec| spec.name == name).map(|spec| spec.shape)
    };
    assert_eq!(shape("model.layers.6.eh_proj.weight"), Some(vec![256, 512]));
    let shared = "model.layers.6.mlp.shared_experts.down_proj.weight";
    assert_eq!(shape(shared), Some(vec![256, 3 * 64]));
    assert_eq!(two.all_mtp_tensors().len(), 2 * two.mtp_tensors(0).len());
}

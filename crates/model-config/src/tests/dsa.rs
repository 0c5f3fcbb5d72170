//! Tests of sparse attention: its settings, the schedule of its layers, its tensors.

use serde_json::{Map, Value, json};

use super::{bundled, public, raw_with, workspace};
use crate::IndexerKind::{Full, Shared};
use crate::*;

/// The bundled DeepSeek-V3 config made sparse, with some fields replaced; null removes a field.
fn sparse(changes: &Value) -> Result<ModelConfig, ConfigError> {
    ModelConfig::from_raw(&sparse_raw(changes)?)
}

fn sparse_raw(changes: &Value) -> Result<RawConfig, ConfigError> {
    let mut all = json!({
        "model_type": "glm_moe_dsa", "index_topk": 64, "index_n_heads": 4, "index_head_dim": 32
    });
    for (field, value) in changes.as_object().unwrap() {
        all[field] = value.clone();
    }
    raw_with(&all)
}

#[track_caller]
fn valid(changes: Value) -> DsaConfig {
    let config = sparse(&changes).unwrap_or_else(|error| panic!("{changes} was refused: {error}"));
    config.dsa.expect("the config is sparse")
}

fn full_layers(dsa: &DsaConfig) -> Vec<usize> {
    let kinds = dsa.indexer_kinds.iter().enumerate();
    kinds.filter(|(_, kind)| **kind == Full).map(|(layer_idx, _)| layer_idx).collect()
}

#[test]
fn the_bundled_config_is_sparse_and_shares() {
    let config = ModelConfig::load(&bundled("tiny-glm52")).unwrap();
    assert_eq!(config.architecture, Architecture::GlmMoeDsa);
    let expected = DsaConfig {
        index_topk: 64,
        index_n_heads: 4,
        index_head_dim: 32,
        rope_interleaved: true,
        indexer_kinds: vec![Full, Full, Shared, Full, Shared],
        index_share_for_mtp_iteration: true,
    };
    assert_eq!(config.dsa, Some(expected));
    assert_eq!((config.rope.theta, config.rope.interleaved), (1e6, true));
    assert_eq!(config.rms_norm_eps, 1e-5);
    let has_indexer: Vec<bool> = (0..6).map(|layer_idx| config.has_indexer(layer_idx)).collect();
    assert_eq!(has_indexer, [true, true, false, true, false, true]);
    assert_eq!(config.kv_bytes_per_token(2), 80 * 6 * 2);
    assert_eq!(config.num_index_layers(), 4);
    assert_eq!(config.index_bytes_per_token(32 * 2), 4 * 32 * 2);
    // A byte a value, and a scale.
    assert_eq!(config.index_bytes_per_token(32 + 4), 4 * 36);
}

#[test]
fn the_fixtures_are_read() {
    let load =
        |name: &str| ModelConfig::load(&workspace("tests/data/fixtures").join(name)).unwrap();
    let glm = load("glm-shared");
    let dsa = glm.dsa.as_ref().unwrap();
    assert_eq!(glm.architecture, Architecture::GlmMoeDsa);
    assert_eq!(dsa.indexer_kinds, [Full, Shared, Full]);
    assert!(dsa.rope_interleaved && !dsa.index_share_for_mtp_iteration);
    assert_eq!((dsa.index_topk, glm.num_mtp_layers, glm.num_index_layers()), (8, 0, 2));
    assert_eq!(glm.moe.unwrap().choice, ExpertChoice::NoauxTc);
    let deepseek = load("v32-dsa");
    let dsa = deepseek.dsa.as_ref().unwrap();
    assert_eq!(deepseek.architecture, Architecture::DeepseekV32);
    assert_eq!(dsa.indexer_kinds, [Full; 3]);
    assert!(!dsa.rope_interleaved && deepseek.rope.interleaved);
    assert_eq!(deepseek.index_bytes_per_token(1), 3);
}

/// Fault case L14: the key decides; where it is absent, the family does. The main rotation is
/// independent of it.
#[test]
fn l14_the_indexers_rotation_is_the_keys_or_the_familys() {
    let families = [("glm_moe_dsa", true), ("deepseek_v32", false), ("deepseek_v3", false)];
    for (model_type, by_default) in families {
        for main in [true, false] {
            for (key, expected) in
                [(json!(null), by_default), (json!(true), true), (json!(false), false)]
            {
                let changes = json!({
                    "model_type": model_type, "rope_interleave": main,
                    "indexer_rope_interleave": key
                });
                let config = sparse(&changes).unwrap();
                assert_eq!(config.dsa.unwrap().rope_interleaved, expected, "{changes}");
                assert_eq!(config.rope.interleaved, main, "{changes}");
            }
        }
    }
    assert!(sparse(&json!({"rope_interleave": null})).unwrap().rope.interleaved);
}

#[test]
fn the_epsilon_has_the_familys_default() {
    for (model_type, expected) in
        [("glm_moe_dsa", 1e-5), ("deepseek_v32", 1e-6), ("deepseek_v3", 1e-6)]
    {
        let changes = json!({"model_type": model_type, "rms_norm_eps": null});
        assert_eq!(sparse(&changes).unwrap().rms_norm_eps, expected);
    }
    assert_eq!(sparse(&json!({"rms_norm_eps": 0.5})).unwrap().rms_norm_eps, 0.5);
}

#[test]
fn without_index_topk_deepseek_v3_is_dense_whatever_else_it_says() {
    let changes = json!({
        "model_type": "deepseek_v3", "index_topk": null, "index_n_heads": null,
        "index_share_for_mtp_iteration": true, "q_lora_rank": null
    });
    let config = sparse(&changes).unwrap();
    assert_eq!((&config.dsa, config.num_index_layers()), (&None, 0));
    assert!(!config.has_indexer(0) && !config.has_indexer(5));
    assert_eq!(config.index_bytes_per_token(64), 0);
    assert!(!config.target_tensors().iter().any(|spec| spec.name.contains("indexer")));
}

#[test]
fn the_schedule_is_the_types_else_the_pattern_else_the_frequency() {
    let types = json!(["full", "shared", "full", "shared", "shared"]);
    let cases = [
        (json!({}), vec![0, 1, 2, 3, 4]),
        (json!({"indexer_types": types}), vec![0, 2]),
        (json!({"indexer_types": types, "index_topk_pattern": "FFFFF"}), vec![0, 2]),
        (json!({"indexer_types": types, "index_topk_freq": 1}), vec![0, 2]),
        (json!({"index_topk_pattern": "FSSFS"}), vec![0, 3]),
        (json!({"index_topk_pattern": ["F", "S", "F", "F", "S"]}), vec![0, 2, 3]),
        (json!({"index_topk_pattern": ["full", "S", "F", "F", "shared"]}), vec![0, 2, 3]),
        (json!({"index_topk_pattern": "FSSFS", "index_topk_freq": 2}), vec![0, 3]),
        (json!({"index_topk_freq": 1}), vec![0, 1, 2, 3, 4]),
        (json!({"index_topk_freq": 2}), vec![0, 1, 3]),
        (json!({"index_topk_freq": 2, "index_skip_topk_offset": 1}), vec![0, 2, 4]),
        (json!({"index_topk_freq": 4, "index_skip_topk_offset": 1}), vec![0, 4]),
        (json!({"index_topk_freq": 2, "index_skip_topk_offset": 3}), vec![0, 1, 2, 4]),
        (json!({"index_topk_freq": 3, "index_skip_topk_offset": 2}), vec![0, 1, 4]),
        (json!({"index_topk_freq": 9, "index_skip_topk_offset": 9}), vec![0, 1, 2, 3, 4]),
        (json!({"index_skip_topk_offset": 3}), vec![0, 1, 2, 3, 4]),
    ];
    for (changes, expected) in cases {
        assert_eq!(full_layers(&valid(changes.clone())), expected, "{changes}");
    }
}

/// Entries for MTP layers may follow; an MTP layer has its own indexer whatever they say.
#[test]
fn an_mtp_layer_never_shares() {
    for changes in [
        json!({"indexer_types": ["full", "shared", "full", "full", "full", "full"]}),
        json!({"indexer_types": ["full", "shared", "full", "full", "full", "shared"]}),
        json!({"index_topk_pattern": "FSFFFS"}),
        json!({"index_topk_freq": 4, "index_skip_topk_offset": 1}),
    ] {
        let config = sparse(&changes).unwrap();
        assert_eq!(config.dsa.as_ref().unwrap().indexer_kinds.len(), 5);
        assert!(!config.has_indexer(1), "{changes}");
        assert!(config.has_indexer(5), "{changes}");
        let own = "model.layers.5.self_attn.indexer.wk.weight";
        assert!(config.mtp_tensors(0).iter().any(|spec| spec.name == own && !spec.is_optional));
    }
}

/// A change, the field that must be named, and words the message must hold.
type Refusal = (Value, &'static str, &'static str);

fn check_refusals(cases: &[Refusal]) {
    for (changes, field, words) in cases {
        let Err(error) = sparse(changes) else { panic!("{changes} was accepted") };
        let message = error.to_string();
        assert_eq!(error.field(), Some(*field), "{changes}: {message}");
        assert!(message.contains(words), "{changes}: {message}");
        assert!(message.contains("dir/config.json"), "{changes}: {message}");
    }
}

#[test]
fn unusable_sizes_are_refused_with_the_fields_name() {
    check_refusals(&[
        (json!({"index_topk": null}), "index_topk", "set it to the number of keys"),
        (
            json!({"model_type": "deepseek_v32", "index_topk": null}),
            "index_topk",
            "`deepseek_v3` if it is dense",
        ),
        (json!({"index_topk": 0}), "index_topk", "at least 1"),
        (json!({"index_topk": "64"}), "index_topk", "unusable"),
        (json!({"index_n_heads": null}), "index_n_heads", "missing"),
        (json!({"index_n_heads": 0}), "index_n_heads", "at least 1"),
        (json!({"index_head_dim": null}), "index_head_dim", "missing"),
        (json!({"index_head_dim": 0}), "index_head_dim", "at least 1"),
        (json!({"index_head_dim": 1u64 << 40}), "index_head_dim", "at most"),
        (json!({"index_head_dim": 15}), "index_head_dim", "qk_rope_head_dim (16)"),
        (json!({"q_lora_rank": null}), "q_lora_rank", "index_topk"),
        (json!({"index_share_for_mtp_iteration": "on"}), "index_share_for_mtp_iteration", "on"),
        (json!({"indexer_rope_interleave": 1}), "indexer_rope_interleave", "unusable"),
    ]);
}

#[test]
fn unusable_schedules_are_refused_with_the_fields_name() {
    let mut last = vec!["deepseek_sparse_attention"; 5];
    last[4] = "full_attention";
    check_refusals(&[
        (
            json!({"indexer_types": vec!["full"; 4]}),
            "indexer_types",
            "has length 4; it must have an entry for each of 5 layers",
        ),
        (
            json!({"indexer_types": vec!["full"; 7]}),
            "indexer_types",
            "has length 7; it must have an entry for each of 5 layers",
        ),
        (
            json!({"indexer_types": []}),
            "indexer_types",
            "has length 0; it must have an entry for each of 5 layers",
        ),
        (json!({"indexer_types": "full"}), "indexer_types", "unusable"),
        (
            json!({"indexer_types": ["full", "full", "half", "full", "full"]}),
            "indexer_types[2]",
            "`half`",
        ),
        (
            json!({"indexer_types": ["full", "full", "full", "full", "full", "none"]}),
            "indexer_types[5]",
            "`none`",
        ),
        (
            json!({"indexer_types": ["shared", "full", "full", "full", "full"]}),
            "indexer_types[0]",
            "first layer must be full",
        ),
        (json!({"index_topk_pattern": "SFFFF"}), "index_topk_pattern[0]", "must be full"),
        (json!({"index_topk_pattern": "FFFXF"}), "index_topk_pattern[3]", "`X`"),
        (
            json!({"index_topk_pattern": "FFF"}),
            "index_topk_pattern",
            "has length 3; it must have an entry for each of 5 layers",
        ),
        (json!({"index_topk_pattern": 3}), "index_topk_pattern", "a text or a list of texts"),
        (json!({"index_topk_freq": 0}), "index_topk_freq", "at least 1"),
        (json!({"index_topk_freq": -1}), "index_topk_freq", "unusable"),
        (json!({"index_skip_topk_offset": -1}), "index_skip_topk_offset", "unusable"),
        (
            json!({"index_topk_freq": 2, "index_skip_topk_offset": 0}),
            "index_skip_topk_offset",
            "at least 1",
        ),
        (json!({"layer_types": last}), "layer_types[4]", "`full_attention`"),
        (
            json!({"layer_types": ["deepseek_sparse_attention"]}),
            "layer_types",
            "has length 1; it must have an entry for each of 5 layers",
        ),
    ]);
    valid(json!({"layer_types": vec!["deepseek_sparse_attention"; 5]}));
    // A list that decides makes the frequency irrelevant.
    valid(json!({"indexer_types": vec!["full"; 5], "index_topk_freq": 0}));
}

/// The published GLM-5.2 config without `indexer_types`.
fn glm52() -> Value {
    let mut object = public("glm-5.2");
    object["indexer_types"] = Value::Null;
    object
}

fn read(object: &Value) -> ModelConfig {
    let raw = RawConfig::parse(&object.to_string(), "config.json").unwrap();
    ModelConfig::from_raw(&raw).unwrap()
}

#[test]
fn glm52_has_21_full_layers_by_frequency_and_by_name() {
    let by_frequency = read(&glm52());
    let dsa = by_frequency.dsa.as_ref().unwrap();
    let expected: Vec<usize> = [0, 1].into_iter().chain((2..78).step_by(4)).collect();
    assert_eq!(expected[..6], [0, 1, 2, 6, 10, 14]);
    assert_eq!(full_layers(dsa), expected);
    assert_eq!((expected.len(), dsa.indexer_kinds.len() - expected.len()), (21, 57));
    assert!(dsa.index_share_for_mtp_iteration && by_frequency.has_indexer(78));
    // The target's full layers and the MTP layer; the latent cache is that of all layers.
    assert_eq!(by_frequency.index_bytes_per_token(128 + 4), 22 * 132);
    assert_eq!(by_frequency.kv_bytes_per_token(2), 576 * 79 * 2);

    // Named types decide, whatever else is there.
    let kinds: Vec<&str> = dsa
        .indexer_kinds
        .iter()
        .map(|kind| if *kind == Full { "full" } else { "shared" })
        .collect();
    let mut named = glm52();
    named["indexer_types"] = json!(kinds);
    named["index_skip_topk_offset"] = json!(1);
    assert_eq!(read(&named), by_frequency);
    let letters = kinds.iter().map(|kind| if *kind == "full" { 'F' } else { 'S' });
    let mut pattern = glm52();
    pattern["index_topk_pattern"] = json!(letters.collect::<String>());
    assert_eq!(read(&pattern), by_frequency);
}

#[test]
fn a_published_deepseek_v32_config_is_read() {
    let config = read(&public("deepseek-v3.2-exp"));
    assert_eq!(config.architecture, Architecture::DeepseekV32);
    let dsa = config.dsa.as_ref().unwrap();
    assert_eq!(dsa.indexer_kinds, [Full; 61]);
    assert!(!dsa.rope_interleaved && !dsa.index_share_for_mtp_iteration);
    assert!(config.rope.interleaved);
    let shape = |name: &str| {
        let mut specs = config.mtp_tensors(0);
        specs.retain(|spec| spec.name == format!("model.layers.61.self_attn.indexer.{name}"));
        (specs[0].shape.clone(), specs[0].load_dtype)
    };
    assert_eq!(shape("wq_b.weight"), (vec![64 * 128, 1536], LoadDtype::Model));
    assert_eq!(shape("wk.weight"), (vec![128, 7168], LoadDtype::Model));
    assert_eq!(shape("weights_proj.weight"), (vec![64, 7168], LoadDtype::Model));
    assert_eq!(shape("k_norm.weight"), (vec![128], LoadDtype::Float32));
    assert_eq!(shape("k_norm.bias"), (vec![128], LoadDtype::Float32));
}

#[test]
fn a_summary_describes_sparse_attention() {
    let summary = ConfigSummary::new(&RawConfig::load(&bundled("tiny-glm52")).unwrap());
    assert_eq!(summary.architecture.as_deref(), Some("GlmMoeDsaForCausalLM"));
    let cached = |value_bytes, fp8_index, drafting| {
        let bytes = summary.cache_bytes_per_token(value_bytes, fp8_index, drafting).unwrap();
        (bytes.kv, bytes.index)
    };
    assert_eq!(cached(2, false, true), (80 * 6 * 2, 32 * 4 * 2));
    assert_eq!(cached(4, false, false), (80 * 5 * 4, 32 * 3 * 4));
    assert_eq!(cached(2, true, false), (80 * 5 * 2, (32 + 4) * 3));
    assert_eq!((summary.refusal, summary.kv_bytes_per_token), (None, Some(80 * 6 * 2)));
    let expected = SparseSummary {
        index_topk: 64,
        index_n_heads: Some(4),
        index_head_dim: Some(32),
        num_full_layers: Some(3),
        num_shared_layers: Some(2),
        index_share_for_mtp_iteration: true,
        index_bytes_per_token: Some(32 * 4 * 2),
    };
    assert_eq!(summary.sparse, Some(expected));
    assert_eq!(ConfigSummary::new(&raw_with(&json!({})).unwrap()).sparse, None);
}

/// A config that cannot run is described as far as it goes, and nothing in it breaks that.
#[test]
fn a_partial_config_is_summarised_without_panic() {
    let bare = ConfigSummary::new(&RawConfig::parse(r#"{"index_topk": 5}"#, "c").unwrap());
    let expected = SparseSummary {
        index_topk: 5,
        index_n_heads: None,
        index_head_dim: None,
        num_full_layers: None,
        num_shared_layers: None,
        index_share_for_mtp_iteration: false,
        index_bytes_per_token: None,
    };
    assert_eq!(bare.sparse, Some(expected));
    let odd = [
        json!(null),
        json!(0),
        json!(usize::MAX),
        json!([]),
        json!("F"),
        json!(["shared"]),
        json!(["full", "full", "full", "full", "full"]),
    ];
    let whole = sparse_raw(&json!({"indexer_types": vec!["full"; 5]})).unwrap();
    assert_eq!(ConfigSummary::new(&whole).sparse.unwrap().num_full_layers, Some(5));
    let fields = [
        "num_hidden_layers",
        "num_nextn_predict_layers",
        "torch_dtype",
        "index_n_heads",
        "index_head_dim",
        "indexer_types",
        "index_topk_pattern",
        "index_topk_freq",
        "index_skip_topk_offset",
    ];
    let mut n_described = 0;
    for first in fields {
        for second in fields {
            for (a, b) in odd.iter().flat_map(|a| odd.iter().map(move |b| (a, b))) {
                let changes =
                    Map::from_iter([(first.into(), a.clone()), (second.into(), b.clone())]);
                if let Ok(raw) = sparse_raw(&Value::Object(changes)) {
                    n_described += usize::from(ConfigSummary::new(&raw).sparse.is_some());
                }
            }
        }
    }
    assert!(n_described > 500, "only {n_described} were described");
}

//! Tests of what is declared for which tensor, and of what is refused.

use serde_json::{Value, json};

use super::WeightFormat::{Fp8Block, Fp8Channel, Fp8Tensor, Mxfp4, Mxfp8};
use super::*;
use crate::tests::config_with;
use crate::{ConfigError, ConfigSummary};

const EXPERT: &str = "model.layers.1.mlp.experts.3.up_proj.weight";
const ATTENTION: &str = "model.layers.1.self_attn.o_proj.weight";

#[track_caller]
fn read(config: Value) -> QuantizationConfig {
    let model = config_with(&json!({"quantization_config": config}));
    model.unwrap_or_else(|error| panic!("{error}")).quantization.unwrap()
}

fn refusal(config: Value) -> ConfigError {
    config_with(&json!({"quantization_config": config})).unwrap_err()
}

#[track_caller]
fn check_excluded(entry: &str, covered: &[&str], others: &[&str]) {
    for field in ["exclude", "ignore", "modules_to_not_convert", "ignored_layers"] {
        let config = read(json!({"quant_method": "fp8", "fmt": "e4m3", field: ["x", entry]}));
        for name in covered {
            let declared = config.declared(name);
            assert!(declared.formats.is_empty(), "{entry} leaves {name} as {declared:?}");
            let by = declared.excluded_by.unwrap();
            assert_eq!(by, entry.trim_end_matches('.'), "{name}");
        }
        for name in others {
            let declared = config.declared(name);
            let expected = DeclaredFormats { formats: vec![Fp8Tensor], excluded_by: None };
            assert_eq!(declared, expected, "{entry} covers {name}");
        }
    }
}

#[test]
fn exclusions_are_names_modules_globs_or_expressions() {
    let up = "model.layers.6.mlp.experts.0.up_proj.weight";
    let down = "model.layers.6.mlp.experts.0.down_proj.weight";
    let later = "model.layers.61.mlp.experts.0.up_proj.weight";
    let attention = "model.layers.6.self_attn.o_proj.weight";
    check_excluded("lm_head", &["lm_head.weight"], &[up, "model.lm_head2.weight"]);
    check_excluded("model.layers.6.mlp.experts.0.up_proj", &[up], &[down, later]);
    check_excluded("model.layers.6.mlp.experts.0.up_proj.weight", &[up], &[down]);
    check_excluded("model.layers.6", &[up, down, attention], &[later]);
    check_excluded("model.layers.6.", &[up, down, attention], &[later]);
    check_excluded("model.layers.6.*", &[up, down, attention], &[later]);
    check_excluded("*self_attn*", &[attention], &[up, down]);
    check_excluded("model.layers.[5-6].*.?p_proj", &[up], &[down, later, attention]);
    // An expression is for the beginning of a name, as Python's `re.match` is.
    check_excluded("re:model.layers.61.*", &[later], &[up, attention]);
    check_excluded("re:.*self_attn", &[attention], &[up, later]);
    check_excluded("re:self_attn", &[], &[attention]);
    check_excluded(r"re:.*mlp\.(?!experts).*", &["model.layers.6.mlp.gate.weight"], &[up]);
}

#[test]
fn fused_modules_cover_their_parts() {
    let weights_proj = "model.layers.3.self_attn.indexer.weights_proj.weight";
    let wk = "model.layers.3.self_attn.indexer.wk.weight";
    let wq_b = "model.layers.3.self_attn.indexer.wq_b.weight";
    check_excluded("model.layers.3.self_attn.indexers_proj", &[weights_proj], &[wk, wq_b]);
    let fused = "model.layers.3.self_attn.indexer.wk_weights_proj";
    check_excluded(fused, &[weights_proj, wk], &[wq_b]);
    let (gate, up, down) =
        ("a.mlp.gate_proj.weight", "a.mlp.up_proj.weight", "a.mlp.down_proj.weight");
    check_excluded("a.mlp.gate_up_proj", &[gate, up], &[down, "b.mlp.up_proj.weight"]);
    check_excluded("*gate_up_proj*", &[gate, up], &[down]);
    let (q_a, kv_a) = ("a.q_a_proj.weight", "a.kv_a_proj_with_mqa.weight");
    for fused in ["a.fused_qkv_a_proj", "a.fused_qkv_a_proj_with_mqa"] {
        check_excluded(fused, &[q_a, kv_a], &["a.q_b_proj.weight"]);
    }
    check_excluded("re:.*qkv_proj$", &["a.k_proj.weight"], &["a.o_proj.weight", kv_a]);
}

#[test]
fn deepseek_declares_blocks() {
    let config = read(json!({
        "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 48],
        "activation_scheme": "dynamic", "scale_fmt": "ue8m0"
    }));
    assert_eq!(config.method, "fp8");
    assert_eq!(config.declared(EXPERT).formats, [Fp8Block([128, 48])]);
    assert_eq!(read(json!({"quant_method": "fp8"})).declared(EXPERT).formats, [Fp8Tensor]);
    assert_eq!(read(json!({"quant_method": "mxfp8"})).declared(EXPERT).formats, [Mxfp8]);
}

fn compressed(weights: Value, format: &str) -> Value {
    json!({
        "quant_method": "compressed-tensors", "format": format, "ignore": ["lm_head"],
        "config_groups": {"group_0": {
            "targets": ["Linear"], "weights": weights,
            "input_activations": {"num_bits": 8, "type": "float", "dynamic": true}
        }},
        "kv_cache_scheme": null, "sparsity_config": {"format": "dense"}
    })
}

#[test]
fn compressed_tensors_declares_by_group() {
    let float = |num_bits: u32, strategy: &str| {
        json!({
            "type": "float", "num_bits": num_bits, "strategy": strategy, "group_size": null,
            "block_structure": [64, 32], "symmetric": true, "dynamic": false
        })
    };
    let mut group = float(8, "group");
    group["group_size"] = json!(32);
    let mut old = float(8, "block");
    old["block_structure"] = json!("64x32");
    let mut fp4 = group.clone();
    fp4["num_bits"] = json!(4);
    for (weights, packing, expected) in [
        (float(8, "tensor"), "float-quantized", Fp8Tensor),
        (float(8, "channel"), "float-quantized", Fp8Channel),
        (float(8, "block"), "float-quantized", Fp8Block([64, 32])),
        (old, "float-quantized", Fp8Block([64, 32])),
        (group, "mxfp8-quantized", Mxfp8),
        (fp4.clone(), "mxfp4-pack-quantized", Mxfp4),
    ] {
        let config = read(compressed(weights, packing));
        assert_eq!(config.declared(EXPERT).formats, [expected]);
        assert_eq!(config.declared("lm_head.weight").excluded_by.as_deref(), Some("lm_head"));
    }
    let mixed = read(json!({
        "quant_method": "compressed-tensors", "format": "mixed-precision",
        "config_groups": {
            "group_0": {
                "targets": [r"re:.*experts\.\d+"], "weights": fp4,
                "format": "mxfp4-pack-quantized"
            },
            "group_1": {"targets": ["re:.*self_attn.*"], "weights": float(8, "channel")}
        }
    }));
    assert_eq!(mixed.declared(EXPERT).formats, [Mxfp4]);
    assert_eq!(mixed.declared(ATTENTION).formats, [Fp8Channel]);
    assert_eq!(mixed.declared("lm_head.weight"), DeclaredFormats::default());
}

#[test]
fn quark_declares_by_pattern_then_globally() {
    let weight = |weight: Value| json!({"weight": weight, "input_tensors": null, "bias": null});
    let mxfp4 = weight(json!({
        "dtype": "fp4", "qscheme": "per_group", "group_size": 32, "ch_axis": -1,
        "scale_format": "e8m0", "is_dynamic": false
    }));
    let config = read(json!({
        "quant_method": "quark", "global_quant_config": mxfp4, "exclude": ["re:model.layers.2.*"],
        "layer_quant_config": {
            "*self_attn*": weight(json!({"dtype": "fp8_e4m3", "qscheme": "per_channel"})),
            "*mlp.gate": {"weight": null},
            "*o_proj": weight(json!({"dtype": "fp8_e4m3", "qscheme": "per_tensor"}))
        },
        "layer_type_quant_config": {}
    }));
    assert_eq!(config.declared(EXPERT).formats, [Mxfp4]);
    assert_eq!(config.declared("model.layers.1.self_attn.q_b_proj.weight").formats, [Fp8Channel]);
    assert_eq!(config.declared("model.layers.1.mlp.gate.weight"), DeclaredFormats::default());
    // Both patterns match, in the order of the config; the file shows which one was meant.
    assert_eq!(config.declared(ATTENTION).formats, [Fp8Channel, Fp8Tensor]);
    let excluded = config.declared("model.layers.2.self_attn.o_proj.weight");
    assert_eq!(excluded.excluded_by.as_deref(), Some("re:model.layers.2.*"));
    assert!(excluded.formats.is_empty());
    for (spec, expected) in [
        (json!({"dtype": "fp8_e4m3", "qscheme": "per_block"}), Fp8Block([128, 128])),
        (
            json!({"dtype": "fp8_e4m3", "qscheme": "per_block", "block_size": [2, 3]}),
            Fp8Block([2, 3]),
        ),
        (json!({"dtype": "fp8_e4m3", "qscheme": "per_group", "group_size": 32}), Mxfp8),
    ] {
        let config = read(json!({"quant_method": "quark", "global_quant_config": weight(spec)}));
        assert_eq!(config.declared(EXPERT).formats, [expected]);
    }
}

#[test]
fn what_cannot_be_read_is_refused_by_name() {
    for method in ["gptq", "awq", "bitsandbytes", "modelopt", "mxfp4", "fbgemm_fp8"] {
        let error = refusal(json!({"quant_method": method, "bits": 4}));
        assert!(matches!(error, ConfigError::Unsupported { .. }), "{error}");
        assert_eq!(error.field(), Some("quantization_config.quant_method"));
        assert!(error.to_string().contains(&format!("`{method}`")), "{error}");
    }
    let int4 = json!({"type": "int", "num_bits": 4, "strategy": "group", "group_size": 128});
    let nvfp4 =
        json!({"type": "float", "num_bits": 4, "strategy": "tensor_group", "group_size": 16});
    let zero = json!({"type": "float", "num_bits": 8, "strategy": "channel", "symmetric": false});
    let quark = |dtype: &str, group_size: usize| {
        json!({"quant_method": "quark", "global_quant_config": {"weight": {
            "dtype": dtype, "qscheme": "per_group", "group_size": group_size}}})
    };
    let group = "quantization_config.config_groups.group_0.weights";
    let global = "quantization_config.global_quant_config.weight";
    for (config, field, words) in [
        (json!({"quant_method": "fp8", "fmt": "e5m2"}), "quantization_config.fmt", "`e5m2`"),
        (
            json!({"quant_method": "fp8", "fmt": "e4m3fnuz"}),
            "quantization_config.fmt",
            "`e4m3fnuz`",
        ),
        (compressed(int4, "pack-quantized"), group, "4-bit int, group of 128"),
        (compressed(nvfp4, "nvfp4-pack-quantized"), group, "`nvfp4-pack-quantized`"),
        (compressed(zero, "float-quantized"), &format!("{group}.symmetric"), "zero points"),
        (quark("int4", 32), global, "int4 per_group of 32"),
        (quark("fp4", 16), global, "fp4 per_group of 16"),
        (
            json!({"quant_method": "quark", "layer_type_quant_config": {"Linear": {}}}),
            "quantization_config.layer_type_quant_config",
            "layer_quant_config",
        ),
        (
            json!({"quant_method": "compressed-tensors", "transform_config": {"a": 1}}),
            "quantization_config.transform_config",
            "transforms",
        ),
        (
            json!({"quant_method": "compressed-tensors", "sparsity_config": {"format": "24"}}),
            "quantization_config.sparsity_config.format",
            "sparse",
        ),
    ] {
        let error = refusal(config);
        assert!(matches!(error, ConfigError::Unsupported { .. }), "{error}");
        assert_eq!(error.field(), Some(field), "{error}");
        assert!(error.to_string().contains(words), "{error}");
    }
}

#[test]
fn what_makes_no_sense_is_refused_by_name() {
    let fp8 = |field: &str, value: Value| json!({"quant_method": "fp8", field: value});
    for (config, field) in [
        (json!({}), "quantization_config.quant_method"),
        (json!({"quant_method": 8}), "quantization_config.quant_method"),
        (fp8("weight_block_size", json!([128])), "quantization_config.weight_block_size"),
        (fp8("weight_block_size", json!([0, 128])), "quantization_config.weight_block_size"),
        (fp8("weight_block_size", json!([128, -1])), "quantization_config.weight_block_size"),
        (fp8("ignore", json!("lm_head")), "quantization_config.ignore"),
        (fp8("exclude", json!(["re:("])), "quantization_config.exclude"),
        (fp8("ignored_layers", json!(["a[", "b"])), "quantization_config.ignored_layers"),
        (json!({"quant_method": "compressed-tensors"}), "quantization_config.config_groups"),
    ] {
        let error = refusal(config);
        assert_eq!(error.field(), Some(field), "{error}");
    }
    let config = json!({"quantization_config": {"quant_method": "gptq"}});
    let summary = ConfigSummary::new(&crate::tests::raw_with(&config).unwrap());
    assert_eq!(summary.quant_method.as_deref(), Some("gptq"));
    assert!(summary.refusal.unwrap().contains("`gptq`"));
}

#[test]
fn each_matrix_of_a_model_has_what_is_declared_of_it() {
    let config = json!({"quantization_config": {
        "quant_method": "fp8", "weight_block_size": [128, 128], "exclude": ["model.layers.5"]}});
    let config = config_with(&config).unwrap();
    for spec in config.target_tensors() {
        let is_matrix = spec.role() == crate::TensorRole::Matrix;
        let expected = if is_matrix { vec![Fp8Block([128, 128])] } else { Vec::new() };
        assert_eq!(spec.declared, DeclaredFormats { formats: expected, excluded_by: None });
    }
    let mut excluded = config.mtp_tensors(0).into_iter().map(|spec| spec.declared.excluded_by);
    assert!(excluded.any(|by| by.as_deref() == Some("model.layers.5")));
}

//! Tests of what other tools write: numbers, fields that mean nothing here, and fields that would
//! change the model.

use serde_json::{Value, json};

use super::{config_with, raw_with, valid};
use crate::*;

#[test]
fn a_whole_number_may_be_written_as_a_float() {
    let yarn = |factor: Value, context: Value| {
        json!({"rope_scaling": {
            "type": "yarn", "factor": factor, "original_max_position_embeddings": context
        }})
    };
    let pairs = [
        (json!({"num_hidden_layers": 5.0}), json!({})),
        (json!({"max_position_embeddings": 4.096e3}), json!({})),
        (json!({"eos_token_id": 1.0}), json!({})),
        (json!({"eos_token_id": [1.0, 2]}), json!({"eos_token_id": [1, 2]})),
        (json!({"rope_theta": 10_000}), json!({"rope_theta": 1e4})),
        (json!({"rms_norm_eps": 1}), json!({"rms_norm_eps": 1.0})),
        (yarn(json!(4), json!(64.0)), yarn(json!(4.0), json!(64))),
    ];
    for (changes, same) in pairs {
        assert_eq!(valid(changes.clone()), valid(same), "{changes}");
    }
    for (value, words) in [
        (json!(5.5), "floating point `5.5`, expected usize"),
        (json!(-5.0), "expected usize"),
        (json!(1e300), "expected usize"),
        (json!("5"), "string \"5\", expected usize"),
        (json!(true), "boolean `true`, expected usize"),
    ] {
        let error = raw_with(&json!({"num_hidden_layers": value})).unwrap_err();
        assert_eq!(error.field(), Some("num_hidden_layers"));
        assert!(error.to_string().contains(words), "{error}");
    }
}

#[test]
fn a_number_is_no_boolean() {
    for field in ["tie_word_embeddings", "norm_topk_prob", "rope_interleave", "attention_bias"] {
        for value in [json!(0), json!(1), json!(1.0), json!("true")] {
            let mut changes = json!({});
            changes[field] = value;
            let error = raw_with(&changes).unwrap_err();
            assert_eq!(error.field(), Some(field));
            assert!(error.to_string().contains("expected a boolean"), "{error}");
        }
    }
}

#[test]
fn a_long_value_is_shown_in_part() {
    let error = raw_with(&json!({"mlp_layer_types": vec![json!({"é": 1}); 500]})).unwrap_err();
    assert_eq!(error.field(), Some("mlp_layer_types"));
    let message = error.to_string();
    assert!(message.contains(r#"[{"é":1},"#) && message.contains("...: "), "{message}");
    assert!(message.len() < 300, "{message}");
}

/// Settings of training, of other tools, and of parts that only one value of is published.
#[test]
fn fields_without_a_meaning_here_are_ignored() {
    let changes = json!({
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "ep_size": 8,
        "aux_loss_alpha": 0.001, "seq_aux": true, "pretraining_tp": 1, "initializer_range": "x",
        "attention_dropout": 0.5, "use_cache": false, "pad_token_id": -1, "head_dim": 7,
        "moe_router_dtype": "float32", "transformers_version": 5, "mlp_bias": false,
        "partial_rotary_factor": 1.0,
        "sliding_window": null, "swiglu_limit": null, "text_config": null, "vision_config": null
    });
    assert_eq!(valid(changes), valid(json!({})));
}

#[test]
fn fields_that_would_change_the_model_are_refused() {
    let cases = [
        ("mlp_bias", json!(true), "only false"),
        ("sliding_window", json!(4096), "is 4096, which is not supported"),
        ("partial_rotary_factor", json!(0.5), "only 1 is supported"),
        ("swiglu_limit", json!(7.5), "is 7.5, which is not supported"),
        ("text_config", json!({"model_type": "kimi_k2"}), "use a checkpoint of one"),
        ("vision_config", json!({"depth": 27}), "only language models are supported"),
    ];
    for (field, value, words) in cases {
        // A model of another kind is of another type as well; what it is comes first.
        for model_type in ["deepseek_v3", "kimi_k25"] {
            if model_type == "kimi_k25" && !field.ends_with("_config") {
                continue;
            }
            let mut changes = json!({"model_type": model_type});
            changes[field] = value.clone();
            let error = config_with(&changes).unwrap_err();
            assert!(matches!(error, ConfigError::Unsupported { .. }), "{error}");
            assert_eq!(error.field(), Some(field));
            assert!(error.to_string().contains(words), "{error}");
        }
    }
}

#[test]
fn two_types_are_deepseek_v3_by_another_name() {
    for model_type in ["kimi_k2", "glm4_moe_lite"] {
        assert_eq!(valid(json!({"model_type": model_type})), valid(json!({})), "{model_type}");
    }
    for field in ["rms_norm_eps", "routed_scaling_factor"] {
        let mut changes = json!({"model_type": "kimi_k2"});
        changes[field] = Value::Null;
        valid(changes.clone());
        changes["model_type"] = json!("glm4_moe_lite");
        let error = config_with(&changes).unwrap_err();
        assert!(matches!(error, ConfigError::Missing { .. }), "{error}");
        assert_eq!(error.field(), Some(field));
    }
}

#[test]
fn two_fields_that_contradict_each_other_are_both_named() {
    let yarn = json!({
        "type": "yarn", "rope_type": "default", "factor": 4, "original_max_position_embeddings": 64
    });
    let new_rope = json!({"rope_type": "default", "rope_theta": 1e6});
    let cases = [
        (json!({"dtype": "float32"}), ["dtype", "torch_dtype"]),
        (json!({"num_mtp_layers": 0}), ["num_nextn_predict_layers", "num_mtp_layers"]),
        (json!({"rope_parameters": new_rope}), ["rope_theta", "rope_parameters.rope_theta"]),
        (json!({"rope_scaling": yarn}), ["rope_scaling.rope_type", "rope_scaling.type"]),
        (json!({"num_key_value_heads": 2}), ["num_key_value_heads", "num_attention_heads"]),
        (json!({"qk_head_dim": 40}), ["qk_head_dim", "qk_nope_head_dim"]),
        (json!({"topk_group": 5}), ["topk_group", "n_group"]),
        (json!({"num_experts_per_tok": 9}), ["num_experts_per_tok", "topk_group"]),
        (json!({"vocab_size": 1}), ["eos_token_id", "vocab_size"]),
        (
            json!({"mlp_layer_types": vec!["dense"; 5]}),
            ["mlp_layer_types[1]", "first_k_dense_replace"],
        ),
        (json!({"mlp_layer_types": []}), ["mlp_layer_types", "num_hidden_layers"]),
    ];
    for (changes, [field, other]) in cases {
        let error = config_with(&changes).unwrap_err();
        assert_eq!(error.field(), Some(field), "{changes}: {error}");
        assert!(error.to_string().contains(other), "{changes}: {error}");
    }
}

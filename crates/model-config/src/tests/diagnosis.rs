//! Tests of finding every fault of a config.

use super::*;

/// The fields at fault in the bundled GLM config with changes, and whether its tensors are known.
fn diagnose(changes: &Value) -> (Vec<String>, bool) {
    let dir = tempfile::tempdir().unwrap();
    let text = std::fs::read_to_string(bundled("tiny-glm52").join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&text).unwrap();
    config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    std::fs::write(dir.path().join("generation_config.json"), r#"{"eos_token_id": 1}"#).unwrap();
    let diagnosis = ConfigDiagnosis::load(dir.path()).unwrap();
    let strict = ModelConfig::load(dir.path()).map_err(|error| error.to_string());
    let first = diagnosis.errors.first().map(ToString::to_string);
    assert_eq!(strict.err(), first, "the first error is the one that loading meets");
    let field = |error: &ConfigError| error.field().unwrap().to_owned();
    (diagnosis.errors.iter().map(field).collect(), diagnosis.model.is_some())
}

#[test]
fn every_fault_of_a_config_is_found() {
    for (changes, fields, is_known) in [
        (json!({}), &[][..], true),
        (
            json!({
                "hidden_act": "gelu", "mlp_bias": true, "rope_theta": -1.0, "eos_token_id": 9999
            }),
            &["mlp_bias", "hidden_act", "eos_token_id", "rope_theta"],
            true,
        ),
        // What a wrong value was meant to be is unknown, and so are the tensors.
        (json!({"hidden_act": "gelu", "q_lora_rank": -3}), &["q_lora_rank", "hidden_act"], false),
        (json!({"rms_norm_eps": "small", "dtype": "int4"}), &["rms_norm_eps", "dtype"], true),
        (json!({"model_type": "glm_of_tomorrow", "hidden_act": "gelu"}), &["model_type"], false),
        (json!({"topk_group": 7, "hidden_act": "gelu"}), &["hidden_act", "topk_group"], true),
        (json!({"indexer_types": ["full"]}), &["indexer_types"], false),
    ] {
        let (found, found_known) = diagnose(&changes);
        assert_eq!((found, found_known), (fields.iter().map(|&f| f.into()).collect(), is_known));
    }
}

#[test]
fn what_is_no_config_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let read = ConfigDiagnosis::load(dir.path()).unwrap_err();
    assert!(matches!(read, ConfigError::Read { .. }), "{read}");
    std::fs::write(dir.path().join("config.json"), "[1]").unwrap();
    let json = ConfigDiagnosis::load(dir.path()).unwrap_err();
    assert!(matches!(json, ConfigError::Json { .. }), "{json}");
}

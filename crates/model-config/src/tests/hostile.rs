//! Hostile files, each with the text of its error.

use std::fs;

use crate::{ConfigError, GenerationConfig, ModelConfig, RawConfig};

/// What is said of a `config.json` with this text.
fn error_of(text: &str) -> String {
    let error = RawConfig::parse(text, "config.json").and_then(|raw| ModelConfig::from_raw(&raw));
    error.unwrap_err().to_string()
}

#[test]
fn texts_that_are_no_config_are_refused() {
    let array_bomb = format!("{{\"a\": {}", "[".repeat(1 << 20));
    let object_bomb = "{\"a\":".repeat(1 << 20);
    for (text, expected) in [
        ("", "config.json is not a JSON object: EOF while parsing"),
        ("{\"vocab_size\": NaN}", "expected value"),
        ("{\"rope_theta\": 1e400}", "number out of range"),
        ("{\"a\": \"\\ud800\"}", "unexpected end of hex escape"),
        (&array_bomb, "recursion limit exceeded"),
        (&object_bomb, "recursion limit exceeded"),
    ] {
        let error = error_of(text);
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn numbers_beyond_reason_are_refused_by_their_field() {
    let base = r#""model_type": "deepseek_v3", "vocab_size": 320, "hidden_size": 64,
        "num_hidden_layers": 2, "intermediate_size": 160, "num_attention_heads": 4,
        "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16"#;
    let long = format!("\"{}\"", "x".repeat(1 << 20));
    for (field, value) in [
        ("vocab_size", "-1"),
        ("vocab_size", "1e308"),
        ("vocab_size", "18446744073709551615"),
        ("vocab_size", "1e999999999"),
        ("num_hidden_layers", "1000000000"),
        ("num_nextn_predict_layers", "18446744073709551615"),
        ("rms_norm_eps", "1e308"),
        ("rope_theta", "1e308"),
        ("rms_norm_eps", "-1e308"),
        ("rope_theta", "-0.0"),
        ("eos_token_id", "[-1]"),
        ("eos_token_id", "4294967296"),
        ("hidden_size", &long),
    ] {
        // Of two fields of one name the last one counts.
        let text = format!("{{{base}, \"{field}\": {value}}}");
        let error = error_of(&text);
        assert!(error.contains(field) || error.contains("number out of range"), "{error}");
        assert!(error.len() < 500, "{field}: {} bytes of error", error.len());
    }
}

#[test]
fn what_is_no_file_is_never_opened() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["config.json", "generation_config.json"] {
        let file = dir.path().join(name);
        let load = || -> Result<(), ConfigError> {
            match name {
                "config.json" => RawConfig::load(dir.path()).map(drop),
                _ => GenerationConfig::load(dir.path()).map(drop),
            }
        };
        fs::create_dir(&file).unwrap();
        let error = load().unwrap_err().to_string();
        assert!(error.ends_with(&format!("{name}: it is not a regular file")), "{error}");
        fs::remove_dir(&file).unwrap();
        fs::File::create(&file).unwrap().set_len(1 << 40).unwrap();
        let error = load().unwrap_err().to_string();
        assert!(error.ends_with(&format!("{name}: it has more than 67108864 bytes")), "{error}");
        fs::write(&file, r#"{"eos_token_id": {"a": 1}}"#).unwrap();
        let error = load().unwrap_err().to_string();
        assert!(error.contains(name) && error.contains("`eos_token_id`"), "{error}");
    }
}

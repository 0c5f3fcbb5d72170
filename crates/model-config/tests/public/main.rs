//! Public models, by their `config.json` as published: what they are, and what comes out of a
//! config that has a fault.

mod counts;
mod mutations;
mod values;

use std::fs;
use std::path::Path;

use model_config::{ConfigError, ConfigSummary, ModelConfig, RawConfig};
use serde_json::{Map, Value};

/// Each file of `tests/configs`.
const MODELS: &[&str] = &[
    "deepseek-v2-lite",
    "deepseek-v2",
    "deepseek-v3",
    "deepseek-r1",
    "deepseek-v3.1",
    "deepseek-v3.2-exp",
    "moonlight-16b-a3b",
    "kimi-k2-instruct",
    "glm-4.5-air",
    "glm-4.7-flash",
    "glm-5",
    "glm-5.2",
];

type Fields = Map<String, Value>;

fn published(name: &str) -> Fields {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/configs");
    let text = fs::read_to_string(folder.join(format!("{name}.json"))).expect("the file is there");
    serde_json::from_str(&text).expect("it is a JSON object")
}

/// The config of the same model in bfloat16.
fn in_bfloat16(name: &str) -> Fields {
    let mut fields = published(name);
    fields.remove("quantization_config");
    fields
}

fn raw(fields: &Fields) -> Result<RawConfig, ConfigError> {
    let text = serde_json::to_string(fields).expect("JSON is text");
    RawConfig::parse(&text, "dir/config.json")
}

fn read(fields: &Fields) -> Result<ModelConfig, ConfigError> {
    ModelConfig::from_raw(&raw(fields)?)
}

#[test]
fn every_published_config_runs() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/configs");
    assert_eq!(fs::read_dir(folder).unwrap().count(), MODELS.len(), "a file is not in the list");
    for name in MODELS {
        let fields = published(name);
        read(&fields).unwrap_or_else(|error| panic!("{name}: {error}"));
        let summary = ConfigSummary::new(&raw(&fields).unwrap());
        assert_eq!(summary.refusal, None, "{name}");
        assert_eq!(summary.architecture.as_deref(), fields["architectures"][0].as_str(), "{name}");
        assert_eq!(summary.dtype.as_deref(), Some("bfloat16"), "{name}");
    }
}

//! Public models, by their `config.json` as published: what runs, what is refused and how, and
//! what comes out of a config that has a fault.

mod counts;
mod mutations;
mod values;

use std::fs;
use std::path::Path;

use model_config::{ConfigError, ConfigSummary, ModelConfig, RawConfig};
use serde_json::{Map, Value};

/// What becomes of a config.
#[derive(Clone, Copy, Debug)]
enum Outcome {
    Runs,
    /// By this field, with a message that has these words.
    Refused(&'static str, &'static str),
}
use Outcome::{Refused, Runs};

const OTHER_TYPE: Outcome = Refused("model_type", "use a model of the type `deepseek_v3`");

/// Each file of `tests/configs`, and what becomes of it.
const MODELS: &[(&str, Outcome)] = &[
    ("deepseek-v2-lite", OTHER_TYPE),
    ("deepseek-v2", OTHER_TYPE),
    ("deepseek-v3", Runs),
    ("deepseek-r1", Runs),
    ("deepseek-v3.1", Runs),
    ("deepseek-v3.2-exp", Runs),
    ("moonlight-16b-a3b", Runs),
    ("kimi-k2-instruct", Runs),
    ("glm-4.5-air", OTHER_TYPE),
    ("glm-4.7-flash", Runs),
    ("glm-5", Runs),
    ("glm-5.2", Runs),
];

type Fields = Map<String, Value>;

fn published(name: &str) -> Fields {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/configs");
    let text = fs::read_to_string(folder.join(format!("{name}.json"))).expect("the file is there");
    serde_json::from_str(&text).expect("it is a JSON object")
}

/// The config of the same model in bfloat16. DeepSeek-V2 is read as V3: its layers are the same but
/// for the router.
fn runnable(name: &str) -> Fields {
    let mut fields = published(name);
    fields.remove("quantization_config");
    if fields["model_type"] == "deepseek_v2" {
        fields["model_type"] = "deepseek_v3".into();
    }
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
fn every_published_config_runs_or_is_refused_by_name() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/configs");
    assert_eq!(fs::read_dir(folder).unwrap().count(), MODELS.len(), "a file is not in the table");
    for &(name, outcome) in MODELS {
        let fields = published(name);
        let summary = ConfigSummary::new(&raw(&fields).unwrap());
        match (read(&fields), outcome) {
            (Ok(_), Runs) => assert_eq!(summary.refusal, None, "{name}"),
            (Err(error), Refused(field, words)) => {
                let message = error.to_string();
                assert_eq!(error.field(), Some(field), "{name}: {message}");
                assert!(message.contains(words), "{name}: {message}");
                assert!(message.contains("dir/config.json"), "{name}: {message}");
                assert_eq!(summary.refusal, Some(message), "{name}");
            }
            (result, outcome) => panic!("{name}: {result:?}, not {outcome:?}"),
        }
        assert_eq!(summary.architecture.as_deref(), fields["architectures"][0].as_str(), "{name}");
        assert_eq!(summary.dtype.as_deref(), Some("bfloat16"), "{name}");
    }
}

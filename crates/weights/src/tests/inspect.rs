//! Tests of describing checkpoints in any state.

use super::*;

fn describe(dir: &Path) -> CheckpointSummary {
    CheckpointSummary::of(dir).unwrap()
}

/// The problems of a checkpoint as one text, and how many they are.
fn problems(summary: &CheckpointSummary) -> (usize, String) {
    let texts: Vec<&str> = summary.problems.iter().map(|problem| &problem.text[..]).collect();
    (texts.len(), texts.join("\n"))
}

#[test]
fn a_config_or_an_index_alone_is_as_good_as_the_whole() {
    let copy = copied_from("tiny-glm52");
    let whole = describe(copy.path());
    let values = whole.loaded.unwrap();
    let n_target = whole.parameters.total() - whole.parameters.mtp;
    assert_eq!(values.model + values.float32, n_target);
    assert_eq!(whole.loaded_mtp.model + whole.loaded_mtp.float32, whole.parameters.mtp);
    fs::remove_file(copy.path().join(SHARD_1)).unwrap();
    fs::remove_file(copy.path().join(SHARD_2)).unwrap();
    let index = describe(copy.path());
    // The index does not say in which dtype; this file has what is loaded as float32 in bfloat16.
    assert_eq!((index.source, index.problems.len()), (WeightsSource::Index, 0));
    assert_eq!((index.parameters, index.loaded), (whole.parameters, whole.loaded));
    assert_eq!((index.num_mtp_layers_present, index.is_mtp_complete), (1, Some(true)));
    edit_index(copy.path(), |map| map.retain(|name, _| !name.contains("eh_proj")));
    let headless = describe(copy.path());
    assert_eq!((headless.problems(false).count(), headless.is_mtp_complete), (0, Some(false)));
    assert!(problems(&headless).1.contains("model.layers.5.eh_proj.weight is missing"));

    fs::remove_file(copy.path().join(INDEX)).unwrap();
    let config = describe(copy.path());
    assert_eq!((config.source, config.problems.len()), (WeightsSource::Config, 0));
    assert_eq!((config.parameters, config.loaded), (whole.parameters, whole.loaded));
    assert_eq!((config.num_mtp_layers_present, config.is_mtp_complete), (0, None));
}

#[test]
fn every_problem_is_found_at_once() {
    let gone = "model.layers.2.mlp.gate.weight";
    let copy = copied_without(|name| name == gone || name == "model.layers.5.enorm.weight");
    let file = copy.path().join("config.json");
    let config = fs::read_to_string(&file).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&config).unwrap();
    config["hidden_act"] = "gelu".into();
    config["mlp_bias"] = true.into();
    fs::write(&file, config.to_string()).unwrap();
    edit_index(copy.path(), |map| {
        map.insert("model.norm.bias".to_owned(), SHARD_1.to_owned());
    });
    let summary = describe(copy.path());
    let (n_problems, text) = problems(&summary);
    assert_eq!((n_problems, summary.problems(false).count()), (5, 4), "{text}");
    for needle in ["mlp_bias", "gelu", "model.norm.bias is not in", gone, "enorm.weight is missing"]
    {
        assert!(text.contains(needle), "{needle} is not in {text}");
    }

    // What is in a shard that is not there is not missing as well.
    fs::remove_file(copy.path().join(SHARD_2)).unwrap();
    let summary = describe(copy.path());
    let (n_problems, text) = problems(&summary);
    assert_eq!((n_problems, summary.source), (6, WeightsSource::Shards), "{text}");
    assert!(text.contains(SHARD_2), "{text}");
    assert_eq!(text.matches("is missing").count(), 2, "{text}");

    // Nor does anything about shards hide behind a broken one.
    fs::write(copy.path().join(SHARD_2), "not a shard").unwrap();
    assert_eq!(problems(&describe(copy.path())).0, 6);
    fs::write(copy.path().join(INDEX), "{}").unwrap();
    let (n_problems, text) = problems(&describe(copy.path()));
    assert_eq!(n_problems, 3, "{text}");
    assert!(text.contains("not a safetensors index"), "{text}");
}

#[test]
fn a_config_that_is_wrong_on_quantisation_is_one_problem() {
    let copy = copied();
    let (file, index) = (copy.path().join("config.json"), copy.path().join(INDEX));
    let mut config: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
    config["quantization_config"] =
        serde_json::json!({"quant_method": "fp8", "weight_block_size": [0, 4]});
    fs::write(&file, config.to_string()).unwrap();
    fs::remove_file(index).unwrap();
    // Of the tensors two have faults: one that a right config could make good, and one that none
    // could.
    let (scaled, bare) = ("model.layers.0.mlp.up_proj", "model.layers.0.mlp.gate_proj");
    let (scale, [scaled, bare]) =
        (format!("{scaled}.weight_scale_inv"), [scaled, bare].map(|name| format!("{name}.weight")));
    let codes = vec![0; 512 * 256];
    let tensors: [(&str, Dtype, &[usize], &[u8]); 3] = [
        (&scaled, Dtype::F8_E4M3, &[512, 256], &codes),
        (&scale, Dtype::F32, &[4, 2], &[0; 32]),
        (&bare, Dtype::F8_E4M3, &[512, 256], &codes),
    ];
    write_single(copy.path(), &tensors);
    let (_, text) = problems(&describe(copy.path()));
    assert!(text.contains("weight_block_size` is [0, 4]"), "{text}");
    assert!(text.contains(&format!("{bare} is F8_E4M3 and has no scale")), "{text}");
    assert!(!text.contains(&scale), "{text}");
    // Nor does a layer that is not there take a line a tensor.
    assert!(text.contains("model.layers.1 is missing with all its"), "{text}");
    assert!(!text.contains("model.layers.1."), "{text}");
}

#[test]
fn packed_values_of_unknown_models_count_each() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("config.json"), r#"{"model_type": "other"}"#).unwrap();
    let tensors: [(&str, Dtype, &[usize], &[u8]); 4] = [
        ("model.embed_tokens.weight", Dtype::BF16, &[2, 4], &[0; 16]),
        ("model.layers.0.mlp.up_proj.weight_packed", Dtype::U8, &[2, 2], &[0; 4]),
        ("model.layers.0.mlp.up_proj.weight_scale", Dtype::U8, &[2, 1], &[0; 2]),
        ("model.layers.0.mlp.down_proj.input_scale", Dtype::F32, &[1], &[0; 4]),
    ];
    write_single(dir.path(), &tensors);
    let summary = describe(dir.path());
    assert_eq!((summary.parameters.embeddings, summary.parameters.dense_mlp), (8, 8));
    assert_eq!(summary.bytes_by_dtype["U8"], 6);
    assert_eq!((summary.loaded, summary.is_mtp_complete), (None, None));
    let (n_problems, text) = problems(&summary);
    assert!(n_problems == 1 && text.contains("`other`"), "{text}");
}

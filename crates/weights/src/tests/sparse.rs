//! Tests on checkpoints with sparse attention and with other routers (fault case L19's controls).
//! They are made from the bundled GLM checkpoint: layers full, full, shared, full, shared, and an
//! MTP layer with an indexer of its own.

use super::*;

const INDEXER: [&str; 5] =
    ["k_norm.bias", "k_norm.weight", "weights_proj.weight", "wk.weight", "wq_b.weight"];

fn indexer_of(layer_idx: usize) -> BTreeSet<String> {
    INDEXER.map(|name| format!("model.layers.{layer_idx}.self_attn.indexer.{name}")).into()
}

fn copied_glm_without(is_removed: impl Fn(&str) -> bool) -> TempDir {
    copied_from_without("tiny-glm52", is_removed)
}

fn edit_config(dir: &Path, changes: &serde_json::Value) -> ModelConfig {
    let file = dir.join("config.json");
    let mut config: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
    for (field, value) in changes.as_object().unwrap() {
        config[field] = value.clone();
    }
    fs::write(&file, config.to_string()).unwrap();
    ModelConfig::load(dir).unwrap()
}

#[test]
fn a_sparse_checkpoint_loads_and_norms_of_index_keys_stay_float32() {
    let (_, mut loaded) = load_whole("tiny-glm52");
    for layer_idx in [0, 1, 3, 5] {
        for name in indexer_of(layer_idx) {
            let kind = if name.contains("k_norm") { Kind::Float } else { Kind::BFloat16 };
            assert_eq!(loaded.take(&name).unwrap().kind(), kind, "{name}");
        }
    }
    assert!(!loaded.names().any(|name| name.contains("indexer")));
}

/// A layer that shares owns no indexer; `glm-shared` has layers full, shared, full.
#[test]
fn l19_layers_that_share_need_no_indexer() {
    for name in ["glm-shared", "v32-dsa"] {
        let dir = fixture(name);
        let config = ModelConfig::load(&dir).unwrap();
        let checkpoint = Checkpoint::open(&dir).unwrap();
        let expected = config.target_tensors();
        assert!(checkpoint.leftovers(&expected).is_empty(), "{name}");
        let loaded = checkpoint.load(&expected, Device::Cpu, Kind::Float).unwrap();
        let is_there = |layer_idx| {
            indexer_of(layer_idx).iter().all(|name| loaded.names().any(|loaded| loaded == name))
        };
        assert_eq!([0, 1, 2].map(is_there), [true, name == "v32-dsa", true], "{name}");
    }
}

#[test]
fn an_indexer_that_a_sharing_layer_brings_is_left_over() {
    let copy = copied_from("tiny-glm52");
    let types = ["full", "shared", "shared", "full", "shared"];
    let config = edit_config(copy.path(), &serde_json::json!({"indexer_types": types}));
    let checkpoint = Checkpoint::open(copy.path()).unwrap();
    let mut expected = config.target_tensors();
    checkpoint.check(&expected).unwrap();
    expected.extend(config.all_mtp_tensors());
    let leftovers: Vec<String> = indexer_of(1).into_iter().collect();
    assert_eq!(checkpoint.leftovers(&expected), leftovers);
}

#[test]
fn l19_a_full_layer_without_its_indexer_is_refused_by_the_tensors_names() {
    let copy = copied_glm_without(|name| indexer_of(3).contains(name));
    let config = ModelConfig::load(copy.path()).unwrap();
    let checkpoint = Checkpoint::open(copy.path()).unwrap();
    let error = checkpoint.check(&config.target_tensors()).unwrap_err();
    assert_eq!(missing_of(&error), indexer_of(3));
    for name in indexer_of(3) {
        assert!(error.to_string().contains(&name), "{error}");
        let copy = copied_glm_without(|other| other == name);
        let checkpoint = Checkpoint::open(copy.path()).unwrap();
        let error = checkpoint.check(&config.target_tensors()).unwrap_err();
        assert_eq!(missing_of(&error), [name].into());
    }
    // A config that calls a sharing layer full finds nothing to load.
    let copy = copied_from("tiny-glm52");
    let types = ["full", "full", "full", "full", "shared"];
    let config = edit_config(copy.path(), &serde_json::json!({"indexer_types": types}));
    let error = Checkpoint::open(copy.path()).unwrap().check(&config.target_tensors()).unwrap_err();
    assert_eq!(missing_of(&error), indexer_of(2));
}

/// The MTP layer has an indexer of its own even where the target's layers share, and even where
/// the config says that it shares.
#[test]
fn l19_an_mtp_layer_without_its_indexer_is_refused_only_for_drafting() {
    for types in [
        &["full", "full", "shared", "full", "shared"][..],
        &["full", "full", "shared", "full", "shared", "shared"],
    ] {
        let copy = copied_glm_without(|name| indexer_of(5).contains(name));
        let config = edit_config(copy.path(), &serde_json::json!({"indexer_types": types}));
        let checkpoint = Checkpoint::open(copy.path()).unwrap();
        checkpoint.load(&config.target_tensors(), Device::Cpu, Kind::Float).unwrap();
        let error = checkpoint.check_mtp(&config).unwrap_err();
        assert_eq!(missing_of(&error), indexer_of(5));
        assert!(error.to_string().contains("--num-speculative-tokens 0"), "{error}");
        for name in indexer_of(5) {
            assert!(error.to_string().contains(&name), "{error}");
        }
        let summary = CheckpointSummary::of(copy.path()).unwrap();
        assert_eq!((summary.num_mtp_layers_present, summary.is_mtp_complete), (1, Some(false)));
    }
}

#[test]
fn an_indexer_of_the_wrong_shape_is_refused() {
    let copy = copied_from("tiny-glm52");
    let config = edit_config(copy.path(), &serde_json::json!({"index_n_heads": 8}));
    let error = Checkpoint::open(copy.path()).unwrap().check(&config.target_tensors()).unwrap_err();
    let WeightsError::Unfit { missing, misshapen, .. } = &error else { panic!("{error}") };
    assert!(missing.is_empty());
    // Two tensors of each of three indexers depend on the number of heads.
    assert_eq!(misshapen.len(), 2 * 3, "{error}");
    let wq_b =
        misshapen.iter().find(|tensor| tensor.name.ends_with("0.self_attn.indexer.wq_b.weight"));
    assert_eq!(wq_b.map(|tensor| tensor.expected.as_slice()), Some(&[8 * 32, 128][..]));
}

/// A correction bias belongs to the noaux_tc choice; other routers load without one.
#[test]
fn l19_a_softmax_router_without_correction_bias_loads() {
    let is_bias = |name: &str| name.ends_with(".e_score_correction_bias");
    for name in ["tiny-dsv3", "tiny-glm52"] {
        let copy = copied_from_without(name, is_bias);
        let dir = copy.path();
        let checkpoint = Checkpoint::open(dir).unwrap();
        let config = ModelConfig::load(dir).unwrap();
        let error = checkpoint.check(&config.target_tensors()).unwrap_err();
        assert_eq!(missing_of(&error).len(), 4, "{name}: {error}");
        for method in ["greedy", "group_limited_greedy"] {
            let changes = serde_json::json!({"scoring_func": "softmax", "topk_method": method});
            let config = edit_config(dir, &changes);
            let expected = config.target_tensors();
            let loaded = checkpoint.load(&expected, Device::Cpu, Kind::Float).unwrap();
            assert_eq!(loaded.len(), expected.len());
            checkpoint.check_mtp(&config).unwrap();
        }
    }
}

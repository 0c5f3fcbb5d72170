//! Tests on whole and on damaged checkpoints. The damaged ones are made from the bundled
//! checkpoint: five layers, an MTP layer, two shards.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use model_config::{
    AttentionConfig, ConfigError, LoadDtype, ModelConfig, RawConfig, TensorRole, TensorSpec,
};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use tch::{Device, Kind, Tensor};
use tempfile::TempDir;

use crate::*;

mod dummy;
mod inspect;
mod quantized;
mod sparse;
mod texts;

const SHARD_1: &str = "model-00001-of-00002.safetensors";
const SHARD_2: &str = "model-00002-of-00002.safetensors";
const INDEX: &str = "model.safetensors.index.json";
const MTP: &str = "model.layers.5.";

fn bundled(name: &str) -> PathBuf {
    bundled_checkpoints::find(name, None).unwrap()
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/fixtures").join(name)
}

/// A writable copy of the bundled DeepSeek-V3 checkpoint without its tokenizer.
fn copied() -> TempDir {
    copied_from("tiny-dsv3")
}

fn copied_from(name: &str) -> TempDir {
    let copy = tempfile::tempdir().unwrap();
    for file in ["config.json", INDEX, SHARD_1, SHARD_2] {
        fs::copy(bundled(name).join(file), copy.path().join(file)).unwrap();
    }
    copy
}

/// A copy whose shards and index lack the tensors that `is_removed` says.
fn copied_without(is_removed: impl Fn(&str) -> bool) -> TempDir {
    copied_from_without("tiny-dsv3", is_removed)
}

fn copied_from_without(name: &str, is_removed: impl Fn(&str) -> bool) -> TempDir {
    let copy = copied_from(name);
    for shard in [SHARD_1, SHARD_2] {
        let file = copy.path().join(shard);
        let bytes = fs::read(&file).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap().tensors();
        let kept = tensors.into_iter().filter(|(name, _)| !is_removed(name));
        fs::write(&file, safetensors::serialize(kept, None).unwrap()).unwrap();
    }
    edit_index(copy.path(), |weight_map| weight_map.retain(|name, _| !is_removed(name)));
    copy
}

fn edit_index(dir: &Path, edit: impl FnOnce(&mut BTreeMap<String, String>)) {
    let file = dir.join(INDEX);
    let text = fs::read_to_string(&file).unwrap();
    let index: serde_json::Value = serde_json::from_str(&text).unwrap();
    let mut weight_map = serde_json::from_value(index["weight_map"].clone()).unwrap();
    edit(&mut weight_map);
    fs::write(&file, serde_json::json!({ "weight_map": weight_map }).to_string()).unwrap();
}

fn write_single(dir: &Path, tensors: &[(&str, Dtype, &[usize], &[u8])]) {
    let views = tensors.iter().map(|&(name, dtype, shape, data)| {
        (name, TensorView::new(dtype, shape.to_vec(), data).unwrap())
    });
    let bytes = safetensors::serialize(views, None).unwrap();
    fs::write(dir.join("model.safetensors"), bytes).unwrap();
}

fn open_error(dir: &Path) -> WeightsError {
    match Checkpoint::open(dir) {
        Ok(_) => panic!("{} was opened", dir.display()),
        Err(error) => error,
    }
}

fn spec(name: &str, shape: &[usize]) -> TensorSpec {
    TensorSpec::new(name, shape)
}

fn values(tensor: &Tensor) -> Vec<f32> {
    Vec::<f32>::try_from(tensor.to_kind(Kind::Float).view(-1)).unwrap()
}

/// The names that an [`WeightsError::Unfit`] lists as missing.
fn missing_of(error: &WeightsError) -> BTreeSet<String> {
    match error {
        WeightsError::Unfit { missing, misshapen, unreadable, .. } => {
            assert!(misshapen.is_empty() && unreadable.is_empty(), "{error}");
            missing.iter().cloned().collect()
        }
        WeightsError::MtpIncomplete { source, .. } => missing_of(source),
        other => panic!("not a list of missing tensors: {other}"),
    }
}

#[test]
fn bfloat16_values_are_the_stored_bits() {
    let dir = bundled("tiny-dsv3");
    let checkpoint = Checkpoint::open(&dir).unwrap();
    let bytes = fs::read(dir.join(SHARD_1)).unwrap();
    let shard = SafeTensors::deserialize(&bytes).unwrap();
    for name in ["model.embed_tokens.weight", "model.layers.1.mlp.experts.3.down_proj.weight"] {
        let view = shard.tensor(name).unwrap();
        let pairs = view.data().chunks_exact(2);
        let expected: Vec<f32> = pairs
            .map(|pair| f32::from_bits(u32::from(u16::from_le_bytes([pair[0], pair[1]])) << 16))
            .collect();
        for kind in [Kind::Float, Kind::BFloat16] {
            let tensor = checkpoint.tensor(name, Device::Cpu, kind).unwrap().unwrap();
            assert_eq!(tensor.kind(), kind);
            assert_eq!(tensor.size(), view.shape().iter().map(|&n| n as i64).collect::<Vec<_>>());
            assert_eq!(values(&tensor), expected, "{name}");
        }
    }
    assert!(checkpoint.tensor("model.nothing", Device::Cpu, Kind::Float).unwrap().is_none());
}

#[test]
fn float32_and_float16_are_read_and_converted() {
    let dir = tempfile::tempdir().unwrap();
    let single: Vec<u8> = [1.5f32, -2.0].iter().flat_map(|x| x.to_le_bytes()).collect();
    // 0x3e00 is 1.5 and 0xc000 is -2 in half precision.
    let half: Vec<u8> = [0x3e00u16, 0xc000].iter().flat_map(|x| x.to_le_bytes()).collect();
    let tensors: [(&str, Dtype, &[usize], &[u8]); 2] =
        [("single", Dtype::F32, &[2, 1], &single), ("half", Dtype::F16, &[2, 1], &half)];
    write_single(dir.path(), &tensors);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    for kind in [Kind::Float, Kind::Half, Kind::BFloat16] {
        let expected = [spec("single", &[2, 1]), spec("half", &[2, 1])];
        let mut loaded = checkpoint.load(&expected, Device::Cpu, kind).unwrap();
        for name in ["single", "half"] {
            let tensor = loaded.take(name).unwrap();
            assert_eq!((tensor.kind(), tensor.size()), (kind, vec![2, 1]));
            assert_eq!(values(&tensor), [1.5, -2.0], "{name} as {kind:?}");
        }
        assert!(loaded.is_empty());
        let error = loaded.take("half").unwrap_err();
        assert!(error.to_string().contains("half was not loaded or was already taken"));
    }
}

/// A bundled checkpoint in bfloat16, MTP layers included, and the tensors that it must have.
fn load_whole(name: &str) -> (Vec<TensorSpec>, TensorMap) {
    let dir = bundled(name);
    let config = ModelConfig::load(&dir).unwrap();
    let checkpoint = Checkpoint::open(&dir).unwrap();
    checkpoint.check_mtp(&config).unwrap();
    let mut expected = config.target_tensors();
    expected.extend(config.all_mtp_tensors());
    assert!(checkpoint.leftovers(&expected).is_empty());
    let loaded = checkpoint.load(&expected, Device::Cpu, Kind::BFloat16).unwrap();
    (expected, loaded)
}

#[test]
fn a_whole_checkpoint_loads_and_routers_stay_float32() {
    let (expected, mut loaded) = load_whole("tiny-dsv3");
    for spec in &expected {
        let Some(tensor) = loaded.take_optional(&spec.name).unwrap() else {
            assert!(spec.is_optional, "{}", spec.name);
            continue;
        };
        let is_router = spec.name.contains(".mlp.gate.");
        assert_eq!(tensor.kind(), if is_router { Kind::Float } else { Kind::BFloat16 });
    }
    assert_eq!(loaded.names().count(), 0);

    let dir = bundled("tiny-dsv3");
    let checkpoint = Checkpoint::open(&dir).unwrap();
    let leftovers = checkpoint.leftovers(&ModelConfig::load(&dir).unwrap().target_tensors());
    assert!(leftovers.contains(&"model.layers.5.eh_proj.weight"));
    assert!(leftovers.iter().all(|name| name.starts_with(MTP)), "{leftovers:?}");
}

/// L19, the controls: no query rank, no MTP tensors while nothing drafts, one file or many.
#[test]
fn l19_complete_checkpoints_of_every_kind_load() {
    for name in ["v3-groups", "v3-half-split-rope", "v3-no-qlora", "v3-yarn"] {
        let dir = fixture(name);
        let config = ModelConfig::load(&dir).unwrap();
        let checkpoint = Checkpoint::open(&dir).unwrap();
        let expected = config.target_tensors();
        assert!(checkpoint.leftovers(&expected).is_empty(), "{name}");
        let loaded = checkpoint.load(&expected, Device::Cpu, Kind::Float).unwrap();
        assert_eq!(loaded.len(), expected.len(), "{name}");
        let has_q_proj = loaded.names().any(|tensor| tensor.ends_with(".q_proj.weight"));
        assert_eq!(has_q_proj, name == "v3-no-qlora");
    }
}

#[test]
fn l19_all_mtp_tensors_removed_is_refused_only_for_drafting() {
    let copy = copied_without(|name| name.starts_with(MTP));
    let config = ModelConfig::load(copy.path()).unwrap();
    let checkpoint = Checkpoint::open(copy.path()).unwrap();
    checkpoint.load(&config.target_tensors(), Device::Cpu, Kind::Float).unwrap();

    let error = checkpoint.check_mtp(&config).unwrap_err();
    let required = config.all_mtp_tensors().into_iter().filter(|spec| !spec.is_optional);
    assert_eq!(missing_of(&error), required.map(|spec| spec.name).collect());
    let message = error.to_string();
    assert!(message.contains("--num-speculative-tokens 0"), "{message}");
    assert!(message.contains("model.layers.5 is missing"), "{message}");

    let mut without_mtp = config;
    without_mtp.num_mtp_layers = 0;
    let error = checkpoint.check_mtp(&without_mtp).unwrap_err();
    assert!(matches!(error, WeightsError::NoMtpLayers { .. }), "{error}");
}

#[test]
fn l19_one_mtp_tensor_removed_is_named() {
    for lost in ["model.layers.5.eh_proj.weight", "model.layers.5.mlp.experts.7.up_proj.weight"] {
        let copy = copied_without(|name| name == lost);
        let config = ModelConfig::load(copy.path()).unwrap();
        let checkpoint = Checkpoint::open(copy.path()).unwrap();
        let error = checkpoint.check_mtp(&config).unwrap_err();
        assert_eq!(missing_of(&error), [lost.to_owned()].into());
        checkpoint.check(&config.target_tensors()).unwrap();
    }
}

#[test]
fn l19_an_mtp_layer_without_its_own_head_and_embedding_is_complete() {
    let copy = copied_without(|name| {
        name == "model.layers.5.embed_tokens.weight"
            || name == "model.layers.5.shared_head.head.weight"
    });
    let config = ModelConfig::load(copy.path()).unwrap();
    Checkpoint::open(copy.path()).unwrap().check_mtp(&config).unwrap();
}

#[test]
fn l19_a_deleted_shard_is_named() {
    let copy = copied();
    fs::remove_file(copy.path().join(SHARD_2)).unwrap();
    let error = open_error(copy.path());
    assert!(matches!(error, WeightsError::ShardsAbsent { .. }), "{error}");
    assert!(error.to_string().contains(SHARD_2) && !error.to_string().contains(SHARD_1));
}

#[test]
fn a_shard_outside_the_folder_is_refused_by_its_name() {
    for outside in ["../model.safetensors", "/etc/hostname"] {
        let copy = copied();
        edit_index(copy.path(), |weight_map| {
            weight_map.insert("lm_head.weight".into(), outside.into());
        });
        let error = open_error(copy.path());
        assert!(matches!(error, WeightsError::BadIndex { .. }), "{error}");
        assert!(error.to_string().contains(INDEX) && error.to_string().contains(outside));
    }
}

#[test]
fn what_is_no_file_is_never_opened() {
    for name in [SHARD_1, INDEX] {
        let copy = copied();
        let file = copy.path().join(name);
        fs::remove_file(&file).unwrap();
        // Opening it would wait for a writer.
        assert!(Command::new("mkfifo").arg(&file).status().unwrap().success());
        let expected = format!("cannot read {}: it is not a regular file", file.display());
        assert_eq!(open_error(copy.path()).to_string(), expected);
        fs::remove_file(&file).unwrap();
        fs::create_dir(&file).unwrap();
        assert_eq!(open_error(copy.path()).to_string(), expected);
    }
}

#[test]
fn l19_an_index_entry_for_the_wrong_shard_is_named() {
    let copy = copied();
    let moved = "model.layers.2.self_attn.kv_b_proj.weight";
    edit_index(copy.path(), |weight_map| {
        assert_eq!(weight_map.insert(moved.into(), SHARD_2.into()).unwrap(), SHARD_1);
        weight_map.insert("model.layers.9.phantom".into(), SHARD_1.into());
    });
    let error = open_error(copy.path());
    let WeightsError::NotInShard { misplaced, .. } = &error else { panic!("{error}") };
    let expected = [
        (moved, copy.path().join(SHARD_2), Some(copy.path().join(SHARD_1))),
        ("model.layers.9.phantom", copy.path().join(SHARD_1), None),
    ];
    let found = misplaced
        .iter()
        .map(|tensor| (tensor.name.as_str(), tensor.file.clone(), tensor.found_in.clone()));
    assert_eq!(found.collect::<Vec<_>>(), expected);
    assert!(error.to_string().contains(INDEX), "{error}");
}

#[test]
fn l19_a_shard_of_the_wrong_length_is_named() {
    for (shard, n_cut) in [(SHARD_1, 64), (SHARD_2, 64), (SHARD_2, 1), (SHARD_1, 5_000_000)] {
        let copy = copied();
        let file = copy.path().join(shard);
        let whole = fs::read(&file).unwrap();
        fs::write(&file, &whole[..whole.len() - n_cut]).unwrap();
        let error = open_error(copy.path());
        assert!(error.to_string().contains(shard), "{error}");
        let WeightsError::BadLength { expected, actual, first_cut, .. } = error else {
            panic!("{error}")
        };
        assert_eq!((expected, actual), (whole.len() as u64, (whole.len() - n_cut) as u64));
        // The first tensor hurt is whole in the original and reaches behind the cut.
        let name = first_cut.unwrap();
        let view = SafeTensors::deserialize(&whole).unwrap();
        let data = view.tensor(&name).unwrap().data().as_ptr_range();
        let cut_at = whole[whole.len() - n_cut..].as_ptr();
        assert!(data.start <= cut_at && cut_at < data.end, "{name}");
    }
    let copy = copied();
    let file = copy.path().join(SHARD_2);
    let mut bytes = fs::read(&file).unwrap();
    bytes.extend([0; 3]);
    fs::write(&file, &bytes).unwrap();
    let error = open_error(copy.path());
    assert!(matches!(error, WeightsError::BadLength { first_cut: None, .. }), "{error}");
    assert!(error.to_string().contains("trailing"), "{error}");
}

#[test]
fn a_bad_header_is_named() {
    let whole = fs::read(bundled("tiny-dsv3").join(SHARD_1)).unwrap();
    let mut garbled = whole.clone();
    garbled[8..40].fill(b'#');
    let mut huge = whole.clone();
    huge[..8].fill(0xff);
    let overlapping = r#"{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
        "b": {"dtype": "F32", "shape": [1], "data_offsets": [2, 6]}}"#;
    let mut overlap = (overlapping.len() as u64).to_le_bytes().to_vec();
    overlap.extend(overlapping.as_bytes());
    overlap.extend([0; 6]);
    let in_header = whole[..100].to_vec();
    for bytes in [garbled, huge, overlap, in_header, vec![1, 2, 3], Vec::new()] {
        let copy = copied();
        fs::write(copy.path().join(SHARD_1), &bytes).unwrap();
        let error = open_error(copy.path());
        assert!(matches!(error, WeightsError::BadHeader { .. }), "{error}");
        assert!(error.to_string().contains(SHARD_1), "{error}");
    }
}

#[test]
fn a_bad_index_or_none_is_named() {
    for text in ["", "{", "[]", r#"{"metadata": {}}"#, r#"{"weight_map": {"a": 1}}"#] {
        let copy = copied();
        fs::write(copy.path().join(INDEX), text).unwrap();
        let error = open_error(copy.path());
        assert!(matches!(error, WeightsError::BadIndex { .. }), "{text}: {error}");
        assert!(error.to_string().contains(INDEX), "{error}");
    }
    let empty = tempfile::tempdir().unwrap();
    let error = open_error(empty.path());
    assert!(matches!(error, WeightsError::NoWeights { .. }), "{error}");
}

#[test]
fn every_unfit_tensor_is_in_one_error() {
    let dir = tempfile::tempdir().unwrap();
    let tensors: [(&str, Dtype, &[usize], &[u8]); 4] = [
        ("good", Dtype::F32, &[1], &[0; 4]),
        ("flat", Dtype::BF16, &[6], &[0; 12]),
        ("packed", Dtype::F8_E4M3, &[2], &[0; 2]),
        ("both", Dtype::I32, &[3], &[0; 12]),
    ];
    write_single(dir.path(), &tensors);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let mut expected: Vec<TensorSpec> = [
        ("good", &[1][..]),
        ("absent.a", &[1]),
        ("flat", &[2, 3]),
        ("packed", &[2]),
        ("both", &[4]),
        ("absent.b", &[1]),
        ("spare", &[1]),
    ]
    .map(|(name, shape)| spec(name, shape))
    .into();
    expected[6].is_optional = true;
    let error = checkpoint.load(&expected, Device::Cpu, Kind::Float).unwrap_err();
    let message = error.to_string();
    for line in [
        "absent.a is missing",
        "absent.b is missing",
        "flat has shape [6] instead of [2, 3] in ",
        "both has shape [3] instead of [4] in ",
        "packed is F8_E4M3; only F32, F16 and BF16 can be loaded",
        "both is I32; only F32, F16 and BF16 can be loaded",
    ] {
        assert!(message.contains(line), "{message}");
    }
    assert!(!message.contains("good") && !message.contains("spare"), "{message}");
    let error = checkpoint.tensor("packed", Device::Cpu, Kind::Float).unwrap_err();
    assert!(error.to_string().contains("packed is F8_E4M3"), "{error}");
}

#[test]
fn a_config_of_another_size_is_refused_tensor_by_tensor() {
    let dir = bundled("tiny-dsv3");
    let mut config = ModelConfig::load(&dir).unwrap();
    let AttentionConfig::Mla(mla) = &mut config.attention else { panic!("it is latent") };
    mla.kv_lora_rank = 48;
    config.num_hidden_layers = 4;
    let error = Checkpoint::open(&dir).unwrap().check(&config.target_tensors()).unwrap_err();
    let WeightsError::Unfit { missing, misshapen, .. } = &error else { panic!("{error}") };
    assert!(missing.is_empty());
    // Three tensors of each layer depend on the rank.
    assert_eq!(misshapen.len(), 3 * 4, "{error}");
    assert_eq!(misshapen[0].name, "model.layers.0.self_attn.kv_a_proj_with_mqa.weight");
    assert_eq!(misshapen[0].shape, [80, 256]);
    assert_eq!(misshapen[0].expected, [64, 256]);
    assert!(misshapen[0].file.ends_with(SHARD_1));
}

// Counted from the shard headers outside this crate.
const DSV3: ParameterCounts = ParameterCounts {
    embeddings: 1_048_576,
    attention: 635_840,
    experts: 3_162_176,
    shared_experts: 196_608,
    dense_mlp: 393_216,
    norms: 2_816,
    head: 1_048_576,
    mtp: 1_099_216,
    other: 0,
};
const GLM52: ParameterCounts = ParameterCounts {
    embeddings: 1_048_576,
    attention: 712_832,
    experts: 3_162_176,
    shared_experts: 196_608,
    dense_mlp: 393_216,
    norms: 2_816,
    head: 1_048_576,
    mtp: 1_124_880,
    other: 0,
};

#[test]
fn a_summary_counts_every_parameter_once() -> Result<(), ConfigError> {
    let summarize = CheckpointSummary::of;
    let dense = summarize(&bundled("tiny-dsv3"))?;
    assert_eq!(dense.parameters, DSV3);
    assert_eq!(dense.parameters.total(), 7_587_024);
    assert_eq!(dense.bytes_by_dtype, [("BF16".into(), 15_173_888), ("F32".into(), 320)].into());
    assert_eq!(dense.total_bytes(), 15_174_208);
    assert_eq!(dense.config.kv_bytes_per_token, Some(80 * 6 * 2));
    assert_eq!((dense.num_mtp_layers_present, dense.is_mtp_complete), (1, Some(true)));
    assert_eq!((dense.config.quant_method, dense.problems), (None, vec![]));

    let sparse = summarize(&bundled("tiny-glm52"))?;
    assert_eq!(sparse.parameters, GLM52);
    assert_eq!((sparse.num_mtp_layers_present, sparse.is_mtp_complete), (1, Some(true)));
    assert_eq!(sparse.problems, []);

    let headless = copied_without(|name| name == "model.layers.5.eh_proj.weight");
    let summary = summarize(headless.path())?;
    assert_eq!((summary.num_mtp_layers_present, summary.is_mtp_complete), (1, Some(false)));
    let no_mtp = summarize(&fixture("v3-groups"))?;
    assert_eq!((no_mtp.num_mtp_layers_present, no_mtp.is_mtp_complete), (0, Some(false)));
    assert_eq!(no_mtp.bytes_by_dtype.keys().collect::<Vec<_>>(), ["F32"]);
    Ok(())
}

//! Checkpoints that are written for a config: one with values, and one of the size of DeepSeek-V3
//! in shards that take no room.

#[path = "../examples/write_dummy/shards.rs"]
mod shards;

use std::fs;
use std::path::Path;

use model_config::ModelConfig;
use tch::{Device, Kind};
use weights::{CheckpointSummary, LoadFormat, WeightsSource};

use crate::shards::{Fill, write_checkpoint};

const CONFIGS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../model-config/tests/configs");

/// "671B of the Main Model weights and 14B of the Multi-Token Prediction (MTP) Module weights" says
/// the model card; the latter have copies of the embedding and the head.
#[test]
fn deepseek_v3_has_the_published_number_of_parameters() {
    let dir = tempfile::tempdir().unwrap();
    let config = Path::new(CONFIGS).join("deepseek-v3.json");
    fs::copy(config, dir.path().join("config.json")).unwrap();
    let alone = CheckpointSummary::of(dir.path()).unwrap();
    assert_eq!((alone.source, &alone.problems[..]), (WeightsSource::Config, &[][..]));
    write_checkpoint(dir.path(), &ModelConfig::load(dir.path()).unwrap(), Fill::Nothing).unwrap();

    let whole = CheckpointSummary::of(dir.path()).unwrap();
    assert_eq!((whole.source, &whole.problems[..]), (WeightsSource::Shards, &[][..]));
    assert_eq!((whole.num_mtp_layers_present, whole.is_mtp_complete), (1, Some(true)));
    let target = whole.parameters.total() - whole.parameters.mtp;
    for (found, published) in
        [(target, 671e9), (whole.parameters.mtp, 14e9), (whole.parameters.total(), 685e9)]
    {
        let error = (found as f64 - published).abs();
        assert!(error < 1e-3 * 671e9, "{found} parameters, {published} published");
    }
    // A config has no say about the copies that the MTP layer brings.
    let copies = 2 * 129_280 * 7_168;
    assert_eq!(alone.parameters.mtp + copies, whole.parameters.mtp);
    assert_eq!(alone.bytes_by_dtype["F8_E4M3"], whole.bytes_by_dtype["F8_E4M3"]);
    assert_eq!(alone.bytes_by_dtype["F32"], whole.bytes_by_dtype["F32"]);
    assert_eq!(alone.total_bytes() + 2 * copies, whole.total_bytes());

    // The index has the names, and what is missing in it is the same as missing in the shards.
    for entry in fs::read_dir(dir.path()).unwrap() {
        let file = entry.unwrap().path();
        if file.extension().is_some_and(|extension| extension == "safetensors") {
            fs::remove_file(file).unwrap();
        }
    }
    let index = CheckpointSummary::of(dir.path()).unwrap();
    assert_eq!(index, CheckpointSummary { source: WeightsSource::Index, ..whole });
}

#[test]
fn a_written_checkpoint_has_the_values_of_dummy_weights() {
    let dir = tempfile::tempdir().unwrap();
    let config = Path::new(CONFIGS).join("../../../../tests/data/fixtures/glm-shared/config.json");
    fs::copy(config, dir.path().join("config.json")).unwrap();
    let config = ModelConfig::load(dir.path()).unwrap();
    write_checkpoint(dir.path(), &config, Fill::Dummy).unwrap();
    let load = |format| {
        let target = (Device::Cpu, Kind::BFloat16);
        weights::load(dir.path(), &config, format, false, target).unwrap()
    };
    let (mut stored, mut made) = (load(LoadFormat::Auto), load(LoadFormat::Dummy));
    assert_eq!(stored.len(), made.len());
    for spec in config.target_tensors() {
        let [stored, made] = [&mut stored, &mut made].map(|map| map.take(&spec.name).unwrap());
        assert!(stored.equal(&made) && stored.kind() == made.kind(), "{}", spec.name);
    }
    assert!(stored.is_empty() && made.is_empty());
}

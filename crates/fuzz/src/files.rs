//! Headers, indexes and configurations.

use std::path::{Component, Path};

use checkpoint_files::{Header, Index};
use model_config::{ConfigSummary, GenerationConfig, ModelConfig, RawConfig};

use crate::files_of;

/// Tensors that a config may ask for before they are listed: more take time and show nothing new.
const MAX_LISTED: usize = 1 << 12;

/// The input as a whole file, and as the header of a file with 64 bytes of data.
pub(crate) fn header(input: &[u8]) {
    let length = (input.len() as u64).to_le_bytes();
    for file in [input, &[&length[..], input, &[0; 64]].concat()] {
        let Ok(header) = Header::parse(file) else { continue };
        let mut is_taken = vec![false; file.len()];
        for entry in header.entries.values() {
            // Writing panics outside the file.
            for place in &mut is_taken[entry.bytes.clone()] {
                assert!(!std::mem::replace(place, true), "two tensors have one byte");
            }
            let n_values: u128 = match entry.shape.contains(&0) {
                true => 0,
                false => entry.shape.iter().map(|&n| n as u128).product(),
            };
            let n_bits = n_values * entry.dtype.bitsize() as u128;
            assert_eq!(entry.n_bytes() as u128 * 8, n_bits, "{:?}", entry.shape);
        }
    }
}

pub(crate) fn header_seeds() -> Vec<Vec<u8>> {
    let seeds = [
        r#"{"__metadata__": {"format": "pt"}, "a": {"dtype": "BF16", "shape": [4, 8],
            "data_offsets": [0, 64]}}"#,
        r#"{"b": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, "a": {"dtype":
            "F8_E4M3", "shape": [5, 8], "data_offsets": [24, 64]}}"#,
        r#"{"z": {"dtype": "I64", "shape": [0, 9], "data_offsets": [0, 0]}, "s": {"dtype": "F64",
            "shape": [], "data_offsets": [0, 8]}, "p": {"dtype": "F4", "shape": [112],
            "data_offsets": [8, 64]}}"#,
    ];
    let whole = |text: &str| [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
    let files = seeds.map(|text| [whole(text), vec![0; 64]].concat());
    seeds.map(|text| text.as_bytes().to_vec()).into_iter().chain(files).collect()
}

pub(crate) fn index(input: &[u8]) {
    let Ok(index) = Index::parse(input) else { return };
    for shard in index.weight_map.values() {
        let path = Path::new("folder").join(shard);
        assert_eq!(path.parent(), Some(Path::new("folder")), "{shard:?}");
        assert!(matches!(path.components().next_back(), Some(Component::Normal(_))), "{shard:?}");
    }
}

pub(crate) fn index_seeds() -> Vec<Vec<u8>> {
    let seeds = [
        r#"{"metadata": {"total_size": 12}, "weight_map": {"model.norm.weight":
            "model-00001-of-00002.safetensors", "lm_head.weight": "../a/b.safetensors"}}"#,
        r#"{"weight_map": {"a": "x", "b": "C:\\x", "c": "\u0000", "d": "..", "e": "/etc/x"}}"#,
        r#"{"weight_map": {"a.weight": "a.safetensors", "b.weight": "b.safetensors"}}"#,
    ];
    seeds.map(|text| text.as_bytes().to_vec()).into()
}

/// The input as `config.json` and as `generation_config.json` of each other.
pub(crate) fn config(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    let Ok(raw) = RawConfig::parse(text, "config.json") else { return };
    let summary = ConfigSummary::new(&raw);
    let config = ModelConfig::from_raw(&raw);
    assert_eq!(config.as_ref().err().map(ToString::to_string), summary.refusal);
    let Ok(mut config) = config else { return };
    if let Ok(generation) = GenerationConfig::parse(text, "generation_config.json") {
        // What ends a sequence was found sound already.
        let eos_token_ids = config.eos_token_ids.clone();
        config.merge_generation(&generation).expect("the same ids are sound");
        assert_eq!(config.eos_token_ids, eos_token_ids);
    }
    let n_experts = config.moe.as_ref().map_or(1, |moe| moe.n_routed_experts);
    if (config.num_hidden_layers + config.num_mtp_layers) * n_experts > MAX_LISTED {
        return;
    }
    for tensor in config.target_tensors().iter().chain(&config.all_mtp_tensors()) {
        assert!(tensor.n_values() > 0, "{}", tensor.name);
    }
}

pub(crate) fn config_seeds() -> Vec<Vec<u8>> {
    files_of("crates/model-config/tests/configs", ".json")
}

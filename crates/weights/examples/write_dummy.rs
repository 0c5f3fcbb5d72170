//! Writes a checkpoint of dummy weights for a folder's config, for benches of loading.
//!
//! ```text
//! cargo run --release -p weights --example write_dummy -- CONFIG_DIR OUT_DIR
//! ```

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use half::bf16;
use model_config::{LoadDtype, ModelConfig, TensorSpec};
use serde_json::json;
use weights::dummy;

/// Bytes of data of a shard, of which a tensor may stick out.
const SHARD_BYTES: usize = 256 << 20;

fn main() -> Result<()> {
    let mut args = std::env::args_os().skip(1).map(PathBuf::from);
    let (from, to) = args.next().zip(args.next()).context("give CONFIG_DIR and OUT_DIR")?;
    std::fs::create_dir_all(&to)?;
    std::fs::copy(from.join("config.json"), to.join("config.json"))?;
    let config = ModelConfig::load(&from)?;
    let mut specs = config.target_tensors();
    specs.extend(config.all_mtp_tensors());
    specs.retain(|spec| !spec.is_optional);
    let mut shards = vec![Vec::new()];
    let mut n_bytes = 0;
    for spec in specs {
        if n_bytes >= SHARD_BYTES {
            shards.push(Vec::new());
            n_bytes = 0;
        }
        n_bytes += stored(&spec).1 * spec.n_values();
        shards.last_mut().expect("there is always a shard").push(spec);
    }
    let mut weight_map = BTreeMap::new();
    for (shard_idx, specs) in shards.iter().enumerate() {
        let file = format!("model-{:05}-of-{:05}.safetensors", shard_idx + 1, shards.len());
        write_shard(&to.join(&file), specs)?;
        weight_map.extend(specs.iter().map(|spec| (&spec.name, file.clone())));
    }
    let index = json!({ "weight_map": weight_map }).to_string();
    Ok(std::fs::write(to.join("model.safetensors.index.json"), index)?)
}

/// The dtype that a tensor is stored in, and its bytes a value.
fn stored(spec: &TensorSpec) -> (&'static str, usize) {
    match spec.load_dtype {
        LoadDtype::Float32 => ("F32", 4),
        LoadDtype::Model => ("BF16", 2),
    }
}

fn write_shard(file: &Path, specs: &[TensorSpec]) -> Result<()> {
    let mut header = serde_json::Map::new();
    let mut end = 0;
    for spec in specs {
        let (start, (dtype, value_bytes)) = (end, stored(spec));
        end += value_bytes * spec.n_values();
        let entry = json!({ "dtype": dtype, "shape": spec.shape, "data_offsets": [start, end] });
        header.insert(spec.name.clone(), entry);
    }
    let mut header = serde_json::to_string(&header)?;
    header.push_str(&" ".repeat(header.len().next_multiple_of(8) - header.len()));
    let mut out = BufWriter::new(File::create(file)?);
    out.write_all(&(header.len() as u64).to_le_bytes())?;
    out.write_all(header.as_bytes())?;
    for spec in specs {
        let mut values = vec![0.0; spec.n_values()];
        dummy::fill(spec, dummy::DUMMY_SEED, &mut values, |value: f32| value);
        let bytes: Vec<u8> = match spec.load_dtype {
            LoadDtype::Float32 => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
            LoadDtype::Model => {
                values.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes()).collect()
            }
        };
        out.write_all(&bytes)?;
    }
    Ok(out.flush()?)
}

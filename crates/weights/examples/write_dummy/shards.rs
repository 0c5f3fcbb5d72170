//! Shards of safetensors and their index, for a config.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufWriter, Write as _};
use std::path::Path;

use half::bf16;
use model_config::{LoadDtype, ModelConfig, TensorSpec, WeightFormat};
use serde_json::json;
use weights::dummy;

/// What is behind the headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fill {
    /// Dummy weights, unquantised.
    Dummy,
    /// Zeros that take no room on disk, quantised where the config says so, and with every optional
    /// tensor, as published checkpoints are.
    Nothing,
}

impl Fill {
    /// Bytes of data from which a shard has enough; published ones have some 4 GB.
    fn shard_bytes(self) -> usize {
        match self {
            Self::Dummy => 256 << 20,
            Self::Nothing => 4 << 30,
        }
    }
}

/// A tensor in a file.
struct Stored<'a> {
    spec: &'a TensorSpec,
    name: String,
    dtype: &'static str,
    shape: Vec<usize>,
    n_bytes: usize,
}

impl<'a> Stored<'a> {
    fn new(
        spec: &'a TensorSpec,
        name: String,
        shape: Vec<usize>,
        of: (&'static str, usize),
    ) -> Self {
        let n_bytes = of.1 * shape.iter().product::<usize>();
        Self { spec, name, dtype: of.0, shape, n_bytes }
    }

    /// A tensor, and its scale if it has one.
    fn of(spec: &'a TensorSpec, fill: Fill) -> Vec<Self> {
        let (name, shape) = (spec.name.clone(), spec.shape.clone());
        let block = spec.declared.formats.first().filter(|_| fill == Fill::Nothing);
        // The projections of a layer are quantised, and no other matrix.
        let is_projection = name.ends_with("_proj.weight") && !name.ends_with("eh_proj.weight");
        if let Some(WeightFormat::Fp8Block([rows, columns])) = block.filter(|_| is_projection) {
            let scales = vec![shape[0].div_ceil(*rows), shape[1].div_ceil(*columns)];
            let scale = Self::new(spec, format!("{name}_scale_inv"), scales, ("F32", 4));
            return vec![Self::new(spec, name, shape, ("F8_E4M3", 1)), scale];
        }
        let dtype = match spec.load_dtype {
            LoadDtype::Float32 => ("F32", 4),
            LoadDtype::Model => ("BF16", 2),
        };
        vec![Self::new(spec, name, shape, dtype)]
    }
}

/// Writes the tensors of a config, its MTP layers included, and their index.
pub(crate) fn write_checkpoint(dir: &Path, config: &ModelConfig, fill: Fill) -> io::Result<()> {
    let mut specs = config.target_tensors();
    specs.extend(config.all_mtp_tensors());
    specs.retain(|spec| fill == Fill::Nothing || !spec.is_optional);
    let mut shards = vec![Vec::new()];
    let mut n_bytes = 0;
    for tensor in specs.iter().flat_map(|spec| Stored::of(spec, fill)) {
        if n_bytes >= fill.shard_bytes() {
            shards.push(Vec::new());
            n_bytes = 0;
        }
        n_bytes += tensor.n_bytes;
        shards.last_mut().expect("there is always a shard").push(tensor);
    }
    let total_size: usize = shards.iter().flatten().map(|tensor| tensor.n_bytes).sum();
    let mut weight_map = BTreeMap::new();
    for (tensors, idx) in shards.iter().zip(1..) {
        let file = format!("model-{idx:05}-of-{:05}.safetensors", shards.len());
        write_shard(&dir.join(&file), tensors, fill)?;
        weight_map.extend(tensors.iter().map(|tensor| (&tensor.name, file.clone())));
    }
    let metadata = json!({ "total_size": total_size });
    let index = json!({ "metadata": metadata, "weight_map": weight_map }).to_string();
    std::fs::write(dir.join("model.safetensors.index.json"), index)
}

fn write_shard(file: &Path, tensors: &[Stored<'_>], fill: Fill) -> io::Result<()> {
    let mut header = serde_json::Map::new();
    let mut end = 0;
    for Stored { name, dtype, shape, n_bytes, .. } in tensors {
        let start = end;
        end += n_bytes;
        let entry = json!({ "dtype": dtype, "shape": shape, "data_offsets": [start, end] });
        header.insert(name.clone(), entry);
    }
    let mut header = serde_json::Value::Object(header).to_string();
    header.push_str(&" ".repeat(header.len().next_multiple_of(8) - header.len()));
    let mut out = BufWriter::new(File::create(file)?);
    out.write_all(&(header.len() as u64).to_le_bytes())?;
    out.write_all(header.as_bytes())?;
    if fill == Fill::Nothing {
        return out.into_inner()?.set_len((8 + header.len() + end) as u64);
    }
    for Stored { spec, .. } in tensors {
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
    out.flush()
}

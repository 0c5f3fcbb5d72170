//! Checkpoint shards to named tensors, and random tensors where there are no shards.
//!
//! **Owns** the safetensors files of a checkpoint folder: opening them by memory map, checking
//! that they are whole, loading the tensors that a model expects, and describing what is there;
//! and [`dummy`] weights for benches.
//! **Must not know** what a model does with a tensor; names and shapes come from `model-config`.
//!
//! **Invariants**: an open [`Checkpoint`] has every tensor that its index names, inside the shard
//! that the index names, and every shard is as long as its header says; [`Checkpoint::load`]
//! returns every required tensor in its expected shape or an error that lists all that are not
//! there. A tensor's data is read when it is taken out of the [`TensorMap`], not before.
//!
//! ```
//! use model_config::ModelConfig;
//! use weights::Checkpoint;
//!
//! let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/fixtures/v3-groups");
//! let config = ModelConfig::load(dir.as_ref())?;
//! let checkpoint = Checkpoint::open(dir.as_ref())?;
//! let expected = config.target_tensors();
//! let mut tensors = checkpoint.load(&expected, tch::Device::Cpu, tch::Kind::Float)?;
//! assert_eq!(tensors.take("model.norm.weight")?.size(), [64]);
//! // This checkpoint promises an MTP layer and does not bring it.
//! assert!(checkpoint.check_mtp(&config).is_err());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod checkpoint;
mod convert;
pub mod dummy;
mod error;
mod inspect;
mod load;
mod open;
mod packed;
mod parameters;
mod progress;
mod shard;
mod storage;
mod tensor_map;

#[cfg(test)]
mod tests;

pub use checkpoint::{Checkpoint, TensorInfo};
pub use error::{Misplaced, Misshapen, WeightsError};
pub use inspect::{CheckpointSummary, LoadedValues, Problem, WeightsSource};
pub use load::{LoadFormat, load};
pub use packed::LoadedWeight;
pub use parameters::ParameterCounts;
pub use storage::StorageFault;
pub use tensor_map::TensorMap;

//! DeepSeek-V3 class models and their MTP layers.
//!
//! **Owns** the order of layers: target model ([`CausalLm`]), MTP layers ([`DeepseekMtp`]), and the
//! way from a checkpoint to both ([`load`]). **Must not know** requests, plans, sampling, or who
//! owns a KV block.
//!
//! Invariants (numbered in `ARCHITECTURE.md`):
//! * A pass writes the KV of exactly its layout's rows, and each row sees the keys up to its own
//!   position \[INV-4]; prefill chunks, verify windows and decodes share one code path.
//! * A row's result does not depend on its batch mates \[INV-11]; bit for bit on the CPU.
//! * The hidden state that a draft step hands to the next is the one after `shared_head.norm`.
//! * If drafting is asked for, every MTP tensor was in the checkpoint.
//!
//! # Example
//!
//! The likeliest token after three tokens of a random tiny checkpoint:
//!
//! ```
//! use attention_backends::{CpuBackend, DeviceLayout};
//! use batch_layout::{BatchLayout, SeqSpec};
//! use models::{ForwardContext, LoadOptions, load};
//! use tch::{Device, Kind, Tensor};
//!
//! let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/fixtures/v3-yarn");
//! let model = load(dir.as_ref(), LoadOptions::default())?;
//! let mut layout = BatchLayout::new(4);
//! layout.push(SeqSpec { n_computed: 0, n_query: 3 }, &[0]);
//! layout.finish();
//! let width = model.config.attention.cache_width() as i64;
//! let cache = |_| Tensor::zeros([4, width], (Kind::Float, Device::Cpu));
//! let caches: Vec<Tensor> = (0..model.num_cache_layers()).map(cache).collect();
//! let layout = DeviceLayout::upload(&layout, Device::Cpu);
//! let cx = ForwardContext { layout: &layout, caches: &caches, backend: &CpuBackend };
//! let hidden = model.target.forward(&Tensor::from_slice(&[5i64, 6, 7]), &cx)?;
//! let logits = model.target.logits(&hidden.narrow(0, 2, 1))?;
//! assert_eq!(logits.size(), [1, model.config.vocab_size as i64]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod causal_lm;
mod decoder_layer;
mod deepseek_mtp;
mod deepseek_v3;
mod error;
mod layer_weights;
mod registry;

#[cfg(test)]
mod tests;

pub use causal_lm::{CausalLm, ForwardContext};
pub use deepseek_mtp::{BoundMtp, DeepseekMtp};
pub use error::LoadError;
pub use registry::{ComputeDtype, LoadOptions, LoadedModel, load};

//! The DeepSeek family (V2, V3, R1, V3.2, Kimi-K2, GLM-5, GLM-5.2) and GLM-4.5, with their MTP
//! layers.
//!
//! **Owns** the order of layers: target model ([`CausalLm`]), MTP layers ([`MtpLayers`]), and the
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
//! use models::{ForwardContext, IndexCacheDtype, KvInit, LoadOptions, load};
//! use tch::{Device, Tensor};
//!
//! let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/fixtures/v32-dsa");
//! let model = load(dir.as_ref(), LoadOptions::default())?;
//! let mut layout = BatchLayout::new(4);
//! layout.push(SeqSpec { n_computed: 0, n_query: 3 }, &[0]);
//! layout.finish();
//! let caches = model.new_caches(4, IndexCacheDtype::Auto, KvInit::Zero)?;
//! let layout = DeviceLayout::upload(&layout, Device::Cpu);
//! let cx = ForwardContext { layout: &layout, caches: &caches, backend: &CpuBackend };
//! let output = model.target.forward(&Tensor::from_slice(&[5i64, 6, 7]), &cx)?;
//! let logits = model.target.logits(&output.hidden.narrow(0, 2, 1))?;
//! assert_eq!(logits.size(), [1, model.config.vocab_size as i64]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod causal_lm;
mod decoder;
mod decoder_layer;
mod deepseek_v3;
mod error;
mod glm4_moe;
mod layer_cache;
mod layer_weights;
mod mtp;
mod registry;

#[cfg(test)]
mod tests;

pub use causal_lm::{CausalLm, ForwardContext, ForwardOutput};
pub use error::LoadError;
pub use layer_cache::{IndexCacheDtype, KvInit, LayerCache};
pub use mtp::{BoundMtp, MtpLayers};
pub use registry::{ComputeDtype, LoadOptions, LoadedModel, load};

//! Linear, norm, rotary embedding, indexer, dense and expert feed-forward layers.
//!
//! **Owns** the layers of a decoder between the residual stream and the attention backend, each in
//! two forms chosen by [`Ops`] at construction: plain tensor operations on any device, and fused
//! kernels over packed weights on the CPU. **Must not know** layer order, caches, requests or
//! checkpoint names.
//!
//! Invariants:
//! * Norm statistics, router scores and the softmax of a choice are float32 in any compute dtype;
//!   router weights and biases are never rounded to less.
//! * With [`Ops::Fused`] activations are float32, and a row's result does not depend on its batch
//!   mates, bit for bit \[INV-11].
//! * The plain form is the oracle of the fused one in the tests.
//!
//! # Example
//!
//! ```
//! use nn_layers::{GatedMlp, Ops};
//! use tch::{Device, Kind, Tensor};
//!
//! let weight = |n_out, n_in| Tensor::randn([n_out, n_in], (Kind::Float, Device::Cpu));
//! let (gate, up, down) = (weight(6, 4), weight(6, 4), weight(4, 6));
//! let plain = GatedMlp::new([&gate, &up, &down], Ops::Torch)?;
//! let fused = GatedMlp::new([&gate, &up, &down], Ops::for_device(Device::Cpu))?;
//! let x = Tensor::randn([3, 4], (Kind::Float, Device::Cpu));
//! let difference = (plain.forward(&x)? - fused.forward(&x)?).abs().max();
//! assert!(difference.double_value(&[]) < 1e-4);
//! # Ok::<(), torch_ext::TensorError>(())
//! ```

mod embedding;
mod gqa;
mod indexer;
mod linear;
mod mla;
mod mlp;
mod moe;
mod norm;
mod ops;
mod rotary;
mod router;

#[cfg(test)]
mod tests;

pub use embedding::Embedding;
pub use gqa::{GqaParts, GqaProjections, GqaRows};
pub use indexer::{Indexer, IndexerWeights};
pub use linear::Linear;
pub use mla::{MlaLatents, MlaProjections, MlaWeights};
pub use mlp::GatedMlp;
pub use moe::{MoeMlp, MoeParts};
pub use norm::{LayerNorm, RmsNorm};
pub use ops::Ops;
pub use rotary::{RotaryRows, RotaryTable};
pub use router::{Router, Routing};

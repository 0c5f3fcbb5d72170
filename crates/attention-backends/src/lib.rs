//! Paged attention behind one trait, latent (dense and sparse) and grouped-query: plain reference
//! and fused CPU.
//!
//! **Owns** the formats of the latent, key/value and index caches (one row a token and layer), how
//! rows are written to them, selected and attended through a block table, and the device copy of a
//! batch layout. **Must not know** projections, models, requests or who owns a block.
//!
//! Invariants (numbered in `ARCHITECTURE.md`):
//! * The number of query rows of a sequence is explicit in the layout, and a row at position `p`
//!   sees the keys `0..=p` of its sequence and nothing else: not the drafts behind it in a verify
//!   window, not a rejected or unused slot \[INV-4].
//! * A selected position is one that its row sees; sparse attention reads nothing else.
//! * A row's result does not depend on its batch mates \[INV-11]; bit for bit with [`CpuBackend`].
//!
//! # Example
//!
//! Two query rows behind no earlier key; the first sees its own latent only:
//!
//! ```
//! use attention_backends::{AttentionBackend, CpuBackend, DeviceLayout, MlaQuery};
//! use batch_layout::{BatchLayout, SeqSpec};
//! use tch::{Device, Kind, Tensor};
//!
//! let mut layout = BatchLayout::new(2);
//! layout.push(SeqSpec { n_computed: 0, n_query: 2 }, &[3]);
//! layout.finish();
//! let layout = DeviceLayout::upload(&layout, Device::Cpu);
//!
//! let cache = Tensor::full([8, 5], f64::NAN, (Kind::Float, Device::Cpu)); // latent 4, rope 1
//! let latent = Tensor::arange(8, (Kind::Float, Device::Cpu)).view([2, 4]);
//! let k_pe = Tensor::zeros([2, 1], (Kind::Float, Device::Cpu));
//! CpuBackend.write_latent(&cache, &latent, &k_pe, &layout)?;
//!
//! let q_latent = Tensor::ones([2, 1, 4], (Kind::Float, Device::Cpu)); // one head
//! let q_pe = Tensor::zeros([2, 1, 1], (Kind::Float, Device::Cpu));
//! let query = MlaQuery { q_latent: &q_latent, q_pe: &q_pe, scale: 0.5, selection: None };
//! let out = CpuBackend.mla(query, &cache, &layout)?;
//! assert_eq!(out.size(), [2, 1, 4]);
//! assert!((out.get(0).squeeze() - latent.get(0)).abs().max().double_value(&[]) < 1e-6);
//! # Ok::<(), torch_ext::TensorError>(())
//! ```

mod backend;
mod cpu;
mod device_layout;
mod reference;
mod selection;

#[cfg(test)]
mod tests;

pub use backend::{AttentionBackend, GqaQuery, IndexQuery, MlaQuery};
pub use cpu::CpuBackend;
pub use device_layout::DeviceLayout;
pub use kernels::FP8_SCALE_BYTES;
pub use reference::ReferenceBackend;
pub use selection::Selection;

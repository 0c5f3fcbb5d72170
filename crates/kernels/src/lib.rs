//! Fused CPU kernels over plain slices.
//!
//! **Owns** the arithmetic of one layer on the CPU: linear layers of packed weights, quantised ones
//! among them, normalisation, rotary embedding, paged attention, latent (dense and sparse) and
//! grouped-query, the selection of keys, expert routing, experts and the reductions over logits.
//! The instruction set (AVX-512, AVX2 with FMA and F16C, or portable code) is chosen at run time.
//! **Must not know** tensors of any framework, models, requests or block ownership.
//!
//! Invariants (numbered in `ARCHITECTURE.md`):
//! * A row's result does not depend on its batch mates, its position in the batch, the number of
//!   threads or the instruction set, bit for bit \[INV-11]: every output element is computed by
//!   one chain of fused operations in one fixed order.
//! * Attention never reads a cache slot at or beyond a row's visible length \[INV-4].
//!
//! Large calls are spread over the current rayon pool. Run a whole step inside
//! `ThreadPool::install` to choose the number of threads.
//!
//! # Example
//!
//! A linear layer gives a row the same bits alone and in a batch:
//!
//! ```
//! use kernels::PackedLinear;
//!
//! let weight = [1.0, 2.0, 3.0, 0.5, -1.0, 0.25]; // [n_out = 2, n_in = 3]
//! let linear = PackedLinear::from_f32(&weight, 3);
//! let mut batch = [0.0; 4];
//! linear.forward(&[1.0, 1.0, 1.0, 0.1, 0.2, 0.3], &mut batch);
//! assert_eq!(batch[..2], [6.0, -0.25]);
//!
//! let mut alone = [0.0; 2];
//! linear.forward(&[0.1, 0.2, 0.3], &mut alone);
//! assert_eq!(batch[2..], alone);
//! ```

#![expect(unsafe_code, reason = "SIMD intrinsics; each site says why it is sound")]

mod attention;
mod exp;
mod fp8;
mod gqa;
mod indexer;
mod linear;
mod logits;
mod mla;
mod mlp;
mod norm;
mod paged;
mod parallel;
mod rope;
mod round;
mod router;
mod simd;
#[cfg(test)]
mod test_util;

pub use attention::{CacheRows, SelectedKeys};
pub use exp::silu_and_mul;
pub use fp8::{FP8_SCALE_BYTES, store_fp8_key};
pub use gqa::{GqaBatch, GqaShape, gqa_attention};
pub use indexer::{IndexBatch, IndexCache, IndexShape, lightning_index};
pub use linear::PackedLinear;
pub use logits::{argmax_rows, log_softmax_gather};
pub use mla::{MlaBatch, MlaShape, mla_attention};
pub use mlp::{MoeExperts, SwiGluMlp};
pub use norm::{add_rms_norm, layer_norm, rms_norm};
pub use paged::PagedRows;
pub use rope::{RopeHeads, RopeStyle, rope_in_place};
pub use round::round_bf16_in_place;
pub use router::{ExpertChoice, Router, RouterConfig, RouterScoring};

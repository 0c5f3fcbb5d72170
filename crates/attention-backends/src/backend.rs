//! The trait that every attention backend implements.

use tch::Tensor;
use torch_ext::TensorError;

use crate::device_layout::DeviceLayout;

/// Query rows of absorbed MLA. How many each sequence has is said by the layout's `cu_seqlens_q`:
/// any mixture of prefill chunks, verify windows and single decodes.
#[derive(Clone, Copy, Debug)]
pub struct MlaQuery<'a> {
    /// Queries times the key half of `kv_b_proj`, `[T, H, kv_lora_rank]`.
    pub q_latent: &'a Tensor,
    /// Rotated queries, `[T, H, rope_dim]`.
    pub q_pe: &'a Tensor,
}

/// Writes and attends paged latent caches. A cache is `[n_slots, kv_lora_rank + rope_dim]`.
pub trait AttentionBackend: Send + Sync {
    /// A short name for logs and reports.
    fn name(&self) -> &'static str;

    /// Writes the layout's tokens to their slots: `latent` `[T, kv_lora_rank]` and the rotated
    /// `k_pe` `[T, rope_dim]`, converted to the dtype of the cache.
    ///
    /// # Errors
    ///
    /// [`TensorError`] if shapes, dtypes or devices do not fit.
    fn write_latent(
        &self,
        cache: &Tensor,
        latent: &Tensor,
        k_pe: &Tensor,
        layout: &DeviceLayout,
    ) -> Result<(), TensorError>;

    /// Attends each query row to the keys `0..=position` of its sequence and returns the weighted
    /// latents `[T, H, kv_lora_rank]` in the dtype of the query. Scores are multiplied by `scale`;
    /// scores, softmax and sums are float32.
    ///
    /// # Errors
    ///
    /// [`TensorError`] if shapes, dtypes or devices do not fit.
    fn mla(
        &self,
        query: MlaQuery<'_>,
        cache: &Tensor,
        scale: f64,
        layout: &DeviceLayout,
    ) -> Result<Tensor, TensorError>;
}

/// The last dimension of a tensor.
pub(crate) fn width(tensor: &Tensor) -> i64 {
    tensor.size().last().copied().unwrap_or(0)
}

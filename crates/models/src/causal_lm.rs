//! The trait of target models.

use attention_backends::{AttentionBackend, DeviceLayout};
use model_config::ModelConfig;
use tch::Tensor;
use torch_ext::TensorError;

/// What a pass runs on besides its tokens.
#[derive(Clone, Copy)]
pub struct ForwardContext<'a> {
    /// Positions, slots and lengths of the rows.
    pub layout: &'a DeviceLayout,
    /// One latent cache `[n_slots, cache_width]` for each layer, the target's layers first, then
    /// the MTP layers.
    pub caches: &'a [Tensor],
    /// Attention over these caches.
    pub backend: &'a dyn AttentionBackend,
}

/// A target model.
pub trait CausalLm: Send {
    /// The configuration it was built from.
    fn config(&self) -> &ModelConfig;

    /// Runs all layers over `token_ids` i64 `[T]` and returns the hidden states after the final
    /// norm, `[T, hidden]`. Writes the rows' KV.
    ///
    /// # Errors
    ///
    /// [`TensorError`] if a tensor operation fails.
    fn forward(&self, token_ids: &Tensor, cx: &ForwardContext<'_>) -> Result<Tensor, TensorError>;

    /// Logits of hidden states `[R, hidden]` that [`CausalLm::forward`] returned, f32
    /// `[R, vocab]`.
    ///
    /// # Errors
    ///
    /// [`TensorError`] if a tensor operation fails.
    fn logits(&self, hidden: &Tensor) -> Result<Tensor, TensorError>;
}

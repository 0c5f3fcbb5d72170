//! The trait of target models.

use attention_backends::{AttentionBackend, DeviceLayout};
use engine_types::IndexerCounts;
use model_config::ModelConfig;
use tch::Tensor;
use torch_ext::TensorError;

use crate::layer_cache::LayerCache;

/// What a pass runs on besides its tokens.
#[derive(Clone, Copy)]
pub struct ForwardContext<'a> {
    /// Positions, slots and lengths of the rows.
    pub layout: &'a DeviceLayout,
    /// The caches of each layer, the target's layers first, then the MTP layers.
    pub caches: &'a [LayerCache],
    /// Attention over these caches.
    pub backend: &'a dyn AttentionBackend,
}

/// What a pass returns.
#[derive(Debug)]
pub struct ForwardOutput {
    /// Hidden states after the final norm, `[T, hidden]`.
    pub hidden: Tensor,
    /// What the indexers of sparse attention did, over all layers.
    pub indexer: IndexerCounts,
}

/// A target model.
pub trait CausalLm: Send {
    /// The configuration it was built from.
    fn config(&self) -> &ModelConfig;

    /// Runs all layers over `token_ids` i64 `[T]`. Writes the rows' KV and index keys.
    ///
    /// # Errors
    ///
    /// [`TensorError`] if a tensor operation fails.
    ///
    /// # Panics
    ///
    /// If a layer's cache is missing.
    fn forward(
        &self,
        token_ids: &Tensor,
        cx: &ForwardContext<'_>,
    ) -> Result<ForwardOutput, TensorError>;

    /// Logits of hidden states `[R, hidden]` that [`CausalLm::forward`] returned, f32
    /// `[R, vocab]`.
    ///
    /// # Errors
    ///
    /// [`TensorError`] if a tensor operation fails.
    fn logits(&self, hidden: &Tensor) -> Result<Tensor, TensorError>;
}

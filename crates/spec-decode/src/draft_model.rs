//! The trait that the proposer drives and that MTP layers implement.

use std::fmt;

use attention_backends::{DeviceLayout, Selection};
use engine_types::IndexerCounts;
use tch::{TchError, Tensor};
use torch_ext::TensorError;

/// One draft step's input. Row `t` is one token at position `layout.positions[t]`.
#[derive(Debug)]
pub struct DraftInput<'a> {
    /// Which MTP layer to run, below [`DraftModel::num_layers`].
    pub layer: usize,
    /// Token that each row embeds, i64 `[T]`: the one that *follows* the row's position.
    pub token_ids: &'a Tensor,
    /// Hidden state that each row continues, `[T, hidden]`: the target's after its final norm, or
    /// an earlier draft step's after `shared_head.norm`.
    pub hidden: &'a Tensor,
    /// Positions, slots and lengths of the rows; the layer's own KV is written through it.
    pub layout: &'a DeviceLayout,
    /// Rows to return, i64 `[R]`, ascending; `None` is all of them. Every row's KV is written
    /// either way.
    pub output_rows: Option<&'a Tensor>,
    /// The keys that each returned row attends, no more and no fewer; the layer's indexer does not
    /// run. `None` lets the layer choose, or attend everything where it has no indexer. Given only
    /// to a model that [can share a selection](DraftModel::can_share_selection).
    pub selection: Option<&'a Selection>,
}

/// One draft step's output.
#[derive(Debug)]
pub struct DraftOutput {
    /// Hidden states of the returned rows after `shared_head.norm`, `[R, hidden]`.
    pub hidden: Tensor,
    /// What the layer's indexer chose for these rows, if it has one and it ran.
    pub selection: Option<Selection>,
    /// What the indexer did.
    pub indexer: IndexerCounts,
}

impl From<Tensor> for DraftOutput {
    /// The output of a layer without an indexer.
    fn from(hidden: Tensor) -> Self {
        Self { hidden, selection: None, indexer: IndexerCounts::default() }
    }
}

/// MTP layers with their KV caches.
pub trait DraftModel {
    /// Number of MTP layers; at least 1 for a model that drafts.
    fn num_layers(&self) -> usize;

    /// Whether a step takes [`DraftInput::selection`] and returns [`DraftOutput::selection`].
    fn can_share_selection(&self) -> bool {
        false
    }

    /// Runs one MTP layer.
    ///
    /// # Errors
    ///
    /// [`DraftError`] if a tensor operation fails.
    fn step(&self, input: DraftInput<'_>) -> Result<DraftOutput, DraftError>;

    /// Logits of hidden states that [`DraftModel::step`] of the same layer returned,
    /// f32 `[R, vocab]`.
    ///
    /// # Errors
    ///
    /// [`DraftError`] if a tensor operation fails.
    fn logits(&self, layer: usize, hidden: &Tensor) -> Result<Tensor, DraftError>;
}

/// Why a draft step failed.
#[derive(Debug)]
#[non_exhaustive]
pub enum DraftError {
    /// A tensor operation failed.
    Tensor(TensorError),
    /// The model refused; the text says why.
    Model(String),
}

impl fmt::Display for DraftError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tensor(error) => write!(f, "a draft step failed: {error}"),
            Self::Model(message) => write!(f, "a draft step failed: {message}"),
        }
    }
}

impl std::error::Error for DraftError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Tensor(error) => Some(error),
            Self::Model(_) => None,
        }
    }
}

impl From<TensorError> for DraftError {
    fn from(error: TensorError) -> Self {
        Self::Tensor(error)
    }
}

impl From<TchError> for DraftError {
    fn from(error: TchError) -> Self {
        Self::Tensor(error.into())
    }
}

//! Token embedding.

use tch::{Kind, Tensor};
use torch_ext::TensorError;

use crate::ops::Ops;

/// A table of token embeddings.
#[derive(Debug)]
pub struct Embedding {
    table: Tensor,
    ops: Ops,
}

impl Embedding {
    /// From a table `[vocab, hidden]`.
    #[must_use]
    pub fn new(table: Tensor, ops: Ops) -> Self {
        Self { table, ops }
    }

    /// The same table, not copied.
    #[must_use]
    pub fn share(&self) -> Self {
        Self { table: self.table.shallow_clone(), ops: self.ops }
    }

    /// The embeddings of `token_ids` i64 `[T]`: a tensor of its own, `[T, hidden]`.
    ///
    /// # Errors
    ///
    /// [`TensorError`] if an id is outside the table.
    pub fn forward(&self, token_ids: &Tensor) -> Result<Tensor, TensorError> {
        let rows = self.table.f_index_select(0, token_ids)?;
        match self.ops {
            Ops::Torch => Ok(rows),
            Ops::Fused => Ok(rows.f_to_kind(Kind::Float)?),
        }
    }
}

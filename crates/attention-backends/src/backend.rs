//! The trait that every attention backend implements.

use tch::Tensor;
use torch_ext::TensorError;

use crate::device_layout::DeviceLayout;
use crate::selection::Selection;

/// Query rows of absorbed MLA. How many each sequence has is said by the layout's `cu_seqlens_q`:
/// any mixture of prefill chunks, verify windows and single decodes.
#[derive(Clone, Copy, Debug)]
pub struct MlaQuery<'a> {
    /// Queries times the key half of `kv_b_proj`, `[T, H, kv_lora_rank]`.
    pub q_latent: &'a Tensor,
    /// Rotated queries, `[T, H, rope_dim]`.
    pub q_pe: &'a Tensor,
    /// What scores are multiplied by before softmax.
    pub scale: f64,
    /// The keys that each row attends; `None` is every key that it sees.
    pub selection: Option<&'a Selection>,
}

/// Query rows of grouped-query attention; see [`MlaQuery`].
#[derive(Clone, Copy, Debug)]
pub struct GqaQuery<'a> {
    /// Rotated queries, `[T, H, head_dim]`.
    pub q: &'a Tensor,
    /// What scores are multiplied by before softmax.
    pub scale: f64,
}

/// Query rows of a lightning indexer.
#[derive(Clone, Copy, Debug)]
pub struct IndexQuery<'a> {
    /// Rotated queries, `[T, index_n_heads, index_head_dim]`.
    pub q: &'a Tensor,
    /// Weights of the heads, f32 `[T, index_n_heads]`, all constant factors included but
    /// `index_head_dim^-0.5`.
    pub weights: &'a Tensor,
    /// The most keys that a row selects, `index_topk`.
    pub topk: usize,
}

impl IndexQuery<'_> {
    /// What the products of queries and keys are multiplied by, `index_head_dim^-0.5`.
    pub(crate) fn scale(&self) -> f64 {
        (width(self.q) as f64).powf(-0.5)
    }
}

/// Writes and attends paged caches, which all share the block tables of a layout.
///
/// A **latent cache** is `[n_slots, kv_lora_rank + rope_dim]`. A **key/value cache** is
/// `[n_slots, H_kv, 2, head_dim]`, each head's key before its value. An **index cache** is
/// `[n_slots, index_head_dim]` of float32 or bfloat16, or u8 `[n_slots, index_head_dim + 4]`: the
/// key as 8-bit floats (e4m3), then the bytes of one float32 scale in the order of the machine. The
/// scale is `max(amax, 1e-4) / 448`, rounded up to a power of two.
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

    /// Attends each query row to its selected keys, or to all the keys `0..=position` of its
    /// sequence, and returns the weighted latents `[T, H, kv_lora_rank]` in the dtype of the
    /// query. Scores, softmax and sums are float32. A row that selects nothing is zero.
    ///
    /// # Errors
    ///
    /// [`TensorError`] if shapes, dtypes or devices do not fit.
    ///
    /// # Panics
    ///
    /// If a selected position is not visible to its row.
    fn mla(
        &self,
        query: MlaQuery<'_>,
        cache: &Tensor,
        layout: &DeviceLayout,
    ) -> Result<Tensor, TensorError>;

    /// Writes the layout's tokens to their slots: rotated keys `k` and values `v`,
    /// `[T, H_kv, head_dim]` each, converted to the dtype of the cache.
    ///
    /// # Errors
    ///
    /// [`TensorError`] if shapes, dtypes or devices do not fit.
    fn write_kv(
        &self,
        cache: &Tensor,
        k: &Tensor,
        v: &Tensor,
        layout: &DeviceLayout,
    ) -> Result<(), TensorError>;

    /// Attends each query row to all the keys `0..=position` of its sequence and returns the
    /// weighted values `[T, H, head_dim]` in the dtype of the query. Query head `h` attends the
    /// head `h * H_kv / H` of the cache. Scores, softmax and sums are float32.
    ///
    /// # Errors
    ///
    /// [`TensorError`] if shapes, dtypes or devices do not fit.
    fn gqa(
        &self,
        query: GqaQuery<'_>,
        cache: &Tensor,
        layout: &DeviceLayout,
    ) -> Result<Tensor, TensorError>;

    /// Writes the index keys `[T, index_head_dim]` of the layout's tokens to their slots.
    ///
    /// # Errors
    ///
    /// [`TensorError`] if shapes, dtypes or devices do not fit, or a key is not finite: it could
    /// not be ranked, and the text would go on with the wrong keys.
    fn write_index_keys(
        &self,
        cache: &Tensor,
        keys: &Tensor,
        layout: &DeviceLayout,
    ) -> Result<(), TensorError>;

    /// Scores the keys `0..=position` of each row's sequence and selects the `topk` best, the
    /// lower position where scores are equal:
    ///
    /// ```text
    /// score(t, s) = sum over heads h of weights[t, h] * ReLU(index_head_dim^-0.5 * q[t, h] . k_s)
    /// ```
    ///
    /// Scores are float32. A row that sees no more than `topk` keys selects them all and scores
    /// none. Also returns how many keys were scored, over all rows.
    ///
    /// # Errors
    ///
    /// [`TensorError`] if shapes, dtypes or devices do not fit, or queries or weights are not
    /// finite.
    fn select(
        &self,
        query: IndexQuery<'_>,
        cache: &Tensor,
        layout: &DeviceLayout,
    ) -> Result<(Selection, u64), TensorError>;
}

/// The `[H_kv, head_dim]` of a key/value cache, checked against rows `[T, .., head_dim]`.
pub(crate) fn kv_shape(cache: &Tensor, rows: &Tensor) -> Result<[i64; 2], TensorError> {
    match cache.size()[..] {
        [_, n_heads, 2, head_dim] if rows.dim() == 3 && width(rows) == head_dim => {
            Ok([n_heads, head_dim])
        }
        _ => Err(TensorError::WrongShape {
            what: "a key/value cache",
            found: cache.size(),
            expected: vec![-1, -1, 2, width(rows)],
        }),
    }
}

/// The last dimension of a tensor.
pub(crate) fn width(tensor: &Tensor) -> i64 {
    tensor.size().last().copied().unwrap_or(0)
}

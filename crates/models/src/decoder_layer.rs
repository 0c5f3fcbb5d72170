//! One decoder layer, shared by the target and the MTP layers.

use attention_backends::{AttentionBackend, DeviceLayout, MlaQuery};
use nn_layers::{GatedMlp, MlaProjections, MoeMlp, RmsNorm, RotaryRows, RotaryTable};
use tch::Tensor;
use torch_ext::{TensorError, slice};

/// Attention and feed-forward around a residual stream.
pub(crate) struct DecoderLayer {
    pub(crate) input_norm: RmsNorm,
    pub(crate) attention: MlaProjections,
    pub(crate) softmax_scale: f64,
    pub(crate) post_attention_norm: RmsNorm,
    pub(crate) feed_forward: FeedForward,
}

pub(crate) enum FeedForward {
    Dense(GatedMlp),
    Moe(Box<MoeMlp>),
}

/// Rows with what a layer needs to know of their positions.
pub(crate) struct Rows<'a> {
    layout: &'a DeviceLayout,
    rotary: RotaryRows,
}

impl<'a> Rows<'a> {
    pub(crate) fn new(layout: &'a DeviceLayout, rotary: &RotaryTable) -> Result<Self, TensorError> {
        Ok(Self { layout, rotary: rotary.rows(&layout.positions)? })
    }
}

/// The cache of a layer and how it is attended.
#[derive(Clone, Copy)]
pub(crate) struct LayerCache<'a> {
    pub(crate) cache: &'a Tensor,
    pub(crate) backend: &'a dyn AttentionBackend,
}

impl DecoderLayer {
    /// Adds `pending`, the output of the layer before, to `residual`, runs the layer, and returns
    /// its output, which is not added yet: the next norm does both in one go.
    pub(crate) fn forward(
        &self,
        residual: &mut Tensor,
        pending: Option<Tensor>,
        rows: &Rows<'_>,
        cache: LayerCache<'_>,
    ) -> Result<Tensor, TensorError> {
        let x = match pending {
            Some(pending) => self.input_norm.add_forward(residual, &pending)?,
            None => self.input_norm.forward(residual)?,
        };
        let q_a = self.write_kv(&x, rows, cache)?;
        self.attend(residual, &q_a, rows, cache)
    }

    /// As [`DecoderLayer::forward`] of a first layer, for the rows `output_rows` i64 `[R]`: every
    /// row's KV is written, and no more than that is computed for the others. `residual` is
    /// narrowed to the output rows.
    pub(crate) fn forward_rows(
        &self,
        residual: &mut Tensor,
        rows: &Rows<'_>,
        (output_rows, rotary): (&Tensor, &RotaryTable),
        cache: LayerCache<'_>,
    ) -> Result<Tensor, TensorError> {
        let x = self.input_norm.forward(residual)?;
        let q_a = self.write_kv(&x, rows, cache)?;
        *residual = residual.f_index_select(0, output_rows)?;
        let q_a = q_a.f_index_select(0, output_rows)?;
        let on_host = output_rows.f_to_device(tch::Device::Cpu)?;
        let layout = rows.layout.select_rows(slice::<i64>(&on_host)?);
        self.attend(residual, &q_a, &Rows::new(&layout, rotary)?, cache)
    }

    /// Writes the rows' KV and returns their query latents.
    fn write_kv(
        &self,
        x: &Tensor,
        rows: &Rows<'_>,
        cache: LayerCache<'_>,
    ) -> Result<Tensor, TensorError> {
        let latents = self.attention.latents(x, &rows.rotary)?;
        let LayerCache { cache, backend } = cache;
        backend.write_latent(cache, &latents.latent, &latents.k_pe, rows.layout)?;
        Ok(latents.q_a)
    }

    fn attend(
        &self,
        residual: &mut Tensor,
        q_a: &Tensor,
        rows: &Rows<'_>,
        cache: LayerCache<'_>,
    ) -> Result<Tensor, TensorError> {
        let (q_latent, q_pe) = self.attention.queries(q_a, &rows.rotary)?;
        let query = MlaQuery { q_latent: &q_latent, q_pe: &q_pe };
        let LayerCache { cache, backend } = cache;
        let attended = backend.mla(query, cache, self.softmax_scale, rows.layout)?;
        let output = self.attention.output(&attended)?;
        let x = self.post_attention_norm.add_forward(residual, &output)?;
        match &self.feed_forward {
            FeedForward::Dense(mlp) => mlp.forward(&x),
            FeedForward::Moe(moe) => moe.forward(&x),
        }
    }
}

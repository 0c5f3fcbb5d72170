//! One decoder layer, shared by the target and the MTP layers.

use attention_backends::{AttentionBackend, DeviceLayout, Selection};
use engine_types::IndexerCounts;
use nn_layers::{GatedMlp, MoeMlp, RmsNorm, RotaryRows, RotaryTable};
use tch::Tensor;
use torch_ext::{TensorError, slice};

use crate::deepseek_v3::LatentAttention;
use crate::glm4_moe::GroupedAttention;
use crate::layer_cache::LayerCache;

/// Attention and feed-forward around a residual stream.
pub(crate) struct DecoderLayer {
    pub(crate) input_norm: RmsNorm,
    pub(crate) attention: Attention,
    pub(crate) post_attention_norm: RmsNorm,
    pub(crate) feed_forward: FeedForward,
}

pub(crate) enum Attention {
    Latent(LatentAttention),
    Grouped(GroupedAttention),
}

pub(crate) enum FeedForward {
    Dense(GatedMlp),
    Moe(Box<MoeMlp>),
}

/// Rows with what a layer needs to know of their positions.
pub(crate) struct Rows<'a> {
    pub(crate) layout: &'a DeviceLayout,
    pub(crate) rotary: RotaryRows,
}

impl<'a> Rows<'a> {
    pub(crate) fn new(layout: &'a DeviceLayout, rotary: &RotaryTable) -> Result<Self, TensorError> {
        Ok(Self { layout, rotary: rotary.rows(&layout.positions)? })
    }
}

/// The caches of a layer and what works on them.
#[derive(Clone, Copy)]
pub(crate) struct LayerMemory<'a> {
    pub(crate) cache: &'a LayerCache,
    pub(crate) backend: &'a dyn AttentionBackend,
}

/// Which keys the rows of a pass attend, as it goes from layer to layer.
#[derive(Default)]
pub(crate) struct KeyChoice<'a> {
    /// A selection that every layer takes as it is; no indexer runs.
    pub(crate) given: Option<&'a Selection>,
    /// What the last layer with an indexer chose.
    pub(crate) chosen: Option<Selection>,
    /// What the indexers did.
    pub(crate) counts: IndexerCounts,
}

impl KeyChoice<'_> {
    pub(crate) fn current(&self) -> Option<&Selection> {
        self.given.or(self.chosen.as_ref())
    }
}

/// Rows between their KV and their attention.
pub(crate) struct Written {
    /// The layer's normalised input, where an indexer still needs it.
    pub(crate) x: Option<Tensor>,
    /// Query latents of latent attention, rotated queries of grouped-query attention.
    pub(crate) q: Tensor,
}

impl DecoderLayer {
    /// Whether it chooses the keys of sparse attention itself.
    pub(crate) fn has_indexer(&self) -> bool {
        match &self.attention {
            Attention::Latent(attention) => attention.has_indexer(),
            Attention::Grouped(_) => false,
        }
    }

    /// Adds `pending`, the output of the layer before, to `residual`, runs the layer, and returns
    /// its output, which is not added yet: the next norm does both in one go.
    pub(crate) fn forward(
        &self,
        residual: &mut Tensor,
        pending: Option<Tensor>,
        rows: &Rows<'_>,
        memory: LayerMemory<'_>,
        choice: &mut KeyChoice<'_>,
    ) -> Result<Tensor, TensorError> {
        let x = match pending {
            Some(pending) => self.input_norm.add_forward(residual, &pending)?,
            None => self.input_norm.forward(residual)?,
        };
        let written = self.write_kv(x, rows, memory, choice)?;
        self.attend(residual, &written, rows, memory, choice)
    }

    /// As [`DecoderLayer::forward`] of a first layer, for the rows `output_rows` i64 `[R]`: every
    /// row's KV and index key are written, and no more than that is computed for the others.
    /// `residual` is narrowed to the output rows.
    pub(crate) fn forward_rows(
        &self,
        residual: &mut Tensor,
        rows: &Rows<'_>,
        (output_rows, rotary): (&Tensor, &RotaryTable),
        memory: LayerMemory<'_>,
        choice: &mut KeyChoice<'_>,
    ) -> Result<Tensor, TensorError> {
        let x = self.input_norm.forward(residual)?;
        let written = self.write_kv(x, rows, memory, choice)?;
        let narrow = |tensor: &Tensor| tensor.f_index_select(0, output_rows);
        *residual = narrow(residual)?;
        let written =
            Written { x: written.x.as_ref().map(narrow).transpose()?, q: narrow(&written.q)? };
        let on_host = output_rows.f_to_device(tch::Device::Cpu)?;
        let layout = rows.layout.select_rows(slice::<i64>(&on_host)?);
        self.attend(residual, &written, &Rows::new(&layout, rotary)?, memory, choice)
    }

    fn write_kv(
        &self,
        x: Tensor,
        rows: &Rows<'_>,
        memory: LayerMemory<'_>,
        choice: &KeyChoice<'_>,
    ) -> Result<Written, TensorError> {
        match &self.attention {
            Attention::Latent(attention) => attention.write_kv(x, rows, memory, choice),
            Attention::Grouped(attention) => attention.write_kv(&x, rows, memory),
        }
    }

    fn attend(
        &self,
        residual: &mut Tensor,
        written: &Written,
        rows: &Rows<'_>,
        memory: LayerMemory<'_>,
        choice: &mut KeyChoice<'_>,
    ) -> Result<Tensor, TensorError> {
        let output = match &self.attention {
            Attention::Latent(attention) => attention.attend(written, rows, memory, choice)?,
            Attention::Grouped(attention) => attention.attend(written, rows, memory)?,
        };
        let x = self.post_attention_norm.add_forward(residual, &output)?;
        match &self.feed_forward {
            FeedForward::Dense(mlp) => mlp.forward(&x),
            FeedForward::Moe(moe) => moe.forward(&x),
        }
    }
}

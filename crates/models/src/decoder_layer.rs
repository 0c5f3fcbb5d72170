//! One decoder layer, shared by the target and the MTP layers.

use attention_backends::{AttentionBackend, DeviceLayout, IndexQuery, MlaQuery, Selection};
use engine_types::IndexerCounts;
use nn_layers::{GatedMlp, Indexer, MlaProjections, MoeMlp, RmsNorm, RotaryRows, RotaryTable};
use tch::Tensor;
use torch_ext::{TensorError, slice};

use crate::layer_cache::LayerCache;

/// Attention and feed-forward around a residual stream.
pub(crate) struct DecoderLayer {
    pub(crate) input_norm: RmsNorm,
    pub(crate) attention: MlaProjections,
    /// In layers of a sparse model that choose their keys themselves.
    pub(crate) indexer: Option<Indexer>,
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
    fn current(&self) -> Option<&Selection> {
        self.given.or(self.chosen.as_ref())
    }
}

/// Rows between their KV and their attention.
struct Written {
    /// The layer's normalised input, where an indexer still needs it.
    x: Option<Tensor>,
    /// Query latents.
    q_a: Tensor,
}

impl DecoderLayer {
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
            Written { x: written.x.as_ref().map(narrow).transpose()?, q_a: narrow(&written.q_a)? };
        let on_host = output_rows.f_to_device(tch::Device::Cpu)?;
        let layout = rows.layout.select_rows(slice::<i64>(&on_host)?);
        self.attend(residual, &written, &Rows::new(&layout, rotary)?, memory, choice)
    }

    /// Writes the latents of all rows, and their index keys if this layer's indexer is to run. A
    /// given selection spares the keys, too: it comes only with rows of drafts, and once a draft
    /// is committed, the first draft step writes its key before anything scores it.
    fn write_kv(
        &self,
        x: Tensor,
        rows: &Rows<'_>,
        LayerMemory { cache, backend }: LayerMemory<'_>,
        choice: &KeyChoice<'_>,
    ) -> Result<Written, TensorError> {
        let latents = self.attention.latents(&x, &rows.rotary)?;
        backend.write_latent(&cache.latent, &latents.latent, &latents.k_pe, rows.layout)?;
        let indexer = self.indexer.as_ref().filter(|_| choice.given.is_none());
        let Some(indexer) = indexer else { return Ok(Written { x: None, q_a: latents.q_a }) };
        let keys = indexer.keys(&x, &rows.rotary)?;
        backend.write_index_keys(cache.index_keys(), &keys, rows.layout)?;
        Ok(Written { x: Some(x), q_a: latents.q_a })
    }

    fn attend(
        &self,
        residual: &mut Tensor,
        written: &Written,
        rows: &Rows<'_>,
        memory: LayerMemory<'_>,
        choice: &mut KeyChoice<'_>,
    ) -> Result<Tensor, TensorError> {
        if let (Some(indexer), Some(x)) = (&self.indexer, &written.x) {
            let (selection, counts) = choose_keys(indexer, (x, &written.q_a), rows, memory)?;
            choice.chosen = Some(selection);
            choice.counts += counts;
        }
        let (q_latent, q_pe) = self.attention.queries(&written.q_a, &rows.rotary)?;
        let query = MlaQuery {
            q_latent: &q_latent,
            q_pe: &q_pe,
            scale: self.softmax_scale,
            selection: choice.current(),
        };
        let attended = memory.backend.mla(query, &memory.cache.latent, rows.layout)?;
        let output = self.attention.output(&attended)?;
        let x = self.post_attention_norm.add_forward(residual, &output)?;
        match &self.feed_forward {
            FeedForward::Dense(mlp) => mlp.forward(&x),
            FeedForward::Moe(moe) => moe.forward(&x),
        }
    }
}

/// Chooses the keys of each row from its layer input `x` and its query latent `q_a`.
fn choose_keys(
    indexer: &Indexer,
    (x, q_a): (&Tensor, &Tensor),
    rows: &Rows<'_>,
    LayerMemory { cache, backend }: LayerMemory<'_>,
) -> Result<(Selection, IndexerCounts), TensorError> {
    let positions = rows.layout.host().positions();
    let most_visible = positions.iter().max().map_or(0, |&position| position as usize + 1);
    let (selection, n_scored_keys) = if most_visible <= indexer.topk() {
        // Whatever the scores, every row would get all it sees.
        (Selection::all_visible(rows.layout)?, 0)
    } else {
        let (q, weights) = indexer.queries(q_a, x, &rows.rotary)?;
        let query = IndexQuery { q: &q, weights: &weights, topk: indexer.topk() };
        backend.select(query, cache.index_keys(), rows.layout)?
    };
    let n_rows = positions.len() as u64;
    let n_launches = u64::from(n_rows > 0);
    Ok((selection, IndexerCounts { n_launches, n_rows, n_scored_keys }))
}

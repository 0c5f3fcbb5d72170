//! The multi-token-prediction layers of every family.

use attention_backends::AttentionBackend;
use nn_layers::{Embedding, Linear, RmsNorm, RotaryTable};
use spec_decode::{DraftError, DraftInput, DraftModel, DraftOutput};
use tch::{Kind, Tensor};
use torch_ext::TensorError;

use crate::decoder::Decoder;
use crate::decoder_layer::{DecoderLayer, KeyChoice, LayerMemory, Rows};
use crate::error::LoadError;
use crate::layer_cache::LayerCache;
use crate::layer_weights::LayerBuilder;

/// The MTP layers of a checkpoint. [`MtpLayers::bind`] them to caches to draft.
pub struct MtpLayers {
    layers: Vec<MtpLayer>,
    rotary: RotaryTable,
    /// Caches of the target in front of those of the MTP layers.
    num_target_layers: usize,
}

struct MtpLayer {
    /// The target's, unless the checkpoint has one of this layer's own.
    embedding: Embedding,
    enorm: RmsNorm,
    hnorm: RmsNorm,
    eh_proj: Linear,
    block: DecoderLayer,
    norm: RmsNorm,
    /// The target's, unless the checkpoint has one of this layer's own.
    head: Linear,
}

impl MtpLayers {
    pub(crate) fn build(
        builder: &mut LayerBuilder<'_>,
        target: &Decoder,
    ) -> Result<Self, LoadError> {
        let num_target_layers = builder.config.num_hidden_layers;
        let layer_idx = num_target_layers..num_target_layers + builder.config.num_mtp_layers;
        let layers = layer_idx.map(|idx| MtpLayer::build(builder, target, idx));
        Ok(Self {
            layers: layers.collect::<Result<_, _>>()?,
            rotary: target.rotary.share(),
            num_target_layers,
        })
    }

    /// Number of MTP layers, at least 1.
    #[must_use]
    pub fn num_layers(&self) -> usize {
        self.layers.len()
    }

    /// Whether a draft step can take the selection of an earlier one instead of running an indexer.
    #[must_use]
    pub fn can_share_selection(&self) -> bool {
        self.layers.iter().all(|layer| layer.block.has_indexer())
    }

    /// The layers over `caches`, those of a pass: the target's layers first, then one for each MTP
    /// layer.
    ///
    /// # Panics
    ///
    /// If there is no cache for each MTP layer.
    #[must_use]
    pub fn bind<'a>(
        &'a self,
        caches: &'a [LayerCache],
        backend: &'a dyn AttentionBackend,
    ) -> BoundMtp<'a> {
        let n_needed = self.num_target_layers + self.layers.len();
        assert_eq!(caches.len(), n_needed, "one cache for each layer, MTP layers included");
        BoundMtp { mtp: self, caches: &caches[self.num_target_layers..], backend }
    }
}

impl MtpLayer {
    fn build(
        builder: &mut LayerBuilder<'_>,
        target: &Decoder,
        layer_idx: usize,
    ) -> Result<Self, LoadError> {
        let layer = format!("model.layers.{layer_idx}");
        let own_table = builder.tensors.take_optional(&format!("{layer}.embed_tokens.weight"))?;
        let own_head = builder.optional_linear(&format!("{layer}.shared_head.head"))?;
        Ok(Self {
            embedding: match own_table {
                Some(table) => Embedding::new(table, builder.ops),
                None => target.embedding.share(),
            },
            enorm: builder.norm(&format!("{layer}.enorm"))?,
            hnorm: builder.norm(&format!("{layer}.hnorm"))?,
            eh_proj: builder.linear(&format!("{layer}.eh_proj"))?,
            block: builder.decoder_layer(layer_idx)?,
            norm: builder.norm(&format!("{layer}.shared_head.norm"))?,
            head: own_head.unwrap_or_else(|| target.head.share()),
        })
    }
}

/// MTP layers with their caches.
pub struct BoundMtp<'a> {
    mtp: &'a MtpLayers,
    /// One for each MTP layer.
    caches: &'a [LayerCache],
    backend: &'a dyn AttentionBackend,
}

impl BoundMtp<'_> {
    fn run(&self, input: &DraftInput<'_>) -> Result<DraftOutput, TensorError> {
        let layer = &self.mtp.layers[input.layer];
        let embedded = layer.enorm.forward(&layer.embedding.forward(input.token_ids)?)?;
        let hidden = layer.hnorm.forward(input.hidden)?;
        let mut residual = layer.eh_proj.forward(&Tensor::f_cat(&[embedded, hidden], -1)?)?;
        let rows = Rows::new(input.layout, &self.mtp.rotary)?;
        let memory = LayerMemory { cache: &self.caches[input.layer], backend: self.backend };
        let mut choice = KeyChoice { given: input.selection, ..KeyChoice::default() };
        let block = &layer.block;
        let output = match input.output_rows {
            None => block.forward(&mut residual, None, &rows, memory, &mut choice)?,
            Some(output_rows) => {
                let selected = (output_rows, &self.mtp.rotary);
                block.forward_rows(&mut residual, &rows, selected, memory, &mut choice)?
            }
        };
        Ok(DraftOutput {
            hidden: layer.norm.add_forward(&mut residual, &output)?,
            selection: choice.chosen,
            indexer: choice.counts,
        })
    }
}

impl DraftModel for BoundMtp<'_> {
    fn num_layers(&self) -> usize {
        self.mtp.num_layers()
    }

    fn can_share_selection(&self) -> bool {
        self.mtp.can_share_selection()
    }

    fn step(&self, input: DraftInput<'_>) -> Result<DraftOutput, DraftError> {
        Ok(self.run(&input)?)
    }

    fn logits(&self, layer: usize, hidden: &Tensor) -> Result<Tensor, DraftError> {
        let logits = self.mtp.layers[layer].head.forward(hidden)?;
        Ok(logits.f_to_kind(Kind::Float)?)
    }
}

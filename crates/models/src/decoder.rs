//! The target model of every family. What is different between them is in the configuration, and in
//! the attention of their layers.

use model_config::ModelConfig;
use nn_layers::{Embedding, Linear, RmsNorm, RotaryTable};
use tch::{Kind, Tensor};
use torch_ext::TensorError;

use crate::causal_lm::{CausalLm, ForwardContext, ForwardOutput};
use crate::decoder_layer::{DecoderLayer, KeyChoice, LayerMemory, Rows};
use crate::error::LoadError;
use crate::layer_weights::LayerBuilder;

/// Embedding, decoder layers, final norm and head.
pub(crate) struct Decoder {
    config: ModelConfig,
    pub(crate) embedding: Embedding,
    layers: Vec<DecoderLayer>,
    norm: RmsNorm,
    pub(crate) head: Linear,
    pub(crate) rotary: RotaryTable,
}

impl Decoder {
    pub(crate) fn build(builder: &mut LayerBuilder<'_>) -> Result<Self, LoadError> {
        let config = builder.config;
        let table = builder.tensors.take("model.embed_tokens.weight")?;
        let rope_dim = config.attention.rope_dim();
        let n_positions = config.max_position_embeddings;
        let rotary = RotaryTable::new(&config.rope, rope_dim, n_positions, table.device())?;
        let layers = (0..config.num_hidden_layers).map(|idx| builder.decoder_layer(idx));
        Ok(Self {
            config: config.clone(),
            layers: layers.collect::<Result<_, _>>()?,
            norm: builder.norm("model.norm")?,
            head: if config.tie_word_embeddings {
                Linear::new(&table, builder.ops)?
            } else {
                builder.linear("lm_head")?
            },
            embedding: Embedding::new(table, builder.ops),
            rotary,
        })
    }
}

impl CausalLm for Decoder {
    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn forward(
        &self,
        token_ids: &Tensor,
        cx: &ForwardContext<'_>,
    ) -> Result<ForwardOutput, TensorError> {
        let rows = Rows::new(cx.layout, &self.rotary)?;
        let mut residual = self.embedding.forward(token_ids)?;
        let mut pending = None;
        let mut choice = KeyChoice::default();
        assert!(cx.caches.len() >= self.layers.len(), "every layer has its cache");
        for (layer, cache) in self.layers.iter().zip(cx.caches) {
            let memory = LayerMemory { cache, backend: cx.backend };
            pending = Some(layer.forward(&mut residual, pending, &rows, memory, &mut choice)?);
        }
        let pending = pending.expect("a model has at least one layer");
        let hidden = self.norm.add_forward(&mut residual, &pending)?;
        Ok(ForwardOutput { hidden, indexer: choice.counts })
    }

    fn logits(&self, hidden: &Tensor) -> Result<Tensor, TensorError> {
        Ok(self.head.forward(hidden)?.f_to_kind(Kind::Float)?)
    }
}

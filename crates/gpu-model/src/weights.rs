//! The weights of layers on the device.

use gpu_runtime::Buffer;
use model_config::MoeConfig;

use crate::error::ModelError;
use crate::loader::{Element, Loader};
use crate::sizes::latent;

/// One decoder layer. Projections with the same input lie side by side in one matrix.
#[derive(Debug)]
pub(crate) struct Layer<E> {
    pub(crate) input_norm: Buffer<f32>,
    /// Queries (or their latents), the latent and its rotated key, and the index key where the
    /// layer has an indexer: `[qkv_width, hidden]`.
    pub(crate) qkv: Buffer<E>,
    /// Norm and projection of the query latent.
    pub(crate) q_b: Option<(Buffer<f32>, Buffer<E>)>,
    pub(crate) kv_norm: Buffer<f32>,
    /// `[H, nope + v, kv_lora_rank]`: of each head the part that queries absorb, then the values'.
    pub(crate) kv_b: Buffer<E>,
    pub(crate) o: Buffer<E>,
    pub(crate) indexer: Option<IndexerWeights<E>>,
    pub(crate) post_norm: Buffer<f32>,
    pub(crate) feed_forward: FeedForward<E>,
}

/// What an indexer has beside its key projection.
#[derive(Debug)]
pub(crate) struct IndexerWeights<E> {
    pub(crate) q: Buffer<E>,
    pub(crate) key_norm: Buffer<f32>,
    pub(crate) key_bias: Buffer<f32>,
    pub(crate) head_weights: Buffer<E>,
}

#[derive(Debug)]
pub(crate) enum FeedForward<E> {
    Dense(Mlp<E>),
    Moe(Box<Moe<E>>),
}

/// Gates over ups `[2 * inner, hidden]`, and downs `[hidden, inner]`.
#[derive(Debug)]
pub(crate) struct Mlp<E> {
    pub(crate) gate_up: Buffer<E>,
    pub(crate) down: Buffer<E>,
    pub(crate) inner: usize,
}

#[derive(Debug)]
pub(crate) struct Moe<E> {
    pub(crate) gate: Buffer<f32>,
    pub(crate) bias: Option<Buffer<f32>>,
    /// As [`Mlp`], expert by expert.
    pub(crate) experts: Mlp<E>,
    pub(crate) shared: Option<Mlp<E>>,
}

/// One MTP layer.
#[derive(Debug)]
pub(crate) struct MtpLayer<E> {
    /// The target's serves where the checkpoint has none of this layer's own.
    pub(crate) table: Option<Buffer<E>>,
    pub(crate) enorm: Buffer<f32>,
    pub(crate) hnorm: Buffer<f32>,
    pub(crate) eh_proj: Buffer<E>,
    pub(crate) block: Layer<E>,
    pub(crate) norm: Buffer<f32>,
    /// As `table`.
    pub(crate) head: Option<Buffer<E>>,
}

impl<E: Element> Layer<E> {
    /// The layer that a checkpoint calls `model.layers.{layer_idx}`.
    pub(crate) fn load(loader: &mut Loader<'_>, layer_idx: usize) -> Result<Self, ModelError> {
        let config = loader.config;
        let layer = format!("model.layers.{layer_idx}");
        let weight = |name: &str| format!("{layer}.self_attn.{name}.weight");
        let has_latent = latent(config).q_lora_rank.is_some();
        let has_indexer = config.has_indexer(layer_idx);
        let query = if has_latent { "q_a_proj" } else { "q_proj" };
        let mut names = vec![weight(query), weight("kv_a_proj_with_mqa")];
        if has_indexer {
            names.push(weight("indexer.wk"));
        }
        Ok(Self {
            input_norm: loader.floats(&format!("{layer}.input_layernorm.weight"))?,
            qkv: loader.stack(&names)?,
            q_b: if has_latent {
                let norm = loader.floats(&weight("q_a_layernorm"))?;
                Some((norm, loader.matrix(&weight("q_b_proj"))?))
            } else {
                None
            },
            kv_norm: loader.floats(&weight("kv_a_layernorm"))?,
            kv_b: loader.matrix(&weight("kv_b_proj"))?,
            o: loader.matrix(&weight("o_proj"))?,
            indexer: if has_indexer {
                Some(IndexerWeights {
                    q: loader.matrix(&weight("indexer.wq_b"))?,
                    key_norm: loader.floats(&weight("indexer.k_norm"))?,
                    key_bias: loader.floats(&format!("{layer}.self_attn.indexer.k_norm.bias"))?,
                    head_weights: loader.matrix(&weight("indexer.weights_proj"))?,
                })
            } else {
                None
            },
            post_norm: loader.floats(&format!("{layer}.post_attention_layernorm.weight"))?,
            feed_forward: FeedForward::load(loader, &format!("{layer}.mlp"), layer_idx)?,
        })
    }
}

impl<E: Element> FeedForward<E> {
    fn load(loader: &mut Loader<'_>, prefix: &str, layer_idx: usize) -> Result<Self, ModelError> {
        let config = loader.config;
        let Some(moe) = config.moe.as_ref().filter(|_| config.is_moe_layer(layer_idx)) else {
            let mlp = Mlp::load(loader, &[prefix.to_owned()], config.intermediate_size)?;
            return Ok(Self::Dense(mlp));
        };
        let MoeConfig { n_routed_experts, n_shared_experts, moe_intermediate_size, .. } = *moe;
        let experts = (0..n_routed_experts).map(|idx| format!("{prefix}.experts.{idx}"));
        let shared_width = n_shared_experts * moe_intermediate_size;
        Ok(Self::Moe(Box::new(Moe {
            gate: loader.floats(&format!("{prefix}.gate.weight"))?,
            bias: if moe.has_correction_bias() {
                Some(loader.floats(&format!("{prefix}.gate.e_score_correction_bias"))?)
            } else {
                None
            },
            experts: Mlp::load(loader, &experts.collect::<Vec<_>>(), moe_intermediate_size)?,
            shared: if n_shared_experts > 0 {
                Some(Mlp::load(loader, &[format!("{prefix}.shared_experts")], shared_width)?)
            } else {
                None
            },
        })))
    }
}

impl<E: Element> Mlp<E> {
    fn load(
        loader: &mut Loader<'_>,
        prefixes: &[String],
        inner: usize,
    ) -> Result<Self, ModelError> {
        let of = |name: &str| -> Vec<String> {
            prefixes.iter().map(|prefix| format!("{prefix}.{name}.weight")).collect()
        };
        let gate_up: Vec<String> =
            of("gate_proj").into_iter().zip(of("up_proj")).flat_map(|(g, u)| [g, u]).collect();
        Ok(Self { gate_up: loader.stack(&gate_up)?, down: loader.stack(&of("down_proj"))?, inner })
    }
}

impl<E: Element> MtpLayer<E> {
    pub(crate) fn load(loader: &mut Loader<'_>, layer_idx: usize) -> Result<Self, ModelError> {
        let layer = format!("model.layers.{layer_idx}");
        Ok(Self {
            table: loader.optional(&format!("{layer}.embed_tokens.weight"))?,
            enorm: loader.floats(&format!("{layer}.enorm.weight"))?,
            hnorm: loader.floats(&format!("{layer}.hnorm.weight"))?,
            eh_proj: loader.matrix(&format!("{layer}.eh_proj.weight"))?,
            block: Layer::load(loader, layer_idx)?,
            norm: loader.floats(&format!("{layer}.shared_head.norm.weight"))?,
            head: loader.optional(&format!("{layer}.shared_head.head.weight"))?,
        })
    }
}

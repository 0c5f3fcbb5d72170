//! The attention of the DeepSeek family and of GLM-5: latent, with an indexer where it is sparse.
//! DeepSeek-V2, V3, R1, V3.2, Kimi-K2, GLM-5 and GLM-5.2 differ in their configurations alone.

use attention_backends::{IndexQuery, MlaQuery, Selection};
use engine_types::IndexerCounts;
use model_config::MlaConfig;
use nn_layers::{Indexer, IndexerWeights, MlaProjections, MlaWeights};
use tch::Tensor;
use torch_ext::TensorError;

use crate::decoder_layer::{KeyChoice, LayerMemory, Rows, Written};
use crate::error::LoadError;
use crate::layer_weights::LayerBuilder;

/// Latent attention of one layer.
pub(crate) struct LatentAttention {
    projections: MlaProjections,
    /// In layers of a sparse model that choose their keys themselves.
    indexer: Option<Indexer>,
    softmax_scale: f64,
}

impl LatentAttention {
    pub(crate) fn build(
        builder: &mut LayerBuilder<'_>,
        mla: &MlaConfig,
        layer_idx: usize,
    ) -> Result<Self, LoadError> {
        let config = builder.config;
        let prefix = format!("model.layers.{layer_idx}.self_attn");
        let has_q_latent = mla.q_lora_rank.is_some();
        let name = |name: &str| format!("{prefix}.{name}");
        let weights = MlaWeights {
            q_a: builder.matrix(&name(if has_q_latent { "q_a_proj" } else { "q_proj" }))?,
            q_b: if has_q_latent {
                Some((builder.weight(&name("q_a_layernorm"))?, builder.matrix(&name("q_b_proj"))?))
            } else {
                None
            },
            kv_a: builder.matrix(&name("kv_a_proj_with_mqa"))?,
            kv_a_norm: builder.weight(&name("kv_a_layernorm"))?,
            kv_b: builder.weight(&name("kv_b_proj"))?,
            o: builder.matrix(&name("o_proj"))?,
        };
        Ok(Self {
            projections: MlaProjections::new(&weights, mla, config.rms_norm_eps, builder.ops)?,
            indexer: if config.has_indexer(layer_idx) {
                Some(indexer(builder, &name("indexer"))?)
            } else {
                None
            },
            softmax_scale: config.softmax_scale(),
        })
    }

    pub(crate) fn has_indexer(&self) -> bool {
        self.indexer.is_some()
    }

    /// Writes the latents of all rows, and their index keys if this layer's indexer is to run. A
    /// given selection spares the keys, too: it comes only with rows of drafts, and once a draft
    /// is committed, the first draft step writes its key before anything scores it.
    pub(crate) fn write_kv(
        &self,
        x: Tensor,
        rows: &Rows<'_>,
        LayerMemory { cache, backend }: LayerMemory<'_>,
        choice: &KeyChoice<'_>,
    ) -> Result<Written, TensorError> {
        let latents = self.projections.latents(&x, &rows.rotary)?;
        backend.write_latent(&cache.kv, &latents.latent, &latents.k_pe, rows.layout)?;
        let indexer = self.indexer.as_ref().filter(|_| choice.given.is_none());
        let Some(indexer) = indexer else { return Ok(Written { x: None, q: latents.q_a }) };
        let keys = indexer.keys(&x, &rows.rotary)?;
        backend.write_index_keys(cache.index_keys(), &keys, rows.layout)?;
        Ok(Written { x: Some(x), q: latents.q_a })
    }

    pub(crate) fn attend(
        &self,
        written: &Written,
        rows: &Rows<'_>,
        memory: LayerMemory<'_>,
        choice: &mut KeyChoice<'_>,
    ) -> Result<Tensor, TensorError> {
        if let (Some(indexer), Some(x)) = (&self.indexer, &written.x) {
            let (selection, counts) = choose_keys(indexer, (x, &written.q), rows, memory)?;
            choice.chosen = Some(selection);
            choice.counts += counts;
        }
        let (q_latent, q_pe) = self.projections.queries(&written.q, &rows.rotary)?;
        let query = MlaQuery {
            q_latent: &q_latent,
            q_pe: &q_pe,
            scale: self.softmax_scale,
            selection: choice.current(),
        };
        let attended = memory.backend.mla(query, &memory.cache.kv, rows.layout)?;
        self.projections.output(&attended)
    }
}

fn indexer(builder: &mut LayerBuilder<'_>, prefix: &str) -> Result<Indexer, LoadError> {
    let dsa = builder.config.dsa.as_ref().expect("an indexer belongs to sparse attention");
    let name = |name: &str| format!("{prefix}.{name}");
    let (q, k) = (builder.matrix(&name("wq_b"))?, builder.matrix(&name("wk"))?);
    let head_weights = builder.weight(&name("weights_proj"))?;
    let k_norm = (builder.weight(&name("k_norm"))?, builder.tensors.take(&name("k_norm.bias"))?);
    let weights = IndexerWeights { q, k, k_norm, head_weights };
    Ok(Indexer::new(&weights, dsa, builder.ops)?)
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

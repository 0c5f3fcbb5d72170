//! The attention of GLM-4.5, GLM-4.6 and their Air models: grouped-query, with a partial rotation.

use attention_backends::GqaQuery;
use model_config::GqaConfig;
use nn_layers::{GqaParts, GqaProjections};
use tch::Tensor;
use torch_ext::TensorError;

use crate::decoder_layer::{LayerMemory, Rows, Written};
use crate::error::LoadError;
use crate::layer_weights::LayerBuilder;

/// Grouped-query attention of one layer.
pub(crate) struct GroupedAttention {
    projections: GqaProjections,
    softmax_scale: f64,
}

impl GroupedAttention {
    pub(crate) fn build(
        builder: &mut LayerBuilder<'_>,
        gqa: &GqaConfig,
        layer_idx: usize,
    ) -> Result<Self, LoadError> {
        let name = |part: &str| format!("model.layers.{layer_idx}.self_attn.{part}");
        let parts = GqaParts {
            q: builder.linear(&name("q_proj"))?,
            k: builder.linear(&name("k_proj"))?,
            v: builder.linear(&name("v_proj"))?,
            o: builder.linear(&name("o_proj"))?,
            bias: if gqa.has_bias {
                let mut bias = |part: &str| builder.tensors.take(&name(part));
                Some([bias("q_proj.bias")?, bias("k_proj.bias")?, bias("v_proj.bias")?])
            } else {
                None
            },
            qk_norm: if gqa.has_qk_norm {
                Some([builder.norm(&name("q_norm"))?, builder.norm(&name("k_norm"))?])
            } else {
                None
            },
        };
        Ok(Self {
            projections: GqaProjections::new(parts, gqa, builder.ops)?,
            softmax_scale: builder.config.softmax_scale(),
        })
    }

    /// Writes the keys and values of all rows.
    pub(crate) fn write_kv(
        &self,
        x: &Tensor,
        rows: &Rows<'_>,
        LayerMemory { cache, backend }: LayerMemory<'_>,
    ) -> Result<Written, TensorError> {
        let projected = self.projections.qkv(x, &rows.rotary)?;
        backend.write_kv(&cache.kv, &projected.k, &projected.v, rows.layout)?;
        Ok(Written { x: None, q: projected.q })
    }

    pub(crate) fn attend(
        &self,
        written: &Written,
        rows: &Rows<'_>,
        LayerMemory { cache, backend }: LayerMemory<'_>,
    ) -> Result<Tensor, TensorError> {
        let query = GqaQuery { q: &written.q, scale: self.softmax_scale };
        self.projections.output(&backend.gqa(query, &cache.kv, rows.layout)?)
    }
}

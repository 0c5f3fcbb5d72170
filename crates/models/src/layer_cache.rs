//! The caches of the layers.

use attention_backends::FP8_SCALE_BYTES;
use model_config::{AttentionConfig, DsaConfig};
use tch::{Device, Kind, TchError, Tensor};

use crate::registry::LoadedModel;

/// What a fresh cache holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KvInit {
    /// Zeros.
    #[default]
    Zero,
    /// NaN, so that a read of a slot that was not written shows. For tests.
    Nan,
}

/// How the index keys of sparse attention are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IndexCacheDtype {
    /// In the dtype that the model computes in.
    #[default]
    Auto,
    /// As 8-bit floats (e4m3) with one float32 scale, a power of two, for each token.
    Fp8,
}

impl IndexCacheDtype {
    /// The dtype of a cache beside latents of `kind`, and the width of its rows.
    fn format(self, dsa: &DsaConfig, kind: Kind) -> (Kind, usize) {
        match self {
            Self::Auto => (kind, dsa.index_head_dim),
            Self::Fp8 => (Kind::Uint8, dsa.index_head_dim + FP8_SCALE_BYTES),
        }
    }

    /// Bytes of one index key in a model that computes in `kind`.
    #[must_use]
    pub fn n_bytes_per_key(self, dsa: &DsaConfig, kind: Kind) -> usize {
        let (kind, width) = self.format(dsa, kind);
        width * kind.elt_size_in_bytes()
    }
}

/// The paged caches of one layer, which share the block tables of all layers. Formats are those of
/// [`AttentionBackend`](attention_backends::AttentionBackend).
#[derive(Debug)]
pub struct LayerCache {
    /// Latents `[n_slots, cache_width]`, or keys and values `[n_slots, num_kv_heads, 2, head_dim]`,
    /// as the model's attention is.
    pub kv: Tensor,
    /// Index keys, in layers with an indexer of their own
    /// ([`ModelConfig::has_indexer`](model_config::ModelConfig::has_indexer)).
    pub index: Option<Tensor>,
}

impl LayerCache {
    /// The index keys of a layer with an indexer.
    pub(crate) fn index_keys(&self) -> &Tensor {
        self.index.as_ref().expect("a layer with an indexer has an index cache")
    }

    /// Copies `n_slots` slots from slot `from` on to slot `to` on, in every cache of the layer. The
    /// two ranges have no slot in common.
    ///
    /// # Errors
    ///
    /// [`TchError`] if a range does not lie in the caches.
    pub fn copy_slots(&self, from: i64, to: i64, n_slots: i64) -> Result<(), TchError> {
        self.tensors().try_for_each(|cache| {
            cache.f_narrow(0, to, n_slots)?.f_copy_(&cache.f_narrow(0, from, n_slots)?)
        })
    }

    /// The caches of the layer.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        std::iter::once(&self.kv).chain(&self.index)
    }
}

impl LoadedModel {
    /// Allocates the caches that a pass needs, of `n_slots` slots each: those of the target's
    /// layers, then those of the MTP layers that were loaded.
    ///
    /// # Errors
    ///
    /// [`TchError`] if memory is short.
    pub fn new_caches(
        &self,
        n_slots: i64,
        index_dtype: IndexCacheDtype,
        init: KvInit,
    ) -> Result<Vec<LayerCache>, TchError> {
        let kind = self.dtype.kind();
        let kv_shape = match &self.config.attention {
            AttentionConfig::Mla(mla) => vec![mla.cache_width()],
            AttentionConfig::Gqa(gqa) => vec![gqa.num_kv_heads, 2, gqa.head_dim],
        };
        let layers = (0..self.num_cache_layers()).map(|layer_idx| {
            let dsa = self.config.dsa.as_ref().filter(|_| self.config.has_indexer(layer_idx));
            let index = dsa.map(|dsa| index_dtype.format(dsa, kind));
            Ok(LayerCache {
                kv: cache(n_slots, (kind, &kv_shape), self.device, init)?,
                index: index
                    .map(|(kind, width)| cache(n_slots, (kind, &[width]), self.device, init))
                    .transpose()?,
            })
        });
        layers.collect()
    }
}

fn cache(
    n_slots: i64,
    (kind, slot): (Kind, &[usize]),
    device: Device,
    init: KvInit,
) -> Result<Tensor, TchError> {
    let shape: Vec<i64> = slot.iter().map(|&n| n as i64).collect();
    let (shape, options) = ([&[n_slots], &shape[..]].concat(), (kind, device));
    match (init, kind) {
        (KvInit::Zero, _) => Tensor::f_zeros(shape, options),
        // The code of NaN in e4m3.
        (KvInit::Nan, Kind::Uint8) => Tensor::f_full(shape, 0x7f, options),
        (KvInit::Nan, _) => Tensor::f_full(shape, f64::NAN, options),
    }
}

//! The caches of all layers.

use models::LayerCache;

/// The caches of each layer, the MTP layers last. All share block tables, so that a block's slots
/// are the same in each.
#[derive(Debug)]
pub(crate) struct KvCache {
    layers: Vec<LayerCache>,
}

impl KvCache {
    pub(crate) fn new(layers: Vec<LayerCache>) -> Self {
        Self { layers }
    }

    /// The caches, target layers first.
    pub(crate) fn layers(&self) -> &[LayerCache] {
        &self.layers
    }

    /// Bytes of all caches.
    pub(crate) fn n_bytes(&self) -> usize {
        let tensors = self.layers.iter().flat_map(LayerCache::tensors);
        tensors.map(|cache| cache.numel() * cache.kind().elt_size_in_bytes()).sum()
    }

    /// Fills `slots` of every cache with NaN.
    #[cfg(test)]
    pub(crate) fn poison(&mut self, slots: &[i64]) {
        let slots = tch::Tensor::from_slice(slots);
        for cache in self.layers.iter().flat_map(LayerCache::tensors) {
            let nan = if cache.kind() == tch::Kind::Uint8 { 127.0 } else { f64::NAN };
            let _ = cache.shallow_clone().index_fill_(0, &slots, nan);
        }
    }
}

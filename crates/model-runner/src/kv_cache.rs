//! The caches of all layers.

use engine_types::BlockCopy;
use models::LayerCache;
use tch::TchError;

/// The caches of each layer, the MTP layers last. All share block tables, so that a block's slots
/// are the same in each.
#[derive(Debug)]
pub(crate) struct KvCache {
    layers: Vec<LayerCache>,
    block_size: u32,
}

impl KvCache {
    pub(crate) fn new(layers: Vec<LayerCache>, block_size: u32) -> Self {
        Self { layers, block_size }
    }

    /// Copies whole blocks in every cache. No block is in two copies.
    pub(crate) fn copy_blocks(&self, copies: &[BlockCopy]) -> Result<(), TchError> {
        let n_slots = i64::from(self.block_size);
        for copy in copies {
            let [from, to] = [copy.from, copy.to].map(|block| i64::from(block.0) * n_slots);
            self.layers.iter().try_for_each(|cache| cache.copy_slots(from, to, n_slots))?;
        }
        Ok(())
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

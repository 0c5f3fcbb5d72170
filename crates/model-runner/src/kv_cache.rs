//! The KV tensors of all layers.

use tch::{Device, Kind, TchError, Tensor};

/// What a fresh cache holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KvInit {
    /// Zeros.
    #[default]
    Zero,
    /// NaN, so that a read of a slot that was not written shows. For tests.
    Nan,
}

/// One latent cache for each layer, the MTP layers last: `[n_slots, cache_width]` each. A slot's
/// row is the latent, then the rotated key. All layers share block tables, so a block's slots are
/// the same in each.
#[derive(Debug)]
pub(crate) struct KvCache {
    layers: Vec<Tensor>,
}

impl KvCache {
    /// Allocates the caches of `n_layers` layers, each of `shape` = `[n_slots, cache_width]`.
    pub(crate) fn new(
        n_layers: usize,
        shape: [i64; 2],
        options: (Kind, Device),
        init: KvInit,
    ) -> Result<Self, TchError> {
        let layer = |_| match init {
            KvInit::Zero => Tensor::f_zeros(shape, options),
            KvInit::Nan => Tensor::f_full(shape, f64::NAN, options),
        };
        Ok(Self { layers: (0..n_layers).map(layer).collect::<Result<_, _>>()? })
    }

    /// The caches, target layers first.
    pub(crate) fn layers(&self) -> &[Tensor] {
        &self.layers
    }

    /// Bytes of all caches.
    pub(crate) fn n_bytes(&self) -> usize {
        self.layers.iter().map(|layer| layer.numel() * layer.kind().elt_size_in_bytes()).sum()
    }

    /// Fills `slots` of every layer with NaN.
    #[cfg(test)]
    pub(crate) fn poison(&mut self, slots: &[i64]) {
        let slots = Tensor::from_slice(slots).to_device(self.layers[0].device());
        for layer in &mut self.layers {
            let _ = layer.index_fill_(0, &slots, f64::NAN);
        }
    }
}

//! Tensors by name, made when they are taken.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use checkpoint_files::Entry;
use model_config::TensorSpec;
use tch::{Device, Kind, Tensor};

use crate::convert::dummy_tensor;
use crate::error::WeightsError;
use crate::packed::{LoadedWeight, PackedSource, dequantize};
use crate::progress::Progress;
use crate::shard::Shard;

/// The tensors of a model by checkpoint name. Each one is read, converted and moved when it is
/// taken, over the threads of the current rayon pool, so that a model that packs its weights never
/// has all of them twice; a shard is unmapped with the last of its tensors. Model code takes each
/// one out, so a tensor that nobody takes is easily found with [`TensorMap::names`].
///
/// How far taking has come is logged every few seconds.
#[derive(Debug)]
pub struct TensorMap {
    sources: HashMap<String, Source>,
    device: Device,
    keeps_packed: bool,
    progress: Progress,
}

/// Where a tensor comes from.
#[derive(Debug)]
pub(crate) enum Source {
    /// It is here already.
    Made(Tensor),
    /// Bytes of a shard, to be converted to a kind.
    Stored(Arc<Shard>, Entry, Kind),
    /// Codes and scales of shards, to be dequantised to a kind.
    Packed(PackedSource, Kind),
    /// Dummy values of a seed in a kind.
    Dummy(TensorSpec, u64, Kind),
}

impl Source {
    /// Bytes that are read or made when it is taken.
    fn n_bytes(&self) -> u64 {
        match self {
            Self::Made(_) => 0,
            Self::Stored(_, entry, _) => entry.bytes.len() as u64,
            Self::Packed(source, _) => source.n_bytes(),
            Self::Dummy(spec, _, kind) => (spec.n_values() * kind.elt_size_in_bytes()) as u64,
        }
    }

    fn make(self, name: &str) -> Result<Tensor, WeightsError> {
        match self {
            Self::Made(tensor) => Ok(tensor),
            Self::Stored(shard, entry, kind) => shard.tensor(name, &entry, kind),
            Self::Packed(source, kind) => dequantize(&source.read(name)?, kind).map_err(|error| {
                let (name, file) = (name.to_owned(), source.codes.0.file.clone());
                WeightsError::Tensor { name, file, source: error }
            }),
            Self::Dummy(spec, seed, kind) => dummy_tensor(&spec, seed, kind)
                .map_err(|source| WeightsError::Dummy { name: name.to_owned(), source }),
        }
    }
}

impl Default for TensorMap {
    fn default() -> Self {
        Self::new(HashMap::new(), Device::Cpu)
    }
}

impl TensorMap {
    pub(crate) fn new(sources: HashMap<String, Source>, device: Device) -> Self {
        let n_total = sources.values().map(Source::n_bytes).sum();
        let progress = Progress::new(n_total, Instant::now());
        Self { sources, device, keeps_packed: false, progress }
    }

    /// Takes a tensor out.
    ///
    /// # Errors
    ///
    /// [`WeightsError::NotLoaded`] if it is not in the map or was already taken;
    /// [`WeightsError::Quantization`] for a scale or an element that is NaN or infinite;
    /// [`WeightsError::Tensor`] or [`WeightsError::Dummy`] if libtorch fails, for example when
    /// memory is short.
    pub fn take(&mut self, name: &str) -> Result<Tensor, WeightsError> {
        let tensor = self.take_optional(name)?;
        tensor.ok_or_else(|| WeightsError::NotLoaded { name: name.to_owned() })
    }

    /// Takes a tensor out, if it is there.
    ///
    /// # Errors
    ///
    /// As [`TensorMap::take`], but for an absent tensor.
    pub fn take_optional(&mut self, name: &str) -> Result<Option<Tensor>, WeightsError> {
        let Some(source) = self.sources.remove(name) else { return Ok(None) };
        let n_bytes = source.n_bytes();
        let tensor = source.make(name)?;
        self.progress.log(n_bytes);
        let on_device = tensor.f_to_device(self.device);
        let no_room = |source| WeightsError::Device { name: name.to_owned(), source };
        on_device.map(Some).map_err(no_room)
    }

    /// Takes a weight out, quantised if it is so in the checkpoint and [`TensorMap::keep_packed`]
    /// was asked for.
    ///
    /// # Errors
    ///
    /// As [`TensorMap::take`].
    pub fn take_weight(&mut self, name: &str) -> Result<LoadedWeight, WeightsError> {
        match self.sources.get(name) {
            Some(Source::Packed(source, _)) if self.keeps_packed => {
                let (matrix, n_bytes) = (source.read(name)?, source.n_bytes());
                self.sources.remove(name);
                self.progress.log(n_bytes);
                Ok(LoadedWeight::Quantized(Arc::new(matrix)))
            }
            _ => self.take(name).map(LoadedWeight::Dense),
        }
    }

    /// Whether [`TensorMap::take_weight`] gives quantised weights as they are in the file.
    #[must_use]
    pub fn keep_packed(self, keeps_packed: bool) -> Self {
        Self { keeps_packed, ..self }
    }

    /// Adds or replaces a tensor.
    pub fn insert(&mut self, name: impl Into<String>, tensor: Tensor) {
        self.sources.insert(name.into(), Source::Made(tensor));
    }

    /// Names of the tensors that were not taken yet, in no order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.sources.keys().map(String::as_str)
    }

    /// How many tensors were not taken yet.
    #[must_use]
    pub fn len(&self) -> usize {
        self.sources.len()
    }

    /// Whether every tensor was taken.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.sources.is_empty()
    }
}

//! From a checkpoint folder to the model that runs it.

use std::path::Path;

use model_config::ModelConfig;
use nn_layers::Ops;
use tch::{Device, Kind};
use torch_ext::LoadingHeap;
use weights::LoadFormat;

use crate::causal_lm::CausalLm;
use crate::decoder::Decoder;
use crate::error::LoadError;
use crate::layer_weights::LayerBuilder;
use crate::mtp::MtpLayers;

/// The dtype of weights, and of activations where plain tensor operations compute.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ComputeDtype {
    /// IEEE single precision.
    #[default]
    Float32,
    /// bfloat16; the fused CPU kernels keep activations in float32.
    Bfloat16,
}

impl ComputeDtype {
    /// As libtorch calls it.
    #[must_use]
    pub fn kind(self) -> Kind {
        match self {
            Self::Float32 => Kind::Float,
            Self::Bfloat16 => Kind::BFloat16,
        }
    }
}

/// How a model is loaded.
#[derive(Clone, Copy, Debug)]
pub struct LoadOptions {
    /// Where it runs.
    pub device: Device,
    /// What it computes in.
    pub dtype: ComputeDtype,
    /// Where its weights are from.
    pub format: LoadFormat,
    /// Load the MTP layers, and refuse a checkpoint whose MTP layers are not complete.
    pub drafting: bool,
    /// Tokens of the longest sequence, if it is to be shorter than the config's.
    pub max_model_len: Option<u32>,
    /// The implementation of layers; `None` is what the device runs best.
    pub ops: Option<Ops>,
}

impl Default for LoadOptions {
    fn default() -> Self {
        Self {
            device: Device::Cpu,
            dtype: ComputeDtype::default(),
            format: LoadFormat::default(),
            drafting: false,
            max_model_len: None,
            ops: None,
        }
    }
}

/// A model in memory.
pub struct LoadedModel {
    /// Its configuration.
    pub config: ModelConfig,
    /// The target model.
    pub target: Box<dyn CausalLm>,
    /// The MTP layers, if drafting was asked for.
    pub mtp: Option<MtpLayers>,
    /// Where it runs.
    pub device: Device,
    /// What it computes in, and the dtype of its caches.
    pub dtype: ComputeDtype,
}

impl LoadedModel {
    /// Layers whose caches a pass needs: the layers of the target, then the MTP layers that were
    /// loaded.
    #[must_use]
    pub fn num_cache_layers(&self) -> usize {
        self.config.num_hidden_layers + self.num_mtp_layers()
    }

    /// MTP layers that were loaded; 0 without drafting.
    #[must_use]
    pub fn num_mtp_layers(&self) -> usize {
        self.mtp.as_ref().map_or(0, MtpLayers::num_layers)
    }
}

/// Loads the checkpoint in `dir`, or its config alone for dummy weights.
///
/// # Errors
///
/// [`LoadError`] if the configuration or the checkpoint is refused, or memory is short. With
/// `drafting`, also if the checkpoint promises no MTP layer or lacks one of their tensors.
pub fn load(dir: &Path, options: LoadOptions) -> Result<LoadedModel, LoadError> {
    let mut config = ModelConfig::load(dir)?;
    let _heap = LoadingHeap::begin();
    let LoadOptions { device, dtype, format, drafting, max_model_len, ops } = options;
    config.limit_len(max_model_len);
    let ops = ops.unwrap_or_else(|| Ops::for_device(device));
    let tensors = weights::load(dir, &config, format, drafting, (device, dtype.kind()))?;
    // Fused layers decode as they compute; plain ones would hold the values.
    let tensors = tensors.keep_packed(ops == Ops::Fused);
    let mut builder = LayerBuilder { config: &config, tensors, ops };
    let target = Decoder::build(&mut builder)?;
    let mtp = drafting.then(|| MtpLayers::build(&mut builder, &target)).transpose()?;
    Ok(LoadedModel { config, target: Box::new(target), mtp, device, dtype })
}

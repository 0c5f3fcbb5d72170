//! What a runner runs: a model with its caches, through libtorch or on a GPU.

use attention_backends::{AttentionBackend, DeviceLayout};
use batch_layout::BatchLayout;
use engine_types::BlockCopy;
use models::{ForwardContext, ForwardOutput, LoadedModel};
use spec_decode::DraftModel;
use tch::Tensor;

use crate::error::StepError;
use crate::gpu::GpuSubject;
use crate::kv_cache::KvCache;

/// A model with its caches.
pub(crate) enum Subject {
    Torch(Box<TorchSubject>),
    Gpu(GpuSubject),
}

/// One in libtorch's tensors.
pub(crate) struct TorchSubject {
    pub(crate) model: LoadedModel,
    pub(crate) backend: Box<dyn AttentionBackend>,
    pub(crate) kv_cache: KvCache,
}

impl Subject {
    /// Copies whole blocks in every cache.
    pub(crate) fn copy_blocks(&self, copies: &[BlockCopy]) -> Result<(), StepError> {
        match self {
            Self::Torch(subject) => Ok(subject.kv_cache.copy_blocks(copies)?),
            Self::Gpu(subject) => subject.copy_blocks(copies),
        }
    }

    /// Runs the target over all rows.
    pub(crate) fn forward(
        &self,
        ids: &[i64],
        layout: &BatchLayout,
    ) -> Result<ForwardOutput, StepError> {
        match self {
            Self::Torch(subject) => subject.forward(ids, layout),
            Self::Gpu(subject) => subject.forward(ids, layout),
        }
    }

    /// Logits of hidden states, f32 `[R, vocab]`.
    pub(crate) fn logits(&self, hidden: &Tensor) -> Result<Tensor, StepError> {
        match self {
            Self::Torch(subject) => Ok(subject.model.target.logits(hidden)?),
            Self::Gpu(subject) => subject.logits(hidden),
        }
    }

    /// The MTP layers over their caches, if there are any.
    pub(crate) fn drafter(&self) -> Option<Box<dyn DraftModel + '_>> {
        match self {
            Self::Torch(subject) => {
                let TorchSubject { model, backend, kv_cache } = &**subject;
                let mtp = model.mtp.as_ref()?;
                Some(Box::new(mtp.bind(kv_cache.layers(), backend.as_ref())))
            }
            Self::Gpu(subject) => subject.drafter(),
        }
    }

    /// Values of ids and rows where this subject wants them.
    pub(crate) fn upload(&self, values: &[i64]) -> Result<Tensor, StepError> {
        let values = Tensor::f_from_slice(values)?;
        match self {
            Self::Torch(subject) => Ok(values.f_to_device(subject.model.device)?),
            Self::Gpu(_) => Ok(values),
        }
    }
}

impl TorchSubject {
    fn forward(&self, ids: &[i64], layout: &BatchLayout) -> Result<ForwardOutput, StepError> {
        let cx = ForwardContext {
            layout: &DeviceLayout::upload(layout, self.model.device),
            caches: self.kv_cache.layers(),
            backend: self.backend.as_ref(),
        };
        let ids = Tensor::f_from_slice(ids)?.f_to_device(self.model.device)?;
        Ok(self.model.target.forward(&ids, &cx)?)
    }
}

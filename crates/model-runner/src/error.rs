//! Why a runner cannot be built.

use std::fmt;

use gpu_model::ModelError;
use gpu_runtime::GpuError;
use sampler::SamplerError;
use spec_decode::SpecDecodeError;
use tch::TchError;
use torch_ext::TensorError;

use crate::gpu_runner::MemoryPlan;

/// An error of [`Runner::new`](crate::Runner::new).
#[derive(Debug)]
#[non_exhaustive]
pub enum RunnerError {
    /// An option is outside its bounds.
    Option {
        /// Which option.
        name: &'static str,
        /// Its value.
        value: u64,
        /// What is allowed.
        limit: String,
    },
    /// Drafts are wanted, but the checkpoint has no MTP layer, or it was loaded without them.
    NoMtpLayers {
        /// The drafts wanted.
        num_speculative_tokens: u32,
    },
    /// Draft steps are to share a selection of keys, and there is none to share.
    IndexShare {
        /// What is missing.
        reason: &'static str,
    },
    /// Index keys are to be stored in a format of their own, and the model has none.
    IndexCacheDtype,
    /// Drafts are to be sampled, and none can be.
    DraftSampling {
        /// Why.
        reason: &'static str,
    },
    /// The schedule of synthetic acceptance is for another number of drafts.
    SyntheticAcceptance {
        /// Drafts that the schedule is for.
        n_places: usize,
        /// Drafts of a step.
        num_speculative_tokens: u32,
    },
    /// The memory for KV does not hold one block.
    NoRoomForKv {
        /// The memory.
        kv_cache_bytes: u64,
        /// What one block needs.
        block_bytes: u64,
    },
    /// The KV pool cannot be allocated.
    KvAllocation {
        /// Blocks of the pool.
        num_blocks: u32,
        /// Bytes of the pool.
        n_bytes: u64,
    },
    /// The drafter cannot be built.
    SpecDecode(SpecDecodeError),
    /// A tensor operation failed, for example an allocation.
    Tensor(TchError),
    /// The model cannot run on the GPU.
    Gpu(ModelError),
    /// The GPU has no room for what is planned.
    GpuMemory(Box<MemoryPlan>),
    /// Something that a GPU does not run.
    NotOnGpu {
        /// What, and what to give instead.
        reason: &'static str,
    },
}

impl fmt::Display for RunnerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Option { name, value, limit } => write!(f, "{name} is {value}; allowed: {limit}"),
            Self::NoMtpLayers { num_speculative_tokens } => write!(
                f,
                "num_speculative_tokens is {num_speculative_tokens}, but the model has no MTP \
                 layer to draft with; use 0"
            ),
            Self::IndexShare { reason } => {
                write!(f, "index_share is on, but {reason}; use auto or off")
            }
            Self::IndexCacheDtype => f.write_str(
                "index_cache_dtype is fp8, but the config has no index_topk: attention is dense \
                 and has no index keys; use auto",
            ),
            Self::DraftSampling { reason } => {
                write!(f, "draft_sampling is sampled, but {reason}; use greedy")
            }
            Self::SyntheticAcceptance { n_places, num_speculative_tokens } => write!(
                f,
                "synthetic_acceptance is a schedule for {n_places} drafts, but \
                 num_speculative_tokens is {num_speculative_tokens}"
            ),
            Self::NoRoomForKv { kv_cache_bytes, block_bytes } => write!(
                f,
                "one KV block needs {block_bytes} bytes, more than the {kv_cache_bytes} allowed \
                 for the KV cache"
            ),
            Self::KvAllocation { num_blocks, n_bytes } => write!(
                f,
                "a KV cache of {num_blocks} blocks needs {n_bytes} bytes, which cannot be \
                 allocated; lower num_blocks"
            ),
            Self::SpecDecode(error) => error.fmt(f),
            Self::Tensor(error) => write!(f, "the runner's tensors: {error}"),
            Self::Gpu(error) => error.fmt(f),
            Self::GpuMemory(plan) => write!(
                f,
                "{}; raise gpu_memory_utilization, or lower max_num_seqs, \
                 max_num_batched_tokens, max_model_len or num_blocks",
                plan.shortage()
            ),
            Self::NotOnGpu { reason } => write!(f, "a GPU does not run {reason}"),
        }
    }
}

impl std::error::Error for RunnerError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::SpecDecode(error) => error.source(),
            Self::Tensor(error) => Some(error),
            Self::Gpu(error) => Some(error),
            _ => None,
        }
    }
}

impl From<SpecDecodeError> for RunnerError {
    fn from(error: SpecDecodeError) -> Self {
        Self::SpecDecode(error)
    }
}

impl From<TchError> for RunnerError {
    fn from(error: TchError) -> Self {
        Self::Tensor(error)
    }
}

impl From<ModelError> for RunnerError {
    fn from(error: ModelError) -> Self {
        Self::Gpu(error)
    }
}

/// Why a step failed. Only its text leaves the runner.
#[derive(Debug)]
pub(crate) enum StepError {
    Target(TensorError),
    Sampler(SamplerError),
    SpecDecode(SpecDecodeError),
    Tensor(TchError),
    Gpu(GpuError),
}

impl fmt::Display for StepError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Target(error) => write!(f, "the target's forward pass: {error}"),
            Self::Sampler(error) => write!(f, "the target's choice of tokens: {error}"),
            Self::SpecDecode(error) => write!(f, "drafting: {error}"),
            Self::Tensor(error) => write!(f, "a tensor operation failed: {error}"),
            Self::Gpu(error) => write!(f, "the GPU: {error}"),
        }
    }
}

impl From<GpuError> for StepError {
    fn from(error: GpuError) -> Self {
        Self::Gpu(error)
    }
}

impl From<TensorError> for StepError {
    fn from(error: TensorError) -> Self {
        Self::Target(error)
    }
}

impl From<SamplerError> for StepError {
    fn from(error: SamplerError) -> Self {
        Self::Sampler(error)
    }
}

impl From<SpecDecodeError> for StepError {
    fn from(error: SpecDecodeError) -> Self {
        Self::SpecDecode(error)
    }
}

impl From<TchError> for StepError {
    fn from(error: TchError) -> Self {
        Self::Tensor(error)
    }
}

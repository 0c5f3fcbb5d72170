//! What a model needs of a device's memory, reckoned before anything of it is there.

use gpu_kernels::{Indexer, Sampling, SlotRecord};
use model_config::{LoadDtype, ModelConfig, MoeConfig, TensorRole, TensorSpec};

use crate::decode::State;
use crate::device::{INDEX_SCRATCH_BYTES, PassLimits, mla_sizes, splits};
use crate::expansion::Expansion;
use crate::loader::Element;
use crate::sizes::Sizes;

/// Bytes that a model takes on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryNeeds {
    /// Weights as they lie there.
    pub weights: u64,
    /// What passes and decode steps work in.
    pub workspace: u64,
}

/// 32-bit words and elements of the model's type.
#[derive(Clone, Copy, Default)]
struct Lens {
    words: usize,
    elements: usize,
}

impl MemoryNeeds {
    /// Of a model of `tensors` in elements `E`: the sums of what
    /// [`GpuModel::load`](crate::GpuModel::load) and
    /// [`GpuModel::prepare_decode`](crate::GpuModel::prepare_decode) allocate.
    #[must_use]
    pub fn of<E: Element>(
        config: &ModelConfig,
        tensors: &[TensorSpec],
        limits: &PassLimits,
    ) -> Self {
        let element = size_of::<E>();
        let weight = |spec: &TensorSpec| {
            let is_float =
                spec.role() != TensorRole::Matrix || spec.load_dtype == LoadDtype::Float32;
            spec.n_values() * if is_float { 4 } else { element }
        };
        let sizes = Sizes::of(config);
        let moe = config.moe.as_ref();
        let parts = [
            pass(&sizes, moe, limits.most_rows()),
            pass(&sizes, moe, limits.max_seqs),
            between_passes(&sizes, limits),
            scratch::<E>(config, &sizes, limits),
            decoder(&sizes, limits),
        ];
        let workspace = parts.iter().map(|lens| lens.words * 4 + lens.elements * element);
        Self {
            weights: tensors.iter().map(weight).sum::<usize>() as u64,
            workspace: workspace.sum::<usize>() as u64,
        }
    }
}

/// A `Workspace`.
fn pass(sizes: &Sizes, moe: Option<&MoeConfig>, n_rows: usize) -> Lens {
    let Sizes { hidden, n_heads, .. } = *sizes;
    let heads = n_heads * (sizes.qk() + 2 * sizes.kv_rank + sizes.rope + sizes.v);
    let index = sizes.index_heads * sizes.index_dim;
    let per_row = 4 * hidden + sizes.q + heads + 3 * sizes.inner + index + sizes.qkv(true);
    let mut lens = Lens {
        words: n_rows * (hidden + sizes.index_heads + sizes.topk + 1),
        elements: n_rows * per_row + sizes.qkv(true),
    };
    if let Some(moe) = moe {
        let n_pairs = n_rows * sizes.moe_topk;
        lens.words += n_pairs * (2 + 5) + n_rows * (moe.n_routed_experts + 1);
        lens.elements += n_pairs * (moe.moe_intermediate_size + hidden);
    }
    lens
}

/// What `Work` has beside its workspaces.
fn between_passes(sizes: &Sizes, limits: &PassLimits) -> Lens {
    let PassLimits { max_seqs, max_window, .. } = *limits;
    let (n_rows, tables) = (limits.most_rows(), max_seqs * limits.table_stride());
    Lens {
        words: row_arrays(n_rows, max_seqs)
            + tables
            + 2 * max_seqs
            + n_rows
            + max_seqs * max_window * sizes.vocab,
        elements: 3 * n_rows * sizes.hidden,
    }
}

/// Scratch and tables of a `Device`.
fn scratch<E: Element>(config: &ModelConfig, sizes: &Sizes, limits: &PassLimits) -> Lens {
    let len = limits.max_len.max(sizes.topk);
    let mla = splits(limits).scratch_len(mla_sizes(config), limits.max_seqs, len);
    let scores = Indexer::<E>::scratch_len(limits.max_rows, limits.max_len);
    let index = if config.dsa.is_some() { scores.min(INDEX_SCRATCH_BYTES / 4) } else { 0 };
    Lens {
        words: mla + index + config.max_position_embeddings * sizes.rope,
        elements: Expansion::<E>::n_elements(config, limits),
    }
}

/// A `Decoder`.
fn decoder(sizes: &Sizes, limits: &PassLimits) -> Lens {
    let PassLimits { max_seqs: n, max_window: width, .. } = *limits;
    let slots = n * (SlotRecord::len(width) + width + 8) + 2 * State::len(n, width);
    let rows = row_arrays(n * width, n) + row_arrays(n, n);
    let argmax = 2 * Sampling::scratch_len(n * width, sizes.vocab);
    Lens { words: slots + rows + argmax + 2 * n * limits.table_stride(), elements: 0 }
}

/// `RowArrays`.
fn row_arrays(n_rows: usize, n_seqs: usize) -> usize {
    4 * n_rows + 2 * n_seqs + 1
}

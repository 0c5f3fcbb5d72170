//! What queues a model's launches: one stream, the kernels for its sizes, the BLAS library.

use std::cell::RefCell;

use gpu_kernels::{Begin, IndexSizes, Indexer, Kernels, Mla, MlaSizes, Sampling, Splits, Step};
use gpu_runtime::{Blas, Buffer, Gpu, Stream};
use model_config::{ModelConfig, MoeConfig};
use nn_layers::RotaryTable;

use crate::error::ModelError;
use crate::expansion::Expansion;
use crate::layer::Rope;
use crate::loader::{Element, Loader};
use crate::sizes::{Sizes, latent};

/// How the keys of a sequence are divided; part of what results are made of.
const SPLIT_KEYS: usize = 256;
/// The most parts.
const SPLITS_MAX: usize = 32;
/// The most bytes that the scores of indexers take; longer passes are scored in turns.
pub(crate) const INDEX_SCRATCH_BYTES: usize = 512 << 20;

/// Stream, kernels and scratch.
pub(crate) struct Device<E> {
    pub(crate) gpu: Gpu,
    pub(crate) stream: Stream,
    pub(crate) blas: Blas,
    pub(crate) kernels: Kernels<E>,
    pub(crate) mla: Mla<E>,
    pub(crate) expansion: Option<Expansion<E>>,
    pub(crate) indexer: Option<Indexer<E>>,
    pub(crate) sampling: Sampling,
    pub(crate) step: Step,
    pub(crate) begin: Begin,
    pub(crate) rope: Rope,
    pub(crate) sizes: Sizes,
    pub(crate) moe: Option<MoeConfig>,
    pub(crate) norm_eps: f32,
    pub(crate) mla_scratch: RefCell<Buffer<f32>>,
    pub(crate) index_scratch: RefCell<Buffer<f32>>,
}

/// Bounds of all passes.
#[derive(Clone, Copy, Debug)]
pub struct PassLimits {
    /// Rows of a pass.
    pub max_rows: usize,
    /// Sequences of a pass.
    pub max_seqs: usize,
    /// Tokens of a sequence.
    pub max_len: usize,
    /// Rows of a sequence in a decode step: one more than drafts.
    pub max_window: usize,
    /// Tokens of a KV block.
    pub block_size: usize,
    /// KV blocks.
    pub num_blocks: usize,
}

impl PassLimits {
    /// Rows of the largest pass.
    pub(crate) fn most_rows(&self) -> usize {
        self.max_rows.max(self.max_seqs * self.max_window)
    }

    /// Entries of a block table, a multiple of 4.
    pub(crate) fn table_stride(&self) -> usize {
        self.max_len.div_ceil(self.block_size).next_multiple_of(4)
    }
}

impl<E: Element> Device<E> {
    pub(crate) fn new(
        gpu: &Gpu,
        stream: &Stream,
        loader: &Loader<'_>,
        limits: &PassLimits,
    ) -> Result<Self, ModelError> {
        let config: &ModelConfig = loader.config;
        let sizes = Sizes::of(config);
        let mla = Mla::new(gpu, mla_sizes(config), splits(limits))?;
        let index_sizes =
            IndexSizes { n_heads: sizes.index_heads, head_dim: sizes.index_dim, topk: sizes.topk };
        let has_indexer = config.dsa.is_some();
        let expansion = Expansion::new(gpu, config, limits)?;
        let scores = Indexer::<E>::scratch_len(limits.max_rows, limits.max_len);
        let n_scores = if has_indexer { scores.min(INDEX_SCRATCH_BYTES / 4) } else { 0 };
        let scratch = mla.scratch_len(limits.max_seqs, limits.max_len.max(sizes.topk));
        Ok(Self {
            gpu: gpu.clone(),
            stream: stream.clone(),
            blas: Blas::new(gpu, stream)?,
            kernels: Kernels::new(gpu, stream)?,
            indexer: if has_indexer { Some(Indexer::new(gpu, index_sizes)?) } else { None },
            sampling: Sampling::new::<E>(gpu)?,
            step: Step::new::<E>(gpu)?,
            begin: Begin::new::<E>(gpu)?,
            rope: rope(loader)?,
            moe: config.moe.clone(),
            norm_eps: config.rms_norm_eps as f32,
            mla_scratch: RefCell::new(gpu.alloc(scratch)?),
            index_scratch: RefCell::new(gpu.alloc(n_scores)?),
            mla,
            expansion,
            sizes,
        })
    }
}

pub(crate) fn mla_sizes(config: &ModelConfig) -> MlaSizes {
    let mla = latent(config);
    MlaSizes {
        n_heads: mla.num_heads,
        kv_lora_rank: mla.kv_lora_rank,
        rope_dim: mla.qk_rope_head_dim,
        scale: config.softmax_scale() as f32,
    }
}

pub(crate) fn splits(limits: &PassLimits) -> Splits {
    Splits { window: limits.max_window, keys: SPLIT_KEYS, most: SPLITS_MAX }
}

fn rope(loader: &Loader<'_>) -> Result<Rope, ModelError> {
    let config = loader.config;
    let dim = config.attention.rope_dim();
    let n_positions = config.max_position_embeddings;
    let table = RotaryTable::new(&config.rope, dim, n_positions, tch::Device::Cpu)?;
    let (cos, sin) = table.cos_sin();
    let upload = |tensor: &tch::Tensor| loader.upload::<f32>(&[tensor.contiguous()]);
    Ok(Rope {
        cos: upload(cos)?,
        sin: upload(sin)?,
        dim,
        interleaved: config.rope.interleaved,
        index_interleaved: config.dsa.as_ref().is_some_and(|dsa| dsa.rope_interleaved),
    })
}

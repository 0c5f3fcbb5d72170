//! What the checks and the timings of the layer kernels share: sizes, elements, the device.

use anyhow::{Context as _, Result};
use gpu_kernels::{Heads, Kernels};
use gpu_runtime::{Buffer, DeviceChoice, GemmElement, Gpu, Pod, Stream};
use half::bf16;
use model_config::{ExpertChoice, MoeConfig, RouterScoring};
use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

/// The sizes of a checkpoint's layers, as its config names them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    pub(crate) name: &'static str,
    pub(crate) hidden: usize,
    pub(crate) vocab: usize,
    /// `None`: queries have no latent.
    pub(crate) q_lora_rank: Option<usize>,
    pub(crate) kv_lora_rank: usize,
    pub(crate) rope_dim: usize,
    pub(crate) nope_dim: usize,
    pub(crate) n_heads: usize,
    /// Heads and width of an indexer; no config without one has other kernels.
    pub(crate) indexer: (usize, usize),
    pub(crate) n_experts: usize,
    pub(crate) top_k: usize,
    pub(crate) groups: (usize, usize),
    pub(crate) inner: usize,
    /// Inner width of the shared experts.
    pub(crate) shared_inner: usize,
}

pub(crate) const GLM52_LITE: Sizes = Sizes {
    name: "glm52-lite",
    hidden: 2048,
    vocab: 32_768,
    q_lora_rank: Some(1024),
    kv_lora_rank: 512,
    rope_dim: 64,
    nope_dim: 192,
    n_heads: 16,
    indexer: (32, 128),
    n_experts: 64,
    top_k: 8,
    groups: (1, 1),
    inner: 768,
    shared_inner: 768,
};
pub(crate) const DSV3_LITE: Sizes = Sizes {
    name: "dsv3-lite",
    q_lora_rank: None,
    nope_dim: 128,
    top_k: 6,
    inner: 1408,
    shared_inner: 2816,
    ..GLM52_LITE
};
impl Sizes {
    /// Width of the query part of the first projection.
    pub(crate) fn q_width(&self) -> usize {
        self.q_lora_rank.unwrap_or(self.n_heads * (self.nope_dim + self.rope_dim))
    }

    /// Heads of attention, rotated at their ends.
    pub(crate) fn query_heads(&self) -> Heads {
        let head_stride = self.nope_dim + self.rope_dim;
        let row_stride = self.n_heads * head_stride;
        Heads { n_heads: self.n_heads, start: self.nope_dim, row_stride, head_stride }
    }

    /// Heads of an indexer, rotated at their beginnings.
    pub(crate) fn index_heads(&self) -> Heads {
        let (n_heads, head_stride) = self.indexer;
        Heads { n_heads, start: 0, row_stride: n_heads * head_stride, head_stride }
    }

    pub(crate) fn moe(&self) -> MoeConfig {
        MoeConfig {
            n_routed_experts: self.n_experts,
            num_experts_per_tok: self.top_k,
            n_shared_experts: self.shared_inner / self.inner,
            moe_intermediate_size: self.inner,
            n_group: self.groups.0,
            topk_group: self.groups.1,
            routed_scaling_factor: 2.5,
            norm_topk_prob: true,
            scoring: RouterScoring::Sigmoid,
            choice: ExpertChoice::NoauxTc,
            first_k_dense_replace: 1,
            moe_layer_freq: 1,
        }
    }
}

/// An element type, made of float32.
pub(crate) trait Element: GemmElement {
    fn of(value: f32) -> Self;
}

impl Element for f32 {
    fn of(value: f32) -> Self {
        value
    }
}

impl Element for bf16 {
    fn of(value: f32) -> Self {
        Self::from_f32(value)
    }
}

/// A device with the kernels of one element type.
pub(crate) struct Device<E> {
    pub(crate) gpu: Gpu,
    pub(crate) stream: Stream,
    pub(crate) kernels: Kernels<E>,
}

impl<E: Element> Device<E> {
    pub(crate) fn open() -> Result<Self> {
        let gpu = Gpu::open(&DeviceChoice::Auto)?.context("there is no GPU")?;
        let stream = gpu.stream()?;
        let kernels = Kernels::new(&gpu, &stream)?;
        Ok(Self { gpu, stream, kernels })
    }

    pub(crate) fn upload<T: Pod>(&self, values: &[T]) -> Result<Buffer<T>> {
        let mut buffer = self.gpu.alloc(values.len())?;
        self.stream.upload(values, &mut buffer)?;
        Ok(buffer)
    }
}

/// Uniform in `-scale..scale`, rounded to `E`.
pub(crate) fn noise<E: Element>(seed: u64, n: usize, scale: f32) -> Vec<E> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    (0..n).map(|_| E::of((rng.random::<f32>() * 2.0 - 1.0) * scale)).collect()
}

//! Attention of prompt chunks over keys and values that are expanded from latents.
//!
//! What a row attends depends on its own sequence: on how many rows the pass has of it, which is
//! where the scheduler cuts the prompt, and on its length.

use std::cell::RefCell;

use batch_layout::BatchLayout;
use gpu_kernels::{KeyGroup, PromptAttention, PromptBatch, PromptSizes};
use gpu_runtime::{Buffer, DType, Gemm, Gpu, GpuError, Matrix, MatrixMut, View, WeightLayout};
use model_config::ModelConfig;

use crate::device::{Device, PassLimits, mla_sizes};
use crate::layer::LayerCache;
use crate::loader::Element;
use crate::pass::Pass;
use crate::sizes::Sizes;
use crate::workspace::{Workspace, query_heads};

/// Keys that are expanded at once. Chunks of longer sequences attend latents, whatever else is in
/// their pass.
const MAX_KEYS: usize = 16_384;

/// The kernels, and what they work in.
pub(crate) struct Expansion<E> {
    attention: PromptAttention<E>,
    /// Gathered rows of a cache, `[max_keys, cache]`.
    latents: RefCell<Buffer<E>>,
    /// `[max_keys, n_heads, nope + v]`.
    expanded: RefCell<Buffer<E>>,
    max_keys: usize,
}

impl<E: Element> Expansion<E> {
    /// `None` where the model selects keys, or the device has no kernels for it.
    pub(crate) fn new(
        gpu: &Gpu,
        config: &ModelConfig,
        limits: &PassLimits,
    ) -> Result<Option<Self>, GpuError> {
        let (sizes, max_keys) = (Sizes::of(config), max_keys::<E>(config, limits));
        if max_keys == 0 {
            return Ok(None);
        }
        let Some(attention) = PromptAttention::new(gpu, prompt_sizes(config))? else {
            return Ok(None);
        };
        Ok(Some(Self {
            attention,
            latents: RefCell::new(gpu.alloc(max_keys * sizes.cache())?),
            expanded: RefCell::new(gpu.alloc(max_keys * sizes.expanded())?),
            max_keys,
        }))
    }

    /// Elements of what it works in, where the device has the kernels.
    pub(crate) fn n_elements(config: &ModelConfig, limits: &PassLimits) -> usize {
        let sizes = Sizes::of(config);
        max_keys::<E>(config, limits) * (sizes.cache() + sizes.expanded())
    }
}

fn prompt_sizes(config: &ModelConfig) -> PromptSizes {
    let (mla, sizes) = (mla_sizes(config), Sizes::of(config));
    PromptSizes {
        n_heads: sizes.n_heads,
        nope_dim: sizes.nope,
        rope_dim: sizes.rope,
        v_dim: sizes.v,
        scale: mla.scale,
    }
}

/// The most keys of a group; 0 where no device has the kernels.
fn max_keys<E: Element>(config: &ModelConfig, limits: &PassLimits) -> usize {
    let has_kernels =
        config.dsa.is_none() && E::DTYPE == DType::Bf16 && prompt_sizes(config).is_supported();
    if has_kernels { MAX_KEYS.min(limits.max_seqs * limits.max_len) } else { 0 }
}

/// Sequences of a pass whose rows are chunks, in groups whose keys are expanded at once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Chunks {
    /// Each sequence's group, -1 for sequences that are no chunk; then where its keys begin in
    /// those of its group. `[2, n_seqs]`.
    pub(crate) places: Vec<i32>,
    /// Keys of each group.
    pub(crate) n_keys: Vec<usize>,
    /// Whether every sequence is a chunk.
    pub(crate) is_whole_pass: bool,
}

impl Chunks {
    /// The sequences of more than `max_window` rows and at most `max_keys` keys.
    pub(crate) fn of_layout(layout: &BatchLayout, max_window: usize, max_keys: usize) -> Self {
        let n_seqs = layout.n_seqs();
        let mut chunks =
            Self { places: vec![-1; 2 * n_seqs], is_whole_pass: true, ..Self::default() };
        for (seq, ends) in layout.cu_seqlens_q().windows(2).enumerate() {
            let (n_rows, n_keys) = ((ends[1] - ends[0]) as usize, layout.kv_lens()[seq] as usize);
            if n_rows <= max_window || n_keys > max_keys {
                chunks.is_whole_pass = false;
                continue;
            }
            if chunks.n_keys.last().is_none_or(|&last| last + n_keys > max_keys) {
                chunks.n_keys.push(0);
            }
            let group = chunks.n_keys.len() - 1;
            chunks.places[seq] = group as i32;
            chunks.places[n_seqs + seq] = chunks.n_keys[group] as i32;
            chunks.n_keys[group] += n_keys;
        }
        chunks
    }
}

/// [`Chunks`] on the device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ChunkViews<'a> {
    /// Not negative for sequences that are chunks.
    pub(crate) group_of: View<'a, i32>,
    first_key: View<'a, i32>,
    n_keys: &'a [usize],
    pub(crate) is_whole_pass: bool,
}

impl<'a> ChunkViews<'a> {
    /// `None` where no sequence is a chunk.
    pub(crate) fn new(chunks: &'a Chunks, places: &'a Buffer<i32>) -> Option<Self> {
        let Chunks { n_keys, is_whole_pass, .. } = chunks;
        let n_seqs = chunks.places.len() / 2;
        let views = Self {
            group_of: places.slice(..n_seqs),
            first_key: places.slice(n_seqs..2 * n_seqs),
            n_keys,
            is_whole_pass: *is_whole_pass,
        };
        (!n_keys.is_empty()).then_some(views)
    }
}

impl<E: Element> Device<E> {
    /// The chunks of a pass for which keys are expanded, if any are.
    pub(crate) fn chunks_of(&self, layout: &BatchLayout, max_window: usize) -> Chunks {
        let Some(expansion) = &self.expansion else { return Chunks::default() };
        Chunks::of_layout(layout, max_window, expansion.max_keys)
    }

    /// The values that the rows of chunks attend, in `ws.values`. Queries are `q`, whose rows are
    /// `q_stride` apart, and `ws.q_pe`; `kv_b` is `[n_heads, nope + v, kv_rank]`.
    pub(crate) fn attend_chunks(
        &self,
        pass: &Pass<'_>,
        chunks: ChunkViews<'_>,
        kv_b: &Buffer<E>,
        cache: &LayerCache<E>,
        ws: &mut Workspace<E>,
    ) -> Result<(), GpuError> {
        let expansion = self.expansion.as_ref().expect("chunks are of a device with the kernels");
        let sizes = &self.sizes;
        let (width, cache_width) = (sizes.expanded(), sizes.cache());
        let (mut latents, mut expanded) =
            (expansion.latents.borrow_mut(), expansion.expanded.borrow_mut());
        for (group, &n_keys) in chunks.n_keys.iter().enumerate() {
            let ChunkViews { group_of, first_key, .. } = chunks;
            let group = KeyGroup { group_of, group: group as i32, first_key };
            expansion.attention.gather_keys(
                &self.stream,
                (pass.paged, group),
                (cache.latent.view(), cache_width),
                pass.bounds.max_kv_len,
                latents.slice_mut(..n_keys * cache_width),
            )?;
            self.blas.gemm(&Gemm {
                n_rows: n_keys,
                n_out: width,
                n_in: sizes.kv_rank,
                n_batches: 1,
                x: Matrix::new(&*latents, cache_width, 0),
                w: Matrix::new(kv_b, sizes.kv_rank, 0),
                layout: WeightLayout::OutIn,
                out: MatrixMut::new(&mut *expanded, width, 0),
                alpha: 1.0,
                beta: 0.0,
            })?;
            let (q, q_stride) = query_heads(sizes, (&ws.q, &ws.qkv), false);
            let batch = PromptBatch {
                q,
                q_stride,
                q_pe: ws.q_pe.view(),
                expanded: expanded.slice(..n_keys * width),
                k_pe: latents.slice(sizes.kv_rank..n_keys * cache_width),
                k_pe_stride: cache_width,
                group,
                rows: pass.paged,
            };
            expansion.attention.attend(&self.stream, &batch, ws.values.view_mut())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use batch_layout::SeqSpec;

    use super::*;

    #[test]
    fn chunks_fill_groups_and_windows_and_long_sequences_stay_out() {
        let mut layout = BatchLayout::new(4);
        let mut push = |n_computed: u32, n_query: u32| {
            let blocks: Vec<u32> = (0..(n_computed + n_query).div_ceil(4)).collect();
            layout.push(SeqSpec { n_computed, n_query }, &blocks);
        };
        // A chunk, a window, a sequence that is too long, then two that do not fit with the first.
        push(0, 8);
        push(5, 2);
        push(60, 8);
        push(30, 10);
        push(10, 10);
        layout.finish();
        let chunks = Chunks::of_layout(&layout, 2, 64);
        assert_eq!(chunks.n_keys, [48, 20]);
        assert!(!chunks.is_whole_pass);
        assert_eq!(chunks.places, [0, -1, -1, 0, 1, 0, -1, -1, 8, 0]);
    }
}

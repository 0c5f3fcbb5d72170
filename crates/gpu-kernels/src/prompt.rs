//! Attention of prompt chunks over expanded keys and values.

use std::marker::PhantomData;

use gpu_runtime::{Args, GemmElement, Gpu, GpuError, Kernel, Launch, Stream, View, ViewMut};

use crate::attention::{PagedRows, as_i32, as_u32, has_hopper_unit};
use crate::unit;

/// Rows of a tile, and keys of one.
const TILE: usize = 128;
/// Keys that a block gathers.
const GATHERED: usize = 32;

/// Sizes of a latent attention layer whose keys and values are expanded.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PromptSizes {
    /// Query heads.
    pub n_heads: usize,
    /// Width of a head's keys without the rotary part.
    pub nope_dim: usize,
    /// Width of the rotary part.
    pub rope_dim: usize,
    /// Width of a head's values.
    pub v_dim: usize,
    /// Factor of the scores.
    pub scale: f32,
}

impl PromptSizes {
    /// Whether there is a kernel for these sizes: 128 values a head, and key parts of multiples of
    /// 64.
    #[must_use]
    pub fn is_supported(&self) -> bool {
        let is_slab = |dim: usize| dim > 0 && dim.is_multiple_of(64);
        self.v_dim == 128 && is_slab(self.nope_dim) && is_slab(self.rope_dim)
    }
}

/// The queries of a pass, and the keys and values of some of its sequences.
#[derive(Clone, Copy, Debug)]
pub struct PromptBatch<'a, E> {
    /// Queries, `[n_rows, q_stride]`, of each head `nope_dim + rope_dim` values, of which the last
    /// `rope_dim` are not read.
    pub q: View<'a, E>,
    /// Values from a row of `q` to the next.
    pub q_stride: usize,
    /// Rotary queries, `[n_rows, n_heads, rope_dim]`.
    pub q_pe: View<'a, E>,
    /// Keys and values, `[n_keys, n_heads, nope_dim + v_dim]`.
    pub expanded: View<'a, E>,
    /// Rotary keys, `[n_keys, k_pe_stride]`, of which `rope_dim` values are read.
    pub k_pe: View<'a, E>,
    /// Values from a row of `k_pe` to the next.
    pub k_pe_stride: usize,
    /// Which sequences have their keys there; the rows of others are not written.
    pub group: KeyGroup<'a>,
    /// The rows.
    pub rows: PagedRows<'a>,
}

/// Sequences whose keys are expanded together.
#[derive(Clone, Copy, Debug)]
pub struct KeyGroup<'a> {
    /// The group of each sequence, `[n_seqs]`; a negative number for none.
    pub group_of: View<'a, i32>,
    /// This group.
    pub group: i32,
    /// Where each sequence's position 0 is among the keys of its group, `[n_seqs]`.
    pub first_key: View<'a, i32>,
}

impl<'a> KeyGroup<'a> {
    fn push(&self, n_seqs: usize, args: &mut Args<'a>) {
        assert_eq!(self.first_key.len(), n_seqs, "first_key is [n_seqs]");
        assert_eq!(self.group_of.len(), n_seqs, "group_of is [n_seqs]");
        args.view(self.first_key).view(self.group_of).i32(self.group);
    }
}

/// `out[t, h] = sum_p softmax_p(scale * (q_nope[t, h] . k_nope_p[h] + q_pe[t, h] . k_pe_p)) v_p[h]`
/// over the keys `0..=position` of a row's sequence.
///
/// It does for chunks what [`Mla`](crate::Mla) does over latents, with `nope_dim + rope_dim +
/// v_dim` products for each head, row and key in place of `2 * kv_lora_rank + rope_dim`.
#[derive(Debug)]
pub struct PromptAttention<E> {
    sizes: PromptSizes,
    kernel: Kernel,
    gather: Kernel,
    shared: u32,
    _element: PhantomData<E>,
}

impl<E: GemmElement> PromptAttention<E> {
    /// Compiles the kernels for these sizes; `None` where there are none, as
    /// [`PromptSizes::is_supported`] says, for an element type that is not bf16, and for a device
    /// without Hopper's matrix unit.
    ///
    /// # Errors
    ///
    /// A failure of the compiler or the driver.
    pub fn new(gpu: &Gpu, sizes: PromptSizes) -> Result<Option<Self>, GpuError> {
        let PromptSizes { nope_dim, rope_dim, v_dim, .. } = sizes;
        // Queries, and two stages of keys and values.
        let shared = as_u32(2 * TILE * (nope_dim + rope_dim + 2 * (nope_dim + rope_dim + v_dim)));
        let has_kernel = has_hopper_unit::<E>(gpu)
            && sizes.is_supported()
            && shared + 2048 <= gpu.info().max_shared_per_block;
        if !has_kernel {
            return Ok(None);
        }
        let module = unit::PROMPT.build::<E>(gpu, &[nope_dim, rope_dim, v_dim])?;
        let kernel = module.kernel("prompt_attention")?;
        kernel.allow_shared(shared)?;
        let gather = module.kernel("gather_keys")?;
        Ok(Some(Self { sizes, kernel, gather, shared, _element: PhantomData }))
    }

    /// Copies the rows of a paged cache, `[n_slots, width]`, that belong to sequences of a group,
    /// to `out`, `[n_keys, width]`.
    ///
    /// # Errors
    ///
    /// A failure of the driver.
    ///
    /// # Panics
    ///
    /// If lengths do not match, or `width` is no multiple of 8.
    pub fn gather_keys<'a>(
        &self,
        stream: &Stream,
        (rows, group): (PagedRows<'a>, KeyGroup<'a>),
        (cache, width): (View<'a, E>, usize),
        max_kv_len: usize,
        out: ViewMut<'a, E>,
    ) -> Result<(), GpuError> {
        rows.check();
        assert!(width.is_multiple_of(8) && cache.len().is_multiple_of(width), "rows are aligned");
        let (n_keys, n_slots) = (out.len() / width, cache.len() / width);
        let mut args = Args::new();
        args.view_mut(out).view(cache).view(rows.kv_len);
        group.push(rows.n_seqs(), &mut args);
        rows.push_blocks(&mut args, n_slots);
        args.i32(as_i32(width)).i32(as_i32(n_keys));
        let grid = [as_u32(max_kv_len.div_ceil(GATHERED)), as_u32(rows.n_seqs()), 1];
        // SAFETY: the kernel reads slots that the cache has and writes keys that `out` has.
        unsafe {
            stream.launch(&self.gather, Launch { grid, block: [256, 1, 1], shared: 0 }, &args)
        }
    }

    /// Writes `out`, `[n_rows, n_heads, v_dim]`, for the rows of sequences that have keys. Scores,
    /// softmax and sums are f32; padding is not written.
    ///
    /// # Errors
    ///
    /// A failure of the driver.
    ///
    /// # Panics
    ///
    /// If lengths do not match.
    pub fn attend<'a>(
        &self,
        stream: &Stream,
        batch: &PromptBatch<'a, E>,
        out: ViewMut<'a, E>,
    ) -> Result<(), GpuError> {
        let PromptSizes { n_heads, nope_dim, rope_dim, v_dim, scale } = self.sizes;
        let PromptBatch { q, q_stride, q_pe, expanded, k_pe, k_pe_stride, group, rows } = *batch;
        rows.check();
        let (n_rows, n_seqs) = (rows.n_rows(), rows.n_seqs());
        let n_keys = expanded.len() / (n_heads * (nope_dim + v_dim));
        assert!(q_stride >= n_heads * (nope_dim + rope_dim), "rows of q hold all heads");
        assert!(q.len() + q_stride >= n_rows * q_stride + n_heads * (nope_dim + rope_dim), "q");
        assert!(q_pe.len() >= n_rows * n_heads * rope_dim, "q_pe is [T, H, rope_dim]");
        assert!(k_pe.len() + k_pe_stride >= n_keys * k_pe_stride + rope_dim, "k_pe has the keys");
        assert!([q_stride, k_pe_stride].iter().all(|n| n.is_multiple_of(8)), "rows are aligned");
        assert!(out.len() >= n_rows * n_heads * v_dim, "out is [T, H, v_dim]");
        let mut args = Args::new();
        args.view_mut(out).view(q).view(q_pe).view(expanded).view(k_pe);
        args.view(rows.row_pos).view(rows.row_seq).view(rows.row_start);
        group.push(n_seqs, &mut args);
        for size in [q_stride, k_pe_stride, n_rows, n_seqs, n_heads, n_keys] {
            args.i32(as_i32(size));
        }
        args.f32(scale);
        let launch = Launch {
            grid: [as_u32(n_rows / TILE + n_seqs), as_u32(n_heads), 1],
            block: [256, 1, 1],
            shared: self.shared,
        };
        // SAFETY: the lengths of all arrays were checked; what they hold is checked there.
        unsafe { stream.launch(&self.kernel, launch, &args) }
    }
}

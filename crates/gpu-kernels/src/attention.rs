//! Paged attention over latents, with absorbed projections.

use std::marker::PhantomData;

use gpu_runtime::{
    Api, Args, DType, GemmElement, Gpu, GpuError, Kernel, Launch, Module, Ptr, Stream, View,
    ViewMut,
};

use crate::unit;

/// Where the rows of a pass are, in the sequences and in the caches, on the device.
///
/// The rows of a sequence are neighbours at ascending positions; rows behind them up to the next
/// sequence are padding. What the arrays say is checked on the device: a slot that no table or no
/// cache has is read as zeros, and a row outside of the pass is left out.
#[derive(Clone, Copy, Debug)]
pub struct PagedRows<'a> {
    /// Position of each row, `[n_rows]`.
    pub row_pos: View<'a, i32>,
    /// Sequence of each row, `[n_rows]`; -1 for padding, which is not computed and not written.
    pub row_seq: View<'a, i32>,
    /// First row of each sequence, and the end of the last one, `[n_seqs + 1]`.
    pub row_start: View<'a, i32>,
    /// Tokens of each sequence with KV, this pass' rows included, `[n_seqs]`.
    pub kv_len: View<'a, i32>,
    /// Block ids of each sequence, `[n_seqs, stride]`.
    pub block_tables: View<'a, i32>,
    /// Tokens of a block.
    pub block_size: usize,
}

impl<'a> PagedRows<'a> {
    /// Rows of the pass.
    #[must_use]
    pub fn n_rows(&self) -> usize {
        self.row_pos.len()
    }

    /// Sequences of the pass.
    #[must_use]
    pub fn n_seqs(&self) -> usize {
        self.kv_len.len()
    }

    pub(crate) fn check(&self) {
        let (n_rows, n_seqs) = (self.n_rows(), self.n_seqs());
        assert!(n_rows > 0 && n_seqs > 0 && self.block_size > 0, "the pass is not empty");
        assert_eq!(self.row_seq.len(), n_rows, "row_seq is [n_rows]");
        assert_eq!(self.row_start.len(), n_seqs + 1, "row_start is [n_seqs + 1]");
        assert!(self.block_tables.len().is_multiple_of(n_seqs), "tables are [n_seqs, stride]");
    }

    /// Pushes the block tables of a cache of `n_slots`.
    pub(crate) fn push_blocks(&self, args: &mut Args<'a>, n_slots: usize) {
        args.view(self.block_tables);
        self.push_block_sizes(args, n_slots);
    }

    fn push_block_sizes(&self, args: &mut Args<'a>, n_slots: usize) {
        args.i32(as_i32(self.block_tables.len() / self.n_seqs()));
        args.i32(as_i32(self.block_size)).i32(as_i32(n_slots));
    }
}

/// The keys that each row attends: ascending positions, `[n_rows, topk]`, and how many there are,
/// `[n_rows]`.
#[derive(Clone, Copy, Debug)]
pub struct SelectedKeys<'a> {
    /// Positions, ascending.
    pub indices: View<'a, i32>,
    /// How many positions of each row count.
    pub counts: View<'a, i32>,
}

/// Sizes of a latent attention layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MlaSizes {
    /// Query heads.
    pub n_heads: usize,
    /// Width of a latent row without its rotary part, a multiple of 8 up to 512.
    pub kv_lora_rank: usize,
    /// Width of the rotary part, a multiple of 8.
    pub rope_dim: usize,
    /// Factor of the scores.
    pub scale: f32,
}

/// How the keys of a sequence are divided among blocks. Part of what a result is made of, so an
/// engine has one, whatever its batches are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Splits {
    /// The most rows of a sequence whose keys are divided; the rows of longer chunks are not.
    pub window: usize,
    /// Keys of a part, a multiple of 32; doubled for sequences of which half of `most` parts would
    /// be too few, and until there are no more than `most`.
    pub keys: usize,
    /// The most parts.
    pub most: usize,
}

impl Splits {
    /// The most parts of any sequence of up to `len` keys.
    fn n_parts(self, len: usize) -> usize {
        let of_short = len.div_ceil(self.keys).min(self.most / 2);
        let of_long = len.div_ceil(2 * self.keys).min(self.most);
        of_short.max(of_long).max(1)
    }

    /// As [`Mla::scratch_len`], for layers of these sizes.
    #[must_use]
    pub fn scratch_len(self, sizes: MlaSizes, n_seqs: usize, max_kv_len: usize) -> usize {
        let n_rows = n_seqs * self.window * sizes.n_heads;
        n_rows * self.n_parts(max_kv_len) * (sizes.kv_lora_rank + 2)
    }
}

/// The queries of a pass and what they attend.
#[derive(Clone, Copy, Debug)]
pub struct MlaBatch<'a, E> {
    /// Latent queries, `[n_rows, n_heads, kv_lora_rank]`.
    pub q_latent: View<'a, E>,
    /// Rotary queries, `[n_rows, n_heads, rope_dim]`.
    pub q_pe: View<'a, E>,
    /// The latent cache, `[n_slots, kv_lora_rank + rope_dim]`.
    pub cache: View<'a, E>,
    /// Rows and block tables.
    pub rows: PagedRows<'a>,
    /// The keys to attend; all visible ones where it is `None`.
    pub selection: Option<SelectedKeys<'a>>,
    /// Not negative for sequences whose rows are left out, `[n_seqs]`; they are not written.
    pub skipped: Option<View<'a, i32>>,
    /// A bound of what `kv_len` says. It sizes scratch.
    pub max_kv_len: usize,
    /// A bound of what `kv_len` says of sequences of at most [`Splits::window`] rows; 0 where there
    /// are none. It sizes grids.
    pub max_split_len: usize,
    /// How many rows a sequence has at most; a hint that changes no result.
    pub rows_per_seq: usize,
}

/// `out[t, h] = sum_p softmax_p(scale * (q_latent[t, h] . c_p + q_pe[t, h] . k_pe_p)) c_p`, over
/// the keys `0..=position` of the row's sequence or its selection.
#[derive(Debug)]
pub struct Mla<E> {
    sizes: MlaSizes,
    splits: Splits,
    n_multiprocessors: usize,
    plain: Kernel,
    tiles: Option<Tiles>,
    _element: PhantomData<E>,
}

/// The kernels that use the matrix unit.
#[derive(Debug)]
struct Tiles {
    /// By query rows (a row of the pass and a head each) of a tile, ascending.
    forms: Vec<Form>,
    /// For few heads over a selection.
    few: Option<Form>,
    join: Kernel,
}

#[derive(Debug)]
struct Form {
    n_rows: usize,
    kernel: Kernel,
    n_threads: u32,
    shared: u32,
    /// Whether a block goes on to other parts of its rows, so that fewer than all can be launched.
    takes_parts: bool,
}

impl<E: GemmElement> Mla<E> {
    /// Compiles the kernels for these sizes.
    ///
    /// # Errors
    ///
    /// A failure of the compiler or the driver.
    ///
    /// # Panics
    ///
    /// If the sizes or splits break what they say.
    pub fn new(gpu: &Gpu, sizes: MlaSizes, splits: Splits) -> Result<Self, GpuError> {
        let MlaSizes { n_heads, kv_lora_rank, rope_dim, .. } = sizes;
        let widths = [kv_lora_rank, rope_dim];
        assert!(widths.iter().all(|width| width.is_multiple_of(8)), "widths are multiples of 8");
        assert!((8..=512).contains(&kv_lora_rank) && n_heads > 0, "sizes are in range");
        let Splits { window, keys, most } = splits;
        assert!(keys.is_multiple_of(32) && keys > 0 && window > 0 && most > 0, "splits are valid");
        let module = unit::ATTENTION.build::<E>(gpu, &widths)?;
        let tiles = Tiles::new::<E>(gpu, &module, sizes)?;
        let plain = module.kernel("mla_plain")?;
        let n_multiprocessors = gpu.info().n_multiprocessors as usize;
        Ok(Self { sizes, splits, n_multiprocessors, plain, tiles, _element: PhantomData })
    }

    /// The sizes of the layer.
    #[must_use]
    pub fn sizes(&self) -> MlaSizes {
        self.sizes
    }

    /// Elements of scratch for passes of up to `n_seqs` sequences of up to `max_kv_len` tokens.
    #[must_use]
    pub fn scratch_len(&self, n_seqs: usize, max_kv_len: usize) -> usize {
        self.splits.scratch_len(self.sizes, n_seqs, max_kv_len)
    }

    /// Writes `out`, `[n_rows, n_heads, kv_lora_rank]`. Scores, softmax and sums are f32; a row
    /// that selects nothing is zero; padding is not written.
    ///
    /// # Errors
    ///
    /// A failure of the driver.
    ///
    /// # Panics
    ///
    /// If lengths do not match, or `scratch` is shorter than [`Mla::scratch_len`].
    pub fn attend<'a>(
        &self,
        stream: &Stream,
        batch: &MlaBatch<'a, E>,
        scratch: ViewMut<'a, f32>,
        mut out: ViewMut<'a, E>,
    ) -> Result<(), GpuError> {
        let topk = self.check(batch, &scratch, &out);
        let MlaBatch { rows, selection, .. } = *batch;
        let (n_rows, n_heads) = (rows.n_rows(), self.sizes.n_heads);
        let Some(tiles) = &self.tiles else {
            let args = self.args(batch, (topk, 1), scratch, out.reborrow());
            let launch = Launch::linear(as_u32(n_rows * n_heads), 128);
            // SAFETY: `check` saw the lengths of all arrays; what they hold is checked there.
            return unsafe { stream.launch(&self.plain, launch, &args) };
        };
        let form = match selection {
            Some(_) => tiles.form(n_heads, true),
            None => tiles.form(n_heads * batch.rows_per_seq, false),
        };
        let n_tiles = match selection {
            Some(_) => n_rows * n_heads.div_ceil(form.n_rows),
            None => n_rows * n_heads / form.n_rows + rows.n_seqs(),
        };
        let n_parts = match batch.max_split_len {
            0 => 1,
            len => self.splits.n_parts(if selection.is_some() { topk } else { len }),
        };
        let args = self.args(batch, (topk, n_parts), scratch, out.reborrow());
        // Blocks without work cost time, too: a grid is made for the longest sequence that can be.
        let grid_parts = match form.takes_parts {
            true => n_parts.min((2 * self.n_multiprocessors).div_ceil(n_tiles)),
            false => n_parts,
        };
        let launch = Launch {
            grid: [as_u32(n_tiles), as_u32(grid_parts), 1],
            block: [form.n_threads, 1, 1],
            shared: form.shared,
        };
        // SAFETY: `check` saw the lengths of all arrays; what they hold is checked there.
        unsafe { stream.launch(&form.kernel, launch, &args)? };
        if n_parts == 1 {
            return Ok(());
        }
        let n_blocks = rows.n_seqs() * self.splits.window * n_heads;
        // SAFETY: as above; the parts are those of the launch before.
        unsafe { stream.launch(&tiles.join, Launch::linear(as_u32(n_blocks), 128), &args) }
    }

    /// Checks all lengths and returns the width of selections.
    fn check(
        &self,
        batch: &MlaBatch<'_, E>,
        scratch: &ViewMut<'_, f32>,
        out: &ViewMut<'_, E>,
    ) -> usize {
        let MlaSizes { n_heads, kv_lora_rank, rope_dim, .. } = self.sizes;
        batch.rows.check();
        let n_rows = batch.rows.n_rows();
        assert_eq!(batch.q_latent.len(), n_rows * n_heads * kv_lora_rank, "q_latent is [T, H, R]");
        assert_eq!(batch.q_pe.len(), n_rows * n_heads * rope_dim, "q_pe is [T, H, rope_dim]");
        assert_eq!(out.len(), n_rows * n_heads * kv_lora_rank, "out is [T, H, kv_lora_rank]");
        assert!(
            batch.cache.len().is_multiple_of(kv_lora_rank + rope_dim),
            "cache is [slots, width]"
        );
        let n_skipped = batch.skipped.map_or(batch.rows.n_seqs(), |skipped| skipped.len());
        assert_eq!(n_skipped, batch.rows.n_seqs(), "skipped is [n_seqs]");
        let topk = batch.selection.map_or(0, |keys| {
            assert_eq!(keys.counts.len(), n_rows, "counts is [n_rows]");
            assert!(keys.indices.len().is_multiple_of(n_rows), "indices is [n_rows, topk]");
            keys.indices.len() / n_rows
        });
        let max_len = if batch.selection.is_some() { topk } else { batch.max_kv_len };
        let needed = self.scratch_len(batch.rows.n_seqs(), max_len);
        assert!(self.tiles.is_none() || scratch.len() >= needed, "scratch has {needed} elements");
        topk
    }

    fn args<'a>(
        &self,
        batch: &MlaBatch<'a, E>,
        (topk, n_parts): (usize, usize),
        scratch: ViewMut<'a, f32>,
        out: ViewMut<'a, E>,
    ) -> Args<'a> {
        let MlaSizes { n_heads, kv_lora_rank, rope_dim, scale } = self.sizes;
        let Splits { window, keys, most } = self.splits;
        let rows = batch.rows;
        let room = scratch.len() / (kv_lora_rank + 2);
        let (parts, stats) = scratch.split_at(room * kv_lora_rank);
        let mut args = Args::new();
        args.view_mut(out).view_mut(parts).view_mut(stats);
        args.view(batch.q_latent).view(batch.q_pe).view(batch.cache);
        args.view(rows.row_pos).view(rows.row_seq).view(rows.row_start).view(rows.kv_len);
        args.view(rows.block_tables);
        match batch.selection {
            Some(keys) => args.view(keys.indices).view(keys.counts),
            None => args.ptr(Ptr::<i32>::NULL).ptr(Ptr::<i32>::NULL),
        };
        match batch.skipped {
            Some(skipped) => args.view(skipped),
            None => args.ptr(Ptr::<i32>::NULL),
        };
        rows.push_block_sizes(&mut args, batch.cache.len() / (kv_lora_rank + rope_dim));
        for size in [rows.n_rows(), rows.n_seqs(), n_heads, topk, window, keys, most, n_parts] {
            args.i32(as_i32(size));
        }
        args.f32(scale);
        args
    }
}

impl Tiles {
    /// The kernels for these sizes, if the device has any.
    fn new<E: GemmElement>(
        gpu: &Gpu,
        module: &Module,
        sizes: MlaSizes,
    ) -> Result<Option<Self>, GpuError> {
        let MlaSizes { kv_lora_rank, rope_dim, .. } = sizes;
        let form = |n_rows, name, n_threads, shared| {
            let kernel = module.kernel(name)?;
            kernel.allow_shared(shared)?;
            let takes_parts = name == "mla_hopper_rows64";
            Ok::<_, GpuError>(Form { n_rows, kernel, n_threads, shared, takes_parts })
        };
        let mut few = None;
        let forms = if !has_matrix_unit::<E>(gpu) {
            return Ok(None);
        } else if has_hopper_unit::<E>(gpu) && kv_lora_rank == 512 && rope_dim.is_multiple_of(64) {
            // Queries and two tiles of 64 keys.
            let shared = as_u32(3 * 64 * 2 * (kv_lora_rank + rope_dim));
            let form64 = form(64, "mla_hopper_rows64", 256, shared)?;
            let shared = as_u32((16 + 64) * 2 * (kv_lora_rank + rope_dim));
            few = Some(form(16, "mla_hopper_rows16", 128, shared)?);
            vec![form64]
        } else if kv_lora_rank.is_multiple_of(64)
            && rope_dim.is_multiple_of(16)
            && gpu.info().max_shared_per_block >= shared_bytes(sizes, 64, 3)
        {
            vec![
                form(16, "mla_rows16", 128, shared_bytes(sizes, 16, 2))?,
                form(32, "mla_rows32", 256, shared_bytes(sizes, 32, 3))?,
                form(64, "mla_rows64", 256, shared_bytes(sizes, 64, 3))?,
            ]
        } else {
            return Ok(None);
        };
        Ok(Some(Self { forms, few, join: module.kernel("mla_join")? }))
    }

    /// The form for `n_rows` query rows that share their keys.
    fn form(&self, n_rows: usize, is_selected: bool) -> &Form {
        let few = self.few.as_ref().filter(|few| is_selected && n_rows <= few.n_rows);
        let wide = || self.forms.iter().find(|form| form.n_rows >= n_rows);
        few.or_else(wide).unwrap_or(self.forms.last().expect("there is a form"))
    }
}

/// What `mla_tile` lays out: queries, keys, probabilities, scores, then two words a row.
fn shared_bytes(sizes: MlaSizes, n_rows: usize, n_stages: usize) -> u32 {
    let stride = sizes.kv_lora_rank + sizes.rope_dim + 8;
    as_u32(2 * (n_rows + n_stages * 32) * stride + n_rows * 40 * (2 + 4) + n_rows * 8)
}

/// Whether the kernels that need bf16 matrix products of the device are there.
pub(crate) fn has_matrix_unit<E: GemmElement>(gpu: &Gpu) -> bool {
    let info = gpu.info();
    let capability = info.arch.strip_prefix("sm_").and_then(|text| text.parse::<u32>().ok());
    let is_new = capability.is_some_and(|capability| capability >= 80);
    E::DTYPE == DType::Bf16 && info.api == Api::Cuda && is_new
}

/// Whether the kernels for Hopper's matrix unit are there.
pub(crate) fn has_hopper_unit<E: GemmElement>(gpu: &Gpu) -> bool {
    has_matrix_unit::<E>(gpu) && gpu.info().arch == "sm_90"
}

pub(crate) fn as_i32(value: usize) -> i32 {
    i32::try_from(value).expect("sizes are below 2^31")
}

pub(crate) fn as_u32(value: usize) -> u32 {
    u32::try_from(value).expect("sizes are below 2^32")
}

//! The lightning indexer: which keys a row attends.

use std::marker::PhantomData;

use gpu_runtime::{
    Args, GemmElement, Gpu, GpuError, Kernel, Launch, Module, Stream, View, ViewMut,
};

use crate::attention::{PagedRows, SelectedKeys, as_i32, as_u32, has_matrix_unit};
use crate::unit;

/// Sizes of a lightning indexer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexSizes {
    /// Index heads, at most 64.
    pub n_heads: usize,
    /// Width of an index head and of an index key, a multiple of 8 up to 128.
    pub head_dim: usize,
    /// The most keys that a row selects.
    pub topk: usize,
}

/// The queries of a pass and the keys that they are compared with.
#[derive(Clone, Copy, Debug)]
pub struct IndexBatch<'a, E> {
    /// Rotated queries, `[n_rows, n_heads, head_dim]`.
    pub q: View<'a, E>,
    /// Weights of the heads, `[n_rows, n_heads]`, all constant factors included but
    /// `head_dim^-0.5`.
    pub weights: View<'a, f32>,
    /// The index cache, `[n_slots, head_dim]`.
    pub cache: View<'a, E>,
    /// Rows and block tables.
    pub rows: PagedRows<'a>,
    /// A bound of what `kv_len` says; no key from there on is looked at. It sizes grids and
    /// scratch.
    pub max_kv_len: usize,
}

/// Where selections go: as [`SelectedKeys`].
#[derive(Debug)]
pub struct SelectionMut<'a> {
    /// Positions, `[n_rows, topk]`, -1 behind those that count.
    pub indices: ViewMut<'a, i32>,
    /// How many positions of each row count, `[n_rows]`.
    pub counts: ViewMut<'a, i32>,
}

/// `score(t, s) = sum_h weights[t, h] * max(0, head_dim^-0.5 * (q[t, h] . k_s))` for the visible
/// keys `s`, of which each row selects the `topk` best: of equal scores the lower position, NaN
/// behind every number. A row that sees at most `topk` keys selects all of them without scoring.
#[derive(Debug)]
pub struct Indexer<E> {
    sizes: IndexSizes,
    /// For few rows of a sequence, and for many.
    scores: [Form; 2],
    select: Kernel,
    count: Kernel,
    gather: Kernel,
    _element: PhantomData<E>,
}

/// A kernel for scores.
#[derive(Debug)]
struct Form {
    kernel: Kernel,
    /// Rows of a block, all of one sequence; `None` for a row of any.
    n_rows: Option<usize>,
    /// The most keys of a block.
    n_keys: usize,
    n_threads: u32,
    shared: u32,
    /// Blocks that a multiprocessor holds at once, of a kernel that is told how many keys a block
    /// has.
    n_at_once: Option<usize>,
}

/// Keys of a tile of `indexer_hopper.cu`.
const TILE_KEYS: usize = 64;

impl Form {
    /// The kernels for few rows of a sequence and for many.
    fn both<E: GemmElement>(
        gpu: &Gpu,
        module: &Module,
        sizes: IndexSizes,
    ) -> Result<[Self; 2], GpuError> {
        let IndexSizes { n_heads, head_dim, .. } = sizes;
        let has_tiles = has_matrix_unit::<E>(gpu) && head_dim.is_multiple_of(16);
        let is_hopper = has_tiles && gpu.info().arch == "sm_90";
        if is_hopper && [32, 64].contains(&n_heads) && head_dim.is_multiple_of(64) {
            let form = |name, (n_groups, n_halves): (usize, usize), n_keys, n_at_once| {
                let n_columns = 128 * n_groups * n_halves;
                let shared = as_u32((n_columns + (2 + n_halves) * TILE_KEYS) * head_dim * 2);
                let kernel = module.kernel(name)?;
                kernel.allow_shared(shared)?;
                let (n_rows, n_threads) = (Some(n_columns / n_heads), as_u32(128 * n_groups));
                let n_at_once = Some(n_at_once);
                Ok::<_, GpuError>(Self { kernel, n_rows, n_keys, n_threads, shared, n_at_once })
            };
            return Ok([
                form("index_scores_few", (1, 1), 512, 2)?,
                form("index_scores_many", (2, 2), 2048, 1)?,
            ]);
        }
        let (name, n_rows, n_keys, n_threads) = if has_tiles {
            ("index_scores", Some(8), 512, 256)
        } else {
            ("index_scores_plain", None, 1024, 128)
        };
        let form = || {
            let kernel = module.kernel(name)?;
            Ok(Self { kernel, n_rows, n_keys, n_threads, shared: 0, n_at_once: None })
        };
        Ok([form()?, form()?])
    }
}

impl<E: GemmElement> Indexer<E> {
    /// Compiles the kernels for these sizes.
    ///
    /// # Errors
    ///
    /// A failure of the compiler or the driver.
    ///
    /// # Panics
    ///
    /// If the sizes break what they say.
    pub fn new(gpu: &Gpu, sizes: IndexSizes) -> Result<Self, GpuError> {
        let IndexSizes { n_heads, head_dim, topk } = sizes;
        assert!((1..=64).contains(&n_heads) && topk > 0, "sizes are in range");
        assert!((8..=128).contains(&head_dim) && head_dim.is_multiple_of(8), "head_dim is valid");
        let module = unit::INDEXER.build::<E>(gpu, &[n_heads, head_dim])?;
        Ok(Self {
            sizes,
            scores: Form::both::<E>(gpu, &module, sizes)?,
            select: module.kernel("index_select")?,
            count: module.kernel("index_count")?,
            gather: module.kernel("gather_selection")?,
            _element: PhantomData,
        })
    }

    /// Elements of scratch to score `n_rows` at once; 4 bytes each, so 64 windows of 9 rows and
    /// 163,840 tokens take 377 MB. With less, rows are scored in several turns.
    #[must_use]
    pub fn scratch_len(n_rows: usize, max_kv_len: usize) -> usize {
        n_rows * max_kv_len
    }

    /// Selects keys for each row. Padding is not written.
    ///
    /// # Errors
    ///
    /// A failure of the driver.
    ///
    /// # Panics
    ///
    /// If lengths do not match, or `scratch` has no room for one row.
    pub fn select<'a>(
        &self,
        stream: &Stream,
        batch: &IndexBatch<'a, E>,
        mut scratch: ViewMut<'a, f32>,
        mut out: SelectionMut<'a>,
    ) -> Result<(), GpuError> {
        self.check(batch, &out);
        let (n_rows, max_len) = (batch.rows.n_rows(), batch.max_kv_len);
        assert!(max_len > 0 && scratch.len() >= max_len, "scratch has room for a row");
        let rows_at_once = (scratch.len() / max_len).min(n_rows);
        for begin in (0..n_rows).step_by(rows_at_once) {
            let end = n_rows.min(begin + rows_at_once);
            if max_len > self.sizes.topk {
                self.score(stream, batch, begin..end, scratch.reborrow())?;
            }
            let rows = &batch.rows;
            let mut args = Args::new();
            args.view_mut(out.indices.reborrow()).view_mut(out.counts.reborrow());
            args.view(scratch.as_view()).view(rows.row_pos).view(rows.row_seq);
            args.i32(as_i32(begin)).i32(as_i32(max_len)).i32(as_i32(self.sizes.topk));
            let launch = Launch::linear(as_u32(end - begin), 1024);
            // SAFETY: `check` saw the lengths; rows begin..end are scored in the scratch.
            unsafe { stream.launch(&self.select, launch, &args)? };
        }
        Ok(())
    }

    fn score(
        &self,
        stream: &Stream,
        batch: &IndexBatch<'_, E>,
        range: std::ops::Range<usize>,
        scratch: ViewMut<'_, f32>,
    ) -> Result<(), GpuError> {
        let IndexSizes { head_dim, topk, .. } = self.sizes;
        let (rows, max_len) = (&batch.rows, batch.max_kv_len);
        let mut args = Args::new();
        args.view_mut(scratch).view(batch.q).view(batch.weights).view(batch.cache);
        args.view(rows.row_pos).view(rows.row_seq).view(rows.row_start);
        rows.push_blocks(&mut args, batch.cache.len() / head_dim);
        for size in [rows.n_seqs(), range.start, range.end, max_len, topk] {
            args.i32(as_i32(size));
        }
        args.f32((head_dim as f32).powf(-0.5));
        // A pass of prompts has some sequences of many rows, and others of one.
        let form = &self.scores[usize::from(range.len() > 8 * rows.n_seqs())];
        let n_tiles = form.n_rows.map_or(range.len(), |n| range.len() / n + rows.n_seqs());
        let mut n_keys = form.n_keys;
        if let Some(n_at_once) = form.n_at_once {
            // Few rows make work for all multiprocessors.
            let n_blocks = n_at_once * stream.gpu().info().n_multiprocessors as usize;
            let all = n_tiles * max_len.div_ceil(TILE_KEYS);
            n_keys = n_keys.min(all.div_ceil(n_blocks) * TILE_KEYS);
            args.i32(as_i32(n_keys));
        }
        let grid = [as_u32(n_tiles), as_u32(max_len.div_ceil(n_keys)), 1];
        let launch = Launch { grid, block: [form.n_threads, 1, 1], shared: form.shared };
        // SAFETY: `check` saw the lengths; scores of a row beyond `max_len` are not written.
        unsafe { stream.launch(&form.kernel, launch, &args) }
    }

    fn check(&self, batch: &IndexBatch<'_, E>, out: &SelectionMut<'_>) {
        let IndexSizes { n_heads, head_dim, topk } = self.sizes;
        batch.rows.check();
        let n_rows = batch.rows.n_rows();
        assert_eq!(batch.q.len(), n_rows * n_heads * head_dim, "q is [T, H, head_dim]");
        assert_eq!(batch.weights.len(), n_rows * n_heads, "weights is [T, H]");
        assert!(batch.cache.len().is_multiple_of(head_dim), "cache is [n_slots, head_dim]");
        assert_eq!(out.indices.len(), n_rows * topk, "indices is [T, topk]");
        assert_eq!(out.counts.len(), n_rows, "counts is [T]");
    }

    /// Writes how many keys the rows of a pass score to `n_scored`, one element.
    ///
    /// # Errors
    ///
    /// A failure of the driver.
    ///
    /// # Panics
    ///
    /// If lengths do not match.
    pub fn count_scored(
        &self,
        stream: &Stream,
        rows: &PagedRows<'_>,
        n_scored: ViewMut<'_, u64>,
    ) -> Result<(), GpuError> {
        rows.check();
        assert_eq!(n_scored.len(), 1, "the counter is one element");
        let mut args = Args::new();
        args.view_mut(n_scored).view(rows.row_pos).view(rows.row_seq);
        args.i32(as_i32(rows.n_rows())).i32(as_i32(self.sizes.topk));
        // SAFETY: the arrays have the lengths that are passed.
        unsafe { stream.launch(&self.count, Launch::linear(1, 256), &args) }
    }

    /// Copies the selections of `rows`, `[n]`, one after the other to `out`: what draft steps that
    /// share the selection of a slot's last valid row attend. Of row -1 nothing is selected.
    ///
    /// # Errors
    ///
    /// A failure of the driver.
    ///
    /// # Panics
    ///
    /// If lengths do not match.
    pub fn gather(
        &self,
        stream: &Stream,
        from: SelectedKeys<'_>,
        rows: View<'_, i32>,
        out: SelectionMut<'_>,
    ) -> Result<(), GpuError> {
        let (topk, n, n_rows) = (self.sizes.topk, rows.len(), from.counts.len());
        assert_eq!(from.indices.len(), n_rows * topk, "indices is [n_rows, topk]");
        assert_eq!(out.indices.len(), n * topk, "gathered indices are [n, topk]");
        assert_eq!(out.counts.len(), n, "gathered counts are [n]");
        let mut args = Args::new();
        args.view_mut(out.indices).view_mut(out.counts).view(from.indices).view(from.counts);
        args.view(rows).i32(as_i32(n_rows)).i32(as_i32(topk));
        // SAFETY: the lengths are checked above; row numbers are checked on the device.
        unsafe { stream.launch(&self.gather, Launch::linear(as_u32(n), 256), &args) }
    }
}

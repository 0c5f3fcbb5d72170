//! The rows of a pass on the device.

use batch_layout::BatchLayout;
use gpu_kernels::{PagedRows, PassRows, RowsMut};
use gpu_runtime::{Buffer, Gpu, GpuError, View, ViewMut};

use crate::expansion::ChunkViews;

/// Arrays of the rows and sequences of passes; as [`PagedRows`] and [`PassRows`] say.
#[derive(Debug)]
pub(crate) struct RowArrays {
    pub(crate) pos: Buffer<i32>,
    pub(crate) seq: Buffer<i32>,
    pub(crate) slot: Buffer<i32>,
    pub(crate) ids: Buffer<i32>,
    pub(crate) start: Buffer<i32>,
    pub(crate) kv_len: Buffer<i32>,
}

/// A pass: its rows, and bounds that size grids.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pass<'a> {
    pub(crate) rows: PassRows<'a>,
    pub(crate) paged: PagedRows<'a>,
    pub(crate) ids: View<'a, i32>,
    pub(crate) bounds: Bounds,
    /// Sequences that attend expanded keys in layers that attend all.
    pub(crate) chunks: Option<ChunkViews<'a>>,
}

/// Bounds of the sequences of a pass.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    /// No sequence is longer.
    pub(crate) max_kv_len: usize,
    /// No sequence whose rows are a window is longer; 0 where none are.
    pub(crate) max_split_len: usize,
    /// No sequence has more rows.
    pub(crate) rows_per_seq: usize,
}

impl Bounds {
    /// Of windows of `width` rows.
    pub(crate) fn of_windows(max_len: usize, width: usize) -> Self {
        Self { max_kv_len: max_len, max_split_len: max_len, rows_per_seq: width }
    }

    /// Of a layout, where `max_window` rows are a window.
    pub(crate) fn of_layout(layout: &BatchLayout, max_window: usize) -> Self {
        let lens = layout.kv_lens().iter().map(|&len| len as usize);
        let n_rows = layout.cu_seqlens_q().windows(2).map(|ends| (ends[1] - ends[0]) as usize);
        let windows = lens.clone().zip(n_rows).filter(|&(_, n_rows)| n_rows <= max_window);
        Self {
            max_kv_len: lens.max().unwrap_or(1),
            max_split_len: windows.map(|(len, _)| len).max().unwrap_or(0),
            rows_per_seq: layout.max_query_len(),
        }
    }
}

/// Block tables on the device, `[n_seqs, stride]` with the tokens of a block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tables<'a> {
    pub(crate) blocks: View<'a, i32>,
    pub(crate) block_size: usize,
}

impl RowArrays {
    pub(crate) fn new(gpu: &Gpu, n_rows: usize, n_seqs: usize) -> Result<Self, GpuError> {
        Ok(Self {
            pos: gpu.alloc(n_rows)?,
            seq: gpu.alloc(n_rows)?,
            slot: gpu.alloc(n_rows)?,
            ids: gpu.alloc(n_rows)?,
            start: gpu.alloc(n_seqs + 1)?,
            kv_len: gpu.alloc(n_seqs)?,
        })
    }

    /// Integers of all arrays.
    pub(crate) fn len(&self) -> usize {
        let Self { pos, seq, slot, ids, start, kv_len } = self;
        [pos, seq, slot, ids, start, kv_len].iter().map(|array| array.len()).sum()
    }

    /// The first `n_rows` rows and `n_seqs` sequences, to be written.
    pub(crate) fn first_mut(&mut self, (n_rows, n_seqs): (usize, usize)) -> RowsMut<'_> {
        RowsMut {
            row_pos: self.pos.slice_mut(..n_rows),
            row_seq: self.seq.slice_mut(..n_rows),
            row_slot: self.slot.slice_mut(..n_rows),
            ids: self.ids.slice_mut(..n_rows),
            row_start: self.start.slice_mut(..=n_seqs),
            kv_len: self.kv_len.slice_mut(..n_seqs),
        }
    }

    /// A layout's rows with their token ids, and where they belong.
    pub(crate) fn parts_of<'a>(
        &'a mut self,
        layout: &'a BatchLayout,
        ids: &'a [i32],
    ) -> [(&'a [i32], ViewMut<'a, i32>); 6] {
        let to = self.first_mut((layout.n_tokens(), layout.n_seqs()));
        [
            (layout.positions(), to.row_pos),
            (layout.token_to_seq(), to.row_seq),
            (layout.slot_mapping(), to.row_slot),
            (ids, to.ids),
            (layout.cu_seqlens_q(), to.row_start),
            (layout.kv_lens(), to.kv_len),
        ]
    }

    /// The first `n_rows` rows of `n_seqs` sequences as a pass.
    pub(crate) fn pass<'a>(
        &'a self,
        (n_rows, n_seqs): (usize, usize),
        tables: Tables<'a>,
        bounds: Bounds,
    ) -> Pass<'a> {
        let (pos, seq, slot) =
            (self.pos.slice(..n_rows), self.seq.slice(..n_rows), self.slot.slice(..n_rows));
        Pass {
            rows: PassRows { n_rows, seq, pos, slot },
            paged: PagedRows {
                row_pos: pos,
                row_seq: seq,
                row_start: self.start.slice(..=n_seqs),
                kv_len: self.kv_len.slice(..n_seqs),
                block_tables: tables.blocks,
                block_size: tables.block_size,
            },
            ids: self.ids.slice(..n_rows),
            bounds,
            chunks: None,
        }
    }
}

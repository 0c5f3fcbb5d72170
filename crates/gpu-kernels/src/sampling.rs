//! Greedy choice over the vocabulary, and which drafts it confirms.

use gpu_runtime::{Args, DType, GemmElement, Gpu, GpuError, Kernel, Launch, Ptr};
use gpu_runtime::{Stream, View, ViewMut};

use crate::attention::{as_i32, as_u32};
use crate::unit;

/// The kernels of greedy sampling, for float32 logits and for those of the element `E`.
#[derive(Debug)]
pub struct Sampling {
    dtype: DType,
    argmax_elem: Kernel,
    argmax_f32: Kernel,
    argmax_join: Kernel,
    reject: Kernel,
}

/// The windows that are verified: `width` rows of each slot, the last known token and drafts.
#[derive(Clone, Copy, Debug)]
pub struct Windows<'a> {
    /// The target's choice at each row, `[n_slots, width]`; -1 where it has none.
    pub ids: View<'a, i32>,
    /// The drafts, `[n_slots, width - 1]`.
    pub drafts: View<'a, i32>,
    /// Drafts of each slot, `[n_slots]`; -1 for a slot that does not run.
    pub n_drafts: View<'a, i32>,
    /// For benches: how many drafts of each slot are accepted whatever the target says.
    pub forced: Option<View<'a, i32>>,
}

/// Where accepted runs go.
#[derive(Debug)]
pub struct AcceptedRuns<'a> {
    /// Accepted drafts and the target's token behind them, `[n_slots, width]`, -1 behind the run.
    pub emitted: ViewMut<'a, i32>,
    /// Length of each run, `[n_slots]`. 0 for a slot that does not run, and for one whose run ends
    /// at a row without a choice.
    pub n_emitted: ViewMut<'a, i32>,
    /// The last valid row of each slot, `[n_slots]`, or -1.
    pub last_row: ViewMut<'a, i32>,
}

const CHUNK: usize = 4096;

impl Sampling {
    /// Compiles the kernels.
    ///
    /// # Errors
    ///
    /// A failure of the compiler or the driver.
    pub fn new<E: GemmElement>(gpu: &Gpu) -> Result<Self, GpuError> {
        let module = unit::SAMPLING.build::<E>(gpu, &[])?;
        Ok(Self {
            dtype: E::DTYPE,
            argmax_elem: module.kernel("argmax_elem")?,
            argmax_f32: module.kernel("argmax_f32")?,
            argmax_join: module.kernel("argmax_join")?,
            reject: module.kernel("reject_greedy")?,
        })
    }

    /// Elements of scratch of [`Sampling::argmax`].
    #[must_use]
    pub fn scratch_len(n_rows: usize, vocab: usize) -> usize {
        n_rows * vocab.div_ceil(CHUNK)
    }

    /// Writes the id of the largest logit of each row of `logits`, `[n_rows, vocab]`, to `ids`: the
    /// lowest of equal ones, -1 where a logit is NaN. Rows whose `row_seq` is -1 are not written.
    ///
    /// # Errors
    ///
    /// A failure of the driver.
    ///
    /// # Panics
    ///
    /// If lengths do not match, or `L` is neither f32 nor the element of [`Sampling::new`].
    pub fn argmax<L: GemmElement>(
        &self,
        stream: &Stream,
        logits: View<'_, L>,
        row_seq: Option<View<'_, i32>>,
        mut scratch: ViewMut<'_, u64>,
        ids: ViewMut<'_, i32>,
    ) -> Result<(), GpuError> {
        let n_rows = ids.len();
        assert!(n_rows > 0 && logits.len().is_multiple_of(n_rows), "logits are [n_rows, vocab]");
        let vocab = logits.len() / n_rows;
        let n_chunks = vocab.div_ceil(CHUNK);
        assert!(vocab > 0 && scratch.len() >= n_rows * n_chunks, "scratch has room");
        assert!(row_seq.is_none_or(|seqs| seqs.len() == n_rows), "row_seq is [n_rows]");
        assert!(L::DTYPE == DType::F32 || L::DTYPE == self.dtype, "logits are of a known element");
        let kernel = match L::DTYPE {
            DType::F32 => &self.argmax_f32,
            DType::Bf16 => &self.argmax_elem,
        };
        let mut args = Args::new();
        args.view_mut(scratch.reborrow()).view(logits);
        push_optional(&mut args, row_seq);
        args.i32(as_i32(vocab));
        let grid = [as_u32(n_chunks), as_u32(n_rows), 1];
        // SAFETY: the lengths are checked above.
        unsafe { stream.launch(kernel, Launch { grid, block: [256, 1, 1], shared: 0 }, &args)? };
        let mut args = Args::new();
        args.view_mut(ids).view(scratch.as_view());
        push_optional(&mut args, row_seq);
        args.i32(as_i32(n_rows)).i32(as_i32(n_chunks));
        // Two rows a block where a warp is 64 threads wide, four where it is 32.
        let rows_per_block = 128 / stream.gpu().info().warp_size as usize;
        let launch = Launch::linear(as_u32(n_rows.div_ceil(rows_per_block)), 128);
        // SAFETY: as above.
        unsafe { stream.launch(&self.argmax_join, launch, &args) }
    }

    /// Verifies drafts: one is accepted where the target chose it and all before it are accepted,
    /// and the run ends with the target's choice behind the last accepted one.
    ///
    /// # Errors
    ///
    /// A failure of the driver.
    ///
    /// # Panics
    ///
    /// If lengths do not match.
    pub fn verify(
        &self,
        stream: &Stream,
        windows: &Windows<'_>,
        out: AcceptedRuns<'_>,
    ) -> Result<(), GpuError> {
        let n_slots = windows.n_drafts.len();
        assert!(n_slots > 0 && windows.ids.len().is_multiple_of(n_slots), "ids is [slots, width]");
        let width = windows.ids.len() / n_slots;
        assert!(width > 0, "a window has a row");
        assert_eq!(windows.drafts.len(), n_slots * (width - 1), "drafts is [n_slots, width - 1]");
        assert!(windows.forced.is_none_or(|forced| forced.len() == n_slots), "forced is [n_slots]");
        assert_eq!(out.emitted.len(), n_slots * width, "emitted is [n_slots, width]");
        assert_eq!(out.n_emitted.len(), n_slots, "n_emitted is [n_slots]");
        assert_eq!(out.last_row.len(), n_slots, "last_row is [n_slots]");
        let mut args = Args::new();
        args.view_mut(out.emitted).view_mut(out.n_emitted).view_mut(out.last_row);
        args.view(windows.ids).view(windows.drafts).view(windows.n_drafts);
        push_optional(&mut args, windows.forced);
        args.i32(as_i32(n_slots)).i32(as_i32(width));
        let launch = Launch::linear(as_u32(n_slots.div_ceil(64)), 64);
        // SAFETY: the lengths are checked above.
        unsafe { stream.launch(&self.reject, launch, &args) }
    }
}

fn push_optional<'a>(args: &mut Args<'a>, view: Option<View<'a, i32>>) {
    match view {
        Some(view) => args.view(view),
        None => args.ptr(Ptr::<i32>::NULL),
    };
}

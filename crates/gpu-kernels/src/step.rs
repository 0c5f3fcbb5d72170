//! The state of decoding slots, and the rows of each pass of a speculative step, on the device.
//!
//! A step is [`Step::verify`], the target's pass and [`crate::sampling`], then for each of the
//! draft layers [`Step::draft`] and its pass, for each further draft [`Step::single`] and its pass,
//! each followed by [`Step::take`], and at the end [`Step::advance`]. Nothing is read back.

use gpu_runtime::{Args, GemmElement, Gpu, GpuError, Kernel, Launch, Stream, View, ViewMut};

use crate::attention::{as_i32, as_u32};
use crate::unit;

/// The kernels of step state.
#[derive(Debug)]
pub struct Step {
    verify: Kernel,
    draft: Kernel,
    single: Kernel,
    take: Kernel,
    advance: Kernel,
}

/// What does not change within a step. A slot's window has `width` rows.
#[derive(Clone, Copy, Debug)]
pub struct Slots<'a> {
    /// Tokens of each slot with KV, -1 for an empty slot, `[n_slots]`.
    pub valid_len: View<'a, i32>,
    /// Positions that each slot has blocks for, `[n_slots]`; none from there on is run or written.
    pub limit: View<'a, i32>,
    /// Block ids, `[n_slots, stride]`.
    pub block_tables: View<'a, i32>,
    /// Tokens of a block.
    pub block_size: usize,
    /// Slots of the caches.
    pub n_cache_slots: usize,
    /// Rows of a window: one more than drafts.
    pub width: usize,
}

/// Where the rows of a pass go; as [`crate::PagedRows`]. A padding row is -1 everywhere, and its
/// id is 0.
#[derive(Debug)]
pub struct RowsMut<'a> {
    /// Positions.
    pub row_pos: ViewMut<'a, i32>,
    /// Sequences, which are the slots.
    pub row_seq: ViewMut<'a, i32>,
    /// Slots of the caches that rows write, or -1.
    pub row_slot: ViewMut<'a, i32>,
    /// Tokens that rows embed.
    pub ids: ViewMut<'a, i32>,
    /// First row of each slot, and the end, `[n_slots + 1]`.
    pub row_start: ViewMut<'a, i32>,
    /// Tokens with KV behind this pass, `[n_slots]`; 0 for a slot without rows.
    pub kv_len: ViewMut<'a, i32>,
}

/// What a step knows behind its verification.
#[derive(Clone, Copy, Debug)]
pub struct Emitted<'a> {
    /// The accepted runs, `[n_slots, width]`.
    pub tokens: View<'a, i32>,
    /// Their lengths, `[n_slots]`.
    pub n_emitted: View<'a, i32>,
    /// Drafts of this step so far, `[n_slots, width - 1]`.
    pub drafts: View<'a, i32>,
}

/// The state that the next step begins with.
#[derive(Debug)]
pub struct NextState<'a> {
    /// As [`Slots::valid_len`].
    pub valid_len: ViewMut<'a, i32>,
    /// The token at that position, `[n_slots]`.
    pub last_token: ViewMut<'a, i32>,
    /// How many drafts there are, `[n_slots]`.
    pub n_drafts: ViewMut<'a, i32>,
}

impl Step {
    /// Compiles the kernels.
    ///
    /// # Errors
    ///
    /// A failure of the compiler or the driver.
    pub fn new<E: GemmElement>(gpu: &Gpu) -> Result<Self, GpuError> {
        let module = unit::STEP.build::<E>(gpu, &[])?;
        Ok(Self {
            verify: module.kernel("step_verify")?,
            draft: module.kernel("step_draft")?,
            single: module.kernel("step_single")?,
            take: module.kernel("step_take")?,
            advance: module.kernel("step_advance")?,
        })
    }

    /// The rows of the verify pass, `[n_slots, width]`: each slot's last token, then its drafts as
    /// far as they fit below its limit; that many go to `n_verified`, -1 for a slot that does not
    /// run. `(last_token, drafts, n_drafts)` are `[n_slots]`, `[n_slots, width - 1]`, `[n_slots]`.
    ///
    /// # Errors
    ///
    /// A failure of the driver.
    ///
    /// # Panics
    ///
    /// If lengths do not match.
    pub fn verify<'a>(
        &self,
        stream: &Stream,
        slots: &Slots<'a>,
        (last_token, drafts, n_drafts): (View<'a, i32>, View<'a, i32>, View<'a, i32>),
        rows: RowsMut<'a>,
        n_verified: ViewMut<'a, i32>,
    ) -> Result<(), GpuError> {
        let n_slots = slots.check(slots.width, &rows);
        slots.check_drafts(drafts);
        all_per_slot(n_slots, &[last_token, n_drafts, n_verified.as_view()]);
        let mut args = rows.args();
        args.view_mut(n_verified).view(last_token).view(drafts).view(n_drafts);
        slots.push(&mut args);
        launch(stream, &self.verify, n_slots * slots.width, &args)
    }

    /// The rows of draft layer `step`'s pass over the window, `[n_slots, width]`: the valid rows of
    /// the target's pass, the one at position `p` with the token at `p + 1 + step`, or the last
    /// known one. Step 0 also writes `n_propose`: what is wanted (`n_wanted`), as far as the next
    /// window fits below the slot's limit.
    ///
    /// # Errors
    ///
    /// A failure of the driver.
    ///
    /// # Panics
    ///
    /// If lengths do not match, or `step` is no draft of the window.
    pub fn draft<'a>(
        &self,
        stream: &Stream,
        (slots, step): (&Slots<'a>, usize),
        emitted: &Emitted<'a>,
        rows: RowsMut<'a>,
        (n_wanted, n_propose): (View<'a, i32>, ViewMut<'a, i32>),
    ) -> Result<(), GpuError> {
        let n_slots = slots.check(slots.width, &rows);
        assert!(step + 1 < slots.width, "step {step} is a draft of the window");
        emitted.check(slots);
        all_per_slot(n_slots, &[n_wanted, n_propose.as_view()]);
        let mut args = rows.args();
        args.view_mut(n_propose).view(emitted.tokens).view(emitted.n_emitted);
        args.view(emitted.drafts).view(n_wanted).i32(as_i32(step));
        slots.push(&mut args);
        launch(stream, &self.draft, n_slots * slots.width, &args)
    }

    /// One row for each slot that proposes a draft in step `step`, `[n_slots]`. `behind` is `None`
    /// for a slot's last valid row, whose KV the pass over the window writes and whose id is 0, and
    /// otherwise how many positions the row is away from the first one behind the valid rows; it
    /// embeds the draft before.
    ///
    /// # Errors
    ///
    /// A failure of the driver.
    ///
    /// # Panics
    ///
    /// If lengths do not match, or `step` is no draft of the window, or one without a draft before.
    pub fn single<'a>(
        &self,
        stream: &Stream,
        (slots, step, behind): (&Slots<'a>, usize, Option<usize>),
        emitted: &Emitted<'a>,
        n_propose: View<'a, i32>,
        rows: RowsMut<'a>,
    ) -> Result<(), GpuError> {
        let n_slots = slots.check(1, &rows);
        let is_draft = step + 1 < slots.width && (step > 0 || behind.is_none());
        assert!(is_draft, "step {step} is a draft of the window with one before it");
        emitted.check(slots);
        all_per_slot(n_slots, &[n_propose]);
        let mut args = rows.args();
        args.view(n_propose).view(emitted.n_emitted).view(emitted.drafts);
        args.i32(as_i32(step)).i32(behind.map_or(-1, as_i32));
        slots.push(&mut args);
        launch(stream, &self.single, n_slots, &args)
    }

    /// Takes the choice of each slot, `[n_slots]`, as its draft of step `step`. A slot without a
    /// choice (-1) proposes no further.
    ///
    /// # Errors
    ///
    /// A failure of the driver.
    ///
    /// # Panics
    ///
    /// If lengths do not match, or `step` is no draft of the window.
    pub fn take(
        &self,
        stream: &Stream,
        step: usize,
        chosen: View<'_, i32>,
        drafts: ViewMut<'_, i32>,
        n_propose: ViewMut<'_, i32>,
    ) -> Result<(), GpuError> {
        let n_slots = chosen.len();
        all_per_slot(n_slots, &[n_propose.as_view()]);
        assert!(n_slots > 0 && drafts.len().is_multiple_of(n_slots), "drafts is [n_slots, k]");
        let width = drafts.len() / n_slots + 1;
        assert!(step + 1 < width, "step {step} is a draft of the window");
        let mut args = Args::new();
        args.view_mut(drafts).view_mut(n_propose).view(chosen);
        args.i32(as_i32(step)).i32(as_i32(n_slots)).i32(as_i32(width));
        launch(stream, &self.take, n_slots, &args)
    }

    /// Moves the state behind the emitted tokens; a slot without a run stays as it is. Drafts are
    /// where [`Step::take`] put them.
    ///
    /// # Errors
    ///
    /// A failure of the driver.
    ///
    /// # Panics
    ///
    /// If lengths do not match.
    pub fn advance(
        &self,
        stream: &Stream,
        tokens: View<'_, i32>,
        (n_emitted, n_propose): (View<'_, i32>, View<'_, i32>),
        state: NextState<'_>,
    ) -> Result<(), GpuError> {
        let NextState { valid_len, last_token, n_drafts } = state;
        let n_slots = n_emitted.len();
        let per_slot = [n_propose, valid_len.as_view(), last_token.as_view(), n_drafts.as_view()];
        all_per_slot(n_slots, &per_slot);
        assert!(n_slots > 0 && tokens.len().is_multiple_of(n_slots), "tokens is [n_slots, width]");
        let mut args = Args::new();
        args.view_mut(valid_len).view_mut(last_token).view_mut(n_drafts);
        args.view(tokens).view(n_emitted).view(n_propose);
        args.i32(as_i32(n_slots)).i32(as_i32(tokens.len() / n_slots));
        launch(stream, &self.advance, n_slots, &args)
    }
}

impl<'a> Slots<'a> {
    /// Checks the lengths, with `rows_per_slot` in a pass, and returns the number of slots.
    fn check(&self, rows_per_slot: usize, rows: &RowsMut<'_>) -> usize {
        let n_slots = self.valid_len.len();
        assert!(n_slots > 0 && self.block_size > 0 && self.width > 0, "there are slots");
        all_per_slot(n_slots, &[self.limit, rows.kv_len.as_view()]);
        assert!(self.block_tables.len().is_multiple_of(n_slots), "tables are [n_slots, stride]");
        assert_eq!(rows.row_start.len(), n_slots + 1, "row_start is [n_slots + 1]");
        for array in [&rows.row_pos, &rows.row_seq, &rows.row_slot, &rows.ids] {
            assert_eq!(
                array.len(),
                n_slots * rows_per_slot,
                "an array of rows is too short or long"
            );
        }
        n_slots
    }

    fn check_drafts(&self, drafts: View<'_, i32>) {
        let n_drafts = self.valid_len.len() * (self.width - 1);
        assert_eq!(drafts.len(), n_drafts, "drafts is [n_slots, width - 1]");
    }

    fn push(&self, args: &mut Args<'a>) {
        let n_slots = self.valid_len.len();
        args.view(self.valid_len).view(self.limit).view(self.block_tables);
        let stride = self.block_tables.len() / n_slots;
        for size in [stride, self.block_size, self.n_cache_slots, n_slots, self.width] {
            args.i32(as_i32(size));
        }
    }
}

impl Emitted<'_> {
    fn check(&self, slots: &Slots<'_>) {
        let n_slots = slots.valid_len.len();
        assert_eq!(self.tokens.len(), n_slots * slots.width, "tokens is [n_slots, width]");
        all_per_slot(n_slots, &[self.n_emitted]);
        slots.check_drafts(self.drafts);
    }
}

impl<'a> RowsMut<'a> {
    fn args(self) -> Args<'a> {
        let mut args = Args::new();
        args.view_mut(self.row_pos).view_mut(self.row_seq).view_mut(self.row_slot);
        args.view_mut(self.ids).view_mut(self.row_start).view_mut(self.kv_len);
        args
    }
}

fn all_per_slot(n_slots: usize, arrays: &[View<'_, i32>]) {
    for array in arrays {
        assert_eq!(array.len(), n_slots, "an array of one element a slot");
    }
}

fn launch(
    stream: &Stream,
    kernel: &Kernel,
    n_threads: usize,
    args: &Args<'_>,
) -> Result<(), GpuError> {
    // SAFETY: the caller checked the lengths of all arrays; a thread behind them does nothing.
    unsafe { stream.launch(kernel, Launch::linear(as_u32(n_threads.div_ceil(128)), 128), args) }
}

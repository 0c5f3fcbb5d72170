//! The launches of a decode step, in their order.

use gpu_kernels::{
    AcceptedRuns, BeginState, Emitted, NextState, OldState, SlotRecord, Slots, Windows,
};
use gpu_runtime::{Buffer, GpuError, View};

use super::Decoder;
use super::state::State;
use super::timing::StepPart;
use crate::device::PassLimits;
use crate::layer::Keys;
use crate::loader::Element;
use crate::model::GpuModel;
use crate::parts::{Drafter, Target};
use crate::pass::{Bounds, Tables};

impl<E: Element> GpuModel<E> {
    /// All launches of a step over `n_slots` slots.
    pub(super) fn queue(&mut self, decoder: &mut Decoder, n_slots: usize) -> Result<(), GpuError> {
        let mut parts = StepPart::all(decoder.width - 1).into_iter();
        parts.try_for_each(|part| self.queue_part(decoder, n_slots, part))
    }

    /// The launches of a part of it.
    pub(super) fn queue_part(
        &mut self,
        decoder: &mut Decoder,
        n_slots: usize,
        part: StepPart,
    ) -> Result<(), GpuError> {
        match part {
            StepPart::Begin => self.begin_step(decoder, n_slots),
            StepPart::Verify => self.verify_step(decoder, n_slots),
            StepPart::Sample => self.sample_step(decoder, n_slots),
            StepPart::Draft(step) => self.draft_step(decoder, n_slots, step),
            StepPart::Advance => self.advance_step(decoder, n_slots),
        }
    }

    /// Where the slots are behind the step.
    fn advance_step(&self, decoder: &mut Decoder, n_slots: usize) -> Result<(), GpuError> {
        let width = decoder.width;
        let state = State::of(decoder.state.view_mut(), (decoder.n_most, n_slots), width);
        let slots = &decoder.slots;
        self.device.step.advance(
            &self.device.stream,
            state.emitted.as_view(),
            (state.n_emitted.as_view(), slots.n_propose.slice(..n_slots)),
            NextState {
                valid_len: state.valid_len,
                last_token: state.last_token,
                n_drafts: state.n_drafts,
            },
        )
    }

    /// The state of all slots and their block tables.
    fn begin_step(&self, decoder: &mut Decoder, n_slots: usize) -> Result<(), GpuError> {
        let Decoder { width, n_most, stride, .. } = *decoder;
        let (stream, device) = (&self.device.stream, &self.device);
        stream.copy(&decoder.state, &mut decoder.old)?;
        let old = State::of(decoder.old.view_mut(), (n_most, n_most), width);
        let state = State::of(decoder.state.view_mut(), (n_most, n_slots), width);
        let slots = &mut decoder.slots;
        let records = decoder.records.slice(..n_slots * SlotRecord::len(width));
        device.begin.run(
            stream,
            (records, width),
            OldState {
                valid_len: old.valid_len.as_view(),
                last_token: old.last_token.as_view(),
                n_emitted: old.n_emitted.as_view(),
                drafts: old.drafts.as_view(),
            },
            BeginState {
                valid_len: state.valid_len,
                last_token: state.last_token,
                n_drafts: state.n_drafts,
                drafts: state.drafts,
                n_wanted: slots.n_wanted.slice_mut(..n_slots),
                forced: slots.forced.slice_mut(..n_slots),
                table: slots.table_of.slice_mut(..n_slots),
            },
        )?;
        let table_of = slots.table_of.slice(..n_slots);
        let tables = slots.tables.slice_mut(..n_slots * stride);
        device.kernels.gather_rows(table_of, decoder.tables.view(), stride, tables)
    }

    /// The target's pass over all windows, up to its logits.
    fn verify_step(&mut self, decoder: &mut Decoder, n_slots: usize) -> Result<(), GpuError> {
        let Decoder { width, n_most, stride, .. } = *decoder;
        let (device, stream) = (&self.device, &self.device.stream);
        let state = State::of(decoder.state.view_mut(), (n_most, n_slots), width);
        let buffers = &mut decoder.slots;
        let tables = buffers.tables.slice(..n_slots * stride);
        let slots = slots(&state, (&buffers.limit, tables), &self.limits, (n_slots, width));
        let current =
            (state.last_token.as_view(), state.drafts.as_view(), state.n_drafts.as_view());
        let n_rows = n_slots * width;
        let rows = buffers.window.first_mut((n_rows, n_slots));
        let n_verified = buffers.n_verified.slice_mut(..n_slots);
        device.step.verify(stream, &slots, current, rows, n_verified)?;
        let tables = Tables { blocks: tables, block_size: self.limits.block_size };
        let bounds = Bounds::of_windows(self.limits.max_len, width);
        let pass = buffers.window.pass((n_rows, n_slots), tables, bounds);
        let target = Target { table: &self.table, layers: &self.layers, norm: &self.norm };
        target.forward(device, &pass, &mut self.caches, &mut self.work.all)?;
        let hidden = n_rows * device.sizes.hidden;
        let work = &mut self.work;
        stream.copy(work.all.x.slice(..hidden), work.hidden.slice_mut(..hidden))?;
        let head = self.head.as_ref().unwrap_or(&self.table);
        let x = (work.hidden.view(), device.sizes.hidden);
        device.linear(n_rows, x, head, work.logits.view_mut())
    }

    /// What the target accepts of each window.
    fn sample_step(&mut self, decoder: &mut Decoder, n_slots: usize) -> Result<(), GpuError> {
        let Decoder { width, n_most, .. } = *decoder;
        let (device, stream) = (&self.device, &self.device.stream);
        let state = State::of(decoder.state.view_mut(), (n_most, n_slots), width);
        let (buffers, n_rows) = (&mut decoder.slots, n_slots * width);
        let choices = buffers.choices.slice_mut(..n_rows);
        let logits = self.work.logits.slice(..n_rows * device.sizes.vocab);
        let seqs = Some(buffers.window.seq.slice(..n_rows));
        device.sampling.argmax(stream, logits, seqs, buffers.argmax.view_mut(), choices)?;
        let forced = buffers.forced.slice(..n_slots);
        let windows = Windows {
            ids: buffers.choices.slice(..n_rows),
            drafts: state.drafts.as_view(),
            n_drafts: buffers.n_verified.slice(..n_slots),
            forced: decoder.options.is_forced.then_some(forced),
        };
        let last_row = buffers.last_row.slice_mut(..n_slots);
        let runs = AcceptedRuns { emitted: state.emitted, n_emitted: state.n_emitted, last_row };
        device.sampling.verify(stream, &windows, runs)
    }

    /// Draft `step` of the next step.
    fn draft_step(
        &mut self,
        decoder: &mut Decoder,
        n_slots: usize,
        step: usize,
    ) -> Result<(), GpuError> {
        let Decoder { width, n_most, stride, .. } = *decoder;
        let (device, stream) = (&self.device, &self.device.stream);
        let mut state = State::of(decoder.state.view_mut(), (n_most, n_slots), width);
        let buffers = &mut decoder.slots;
        let table_blocks = buffers.tables.slice(..n_slots * stride);
        let tables = Tables { blocks: table_blocks, block_size: self.limits.block_size };
        let max_len = self.limits.max_len;
        let (n_rows, hidden) = (n_slots * width, device.sizes.hidden);
        let drafter = Drafter::of(&self.mtp[0], &self.table);
        let head = self.mtp[0].head.as_ref().or(self.head.as_ref()).unwrap_or(&self.table);
        let cache = &mut self.caches[self.config.num_hidden_layers];
        let work = &mut self.work;
        let slots = slots(&state, (&buffers.limit, table_blocks), &self.limits, (n_slots, width));
        let emitted = Emitted {
            tokens: state.emitted.as_view(),
            n_emitted: state.n_emitted.as_view(),
            drafts: state.drafts.as_view(),
        };
        let first_keys = drafter.keys(false);
        let is_shared = decoder.options.index_share && first_keys == Keys::Choose;
        let keys = if step > 0 && is_shared { Keys::Selected } else { first_keys };
        if step == 0 {
            let rows = buffers.window.first_mut((n_rows, n_slots));
            let wanted = buffers.n_wanted.slice(..n_slots);
            let n_propose = buffers.n_propose.slice_mut(..n_slots);
            device.step.draft(stream, (&slots, 0), &emitted, rows, (wanted, n_propose))?;
            let pass =
                buffers.window.pass((n_rows, n_slots), tables, Bounds::of_windows(max_len, width));
            drafter.begin(device, &pass, work.hidden.view(), (cache, keys), &mut work.all)?;
        }
        let n_propose = buffers.n_propose.slice(..n_slots);
        let rows = buffers.single.first_mut((n_slots, n_slots));
        device.step.single(
            stream,
            (&slots, step, step.checked_sub(1)),
            &emitted,
            n_propose,
            rows,
        )?;
        let pass = buffers.single.pass((n_slots, n_slots), tables, Bounds::of_windows(max_len, 1));
        if step == 0 {
            let rows = buffers.last_row.slice(..n_slots);
            drafter.narrow(device, rows, &work.all, &mut work.single)?;
        } else {
            let n = n_slots * hidden;
            stream.copy(work.single.x.slice(..n), work.hidden.slice_mut(..n))?;
            let at = (&mut *cache, keys);
            drafter.begin(device, &pass, work.hidden.view(), at, &mut work.single)?;
        }
        drafter.end(device, &pass, (cache, keys), &mut work.single)?;
        let x = (work.single.x.view(), hidden);
        device.linear(n_slots, x, head, work.logits.view_mut())?;
        let logits = work.logits.slice(..n_slots * device.sizes.vocab);
        let seqs = Some(buffers.single.seq.slice(..n_slots));
        let chosen = buffers.chosen.slice_mut(..n_slots);
        device.sampling.argmax(stream, logits, seqs, buffers.argmax.view_mut(), chosen)?;
        let chosen = buffers.chosen.slice(..n_slots);
        let n_propose = buffers.n_propose.slice_mut(..n_slots);
        device.step.take(stream, step, chosen, state.drafts.reborrow(), n_propose)
    }
}

/// What the kernels of a step know of the slots.
fn slots<'a>(
    state: &'a State<'_>,
    (limit, block_tables): (&'a Buffer<i32>, View<'a, i32>),
    limits: &PassLimits,
    (n_slots, width): (usize, usize),
) -> Slots<'a> {
    Slots {
        valid_len: state.valid_len.as_view(),
        limit: limit.slice(..n_slots),
        block_tables,
        block_size: limits.block_size,
        n_cache_slots: limits.num_blocks * limits.block_size,
        width,
    }
}

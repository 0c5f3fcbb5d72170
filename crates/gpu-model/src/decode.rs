//! Decode steps: a whole speculative step as one list of launches that never waits for the host,
//! and so as one graph for each number of slots.

use std::collections::BTreeMap;

use gpu_kernels::{
    AcceptedRuns, BeginState, Emitted, NextState, OldState, Sampling, SlotRecord, Slots, Windows,
};
use gpu_runtime::{Buffer, Event, Gpu, GpuError, Graph, Pinned, Stream, View, ViewMut};

use crate::layer::Keys;
use crate::loader::Element;
use crate::model::{Drafter, GpuModel, Target};
use crate::pass::{RowArrays, Tables};

/// How decode steps run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DecodeOptions {
    /// Drafts of a step.
    pub num_speculative_tokens: usize,
    /// Whether draft steps after the first attend what the first one selected.
    pub index_share: bool,
    /// Whether steps are captured, for each of these numbers of slots, ascending; the last one is
    /// the most.
    pub sizes: Vec<usize>,
    /// Whether steps are replayed as graphs; otherwise they are queued launch by launch.
    pub graphs: bool,
    /// Whether the records say how many drafts are accepted, for benches.
    pub is_forced: bool,
}

/// A block table that is new, or longer.
#[derive(Clone, Copy, Debug)]
pub struct TableUpdate<'a> {
    /// Which.
    pub table: u32,
    /// All its blocks.
    pub blocks: &'a [i32],
}

/// What came of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotResult<'a> {
    /// The accepted run; empty for a slot that failed or continued one that did.
    pub tokens: &'a [i32],
    /// Drafts for the next step.
    pub drafts: &'a [i32],
}

/// Steps in flight at most; each has host memory of its own.
const IN_FLIGHT: usize = 2;

/// What decode steps need beside the model.
pub(crate) struct Decoder {
    options: DecodeOptions,
    /// Drafts of a step and one.
    width: usize,
    /// The most slots.
    n_most: usize,
    state: Buffer<i32>,
    old: Buffer<i32>,
    records: Buffer<i32>,
    /// All block tables, `[tables, stride]`.
    tables: Buffer<i32>,
    stride: usize,
    slots: SlotBuffers,
    graphs: BTreeMap<usize, Graph>,
    host: [HostSide; IN_FLIGHT],
    /// Slots of the steps in flight, the oldest first.
    in_flight: Vec<usize>,
    n_launched: usize,
    /// Slots of the step launched last.
    n_last: usize,
}

/// Arrays of the slots of a step.
struct SlotBuffers {
    table_of: Buffer<i32>,
    tables: Buffer<i32>,
    limit: Buffer<i32>,
    n_wanted: Buffer<i32>,
    forced: Buffer<i32>,
    n_verified: Buffer<i32>,
    choices: Buffer<i32>,
    last_row: Buffer<i32>,
    chosen: Buffer<i32>,
    n_propose: Buffer<i32>,
    window: RowArrays,
    single: RowArrays,
    argmax: Buffer<u64>,
}

/// Host memory of a step in flight.
struct HostSide {
    records: Pinned<i32>,
    tables: Pinned<i32>,
    result: Pinned<i32>,
    done: Event,
}

/// The state of slots, in one buffer so that it is copied at once. Regions have room for the most
/// slots.
struct State<'a> {
    valid_len: ViewMut<'a, i32>,
    last_token: ViewMut<'a, i32>,
    n_emitted: ViewMut<'a, i32>,
    n_drafts: ViewMut<'a, i32>,
    drafts: ViewMut<'a, i32>,
    emitted: ViewMut<'a, i32>,
}

impl<'a> State<'a> {
    /// Integers for `n` slots.
    fn len(n: usize, width: usize) -> usize {
        n * (3 + 2 * width)
    }

    /// The first `n_slots` of a buffer for `n_most`.
    fn of(buffer: ViewMut<'a, i32>, (n_most, n_slots): (usize, usize), width: usize) -> Self {
        let mut rest = Some(buffer);
        let mut take = |per_slot: usize| {
            let (part, behind) = rest.take().expect("there is a rest").split_at(n_most * per_slot);
            rest = Some(behind);
            part.slice(..n_slots * per_slot)
        };
        Self {
            valid_len: take(1),
            last_token: take(1),
            n_emitted: take(1),
            n_drafts: take(1),
            drafts: take(width - 1),
            emitted: take(width),
        }
    }
}

impl Decoder {
    pub(crate) fn new(
        gpu: &Gpu,
        options: DecodeOptions,
        (n_tables, stride): (usize, usize),
        vocab: usize,
        max_len: usize,
    ) -> Result<Self, GpuError> {
        let width = options.num_speculative_tokens + 1;
        let n = *options.sizes.last().expect("there is a size");
        let len = State::len(n, width);
        let host = || {
            Ok::<_, GpuError>(HostSide {
                records: gpu.pinned(n * SlotRecord::len(width))?,
                tables: gpu.pinned(n_tables * stride)?,
                result: gpu.pinned(len)?,
                done: gpu.event()?,
            })
        };
        let stream = gpu.stream()?;
        let mut limit = gpu.alloc(n)?;
        // What a slot may write is the scheduler's business, which says it by the blocks.
        stream.upload(&vec![(max_len + width) as i32; n], &mut limit)?;
        let mut tables = gpu.alloc(n_tables * stride)?;
        stream.fill_bytes(&mut tables, 0xff)?;
        stream.synchronize()?;
        Ok(Self {
            width,
            n_most: n,
            state: gpu.alloc_zeroed(len)?,
            old: gpu.alloc_zeroed(len)?,
            records: gpu.alloc(n * SlotRecord::len(width))?,
            tables,
            stride,
            slots: SlotBuffers {
                table_of: gpu.alloc(n)?,
                tables: gpu.alloc_zeroed(n * stride)?,
                limit,
                n_wanted: gpu.alloc(n)?,
                forced: gpu.alloc(n)?,
                n_verified: gpu.alloc(n)?,
                choices: gpu.alloc_zeroed(n * width)?,
                last_row: gpu.alloc(n)?,
                chosen: gpu.alloc_zeroed(n)?,
                n_propose: gpu.alloc_zeroed(n)?,
                window: RowArrays::new(gpu, n * width, n)?,
                single: RowArrays::new(gpu, n, n)?,
                argmax: gpu.alloc(Sampling::scratch_len(n * width, vocab))?,
            },
            graphs: BTreeMap::new(),
            host: [host()?, host()?],
            in_flight: vec![],
            n_launched: 0,
            n_last: 0,
            options,
        })
    }

    /// The smallest size that holds `n_slots`.
    fn size_for(&self, n_slots: usize) -> usize {
        let sizes = &self.options.sizes;
        *sizes.iter().find(|&&size| size >= n_slots).expect("the step fits the largest size")
    }
}

impl<E: Element> GpuModel<E> {
    /// Prepares decode steps, and captures them where they are to be graphs. Returns how many
    /// launches each graph holds, by the number of slots.
    ///
    /// # Errors
    ///
    /// [`GpuError`] if a launch fails or memory is short.
    ///
    /// # Panics
    ///
    /// If no size is given, or drafts are wanted of a model with another number of MTP layers
    /// than 1.
    pub fn prepare_decode(
        &mut self,
        options: DecodeOptions,
    ) -> Result<Vec<(usize, usize)>, GpuError> {
        let k = options.num_speculative_tokens;
        assert!(k == 0 || self.mtp.len() == 1, "one MTP layer makes all drafts");
        let limits = &self.limits;
        let stride = limits.max_len.div_ceil(limits.block_size).next_multiple_of(4);
        let (gpu, vocab) = (&self.device.gpu, self.device.sizes.vocab);
        let shape = (limits.max_seqs, stride);
        let mut decoder = Decoder::new(gpu, options, shape, vocab, limits.max_len)?;
        let sizes = decoder.options.sizes.clone();
        let graphs = decoder.options.graphs;
        let mut captured = vec![];
        for size in sizes.into_iter().filter(|_| graphs) {
            let stream = self.device.stream.clone();
            // Once as it is: what is made at a first use is made outside of the capture.
            self.queue(&mut decoder, size)?;
            stream.synchronize()?;
            let graph = stream.capture(|_| self.queue(&mut decoder, size))?;
            captured.push((size, graph.n_nodes()));
            decoder.graphs.insert(size, graph);
        }
        self.decoder = Some(decoder);
        Ok(captured)
    }

    /// Queues a step over `slots`, and does not wait for it. At most two steps are not collected.
    ///
    /// # Errors
    ///
    /// [`GpuError`] if a launch fails.
    ///
    /// # Panics
    ///
    /// If decode steps were not prepared, or there are more slots or steps than there may be.
    pub fn launch_step(
        &mut self,
        updates: &[TableUpdate<'_>],
        slots: &[SlotRecord<'_>],
    ) -> Result<(), GpuError> {
        let mut decoder = self.decoder.take().expect("decode steps are prepared");
        let result = self.launch_with(&mut decoder, updates, slots);
        self.decoder = Some(decoder);
        result
    }

    fn launch_with(
        &mut self,
        decoder: &mut Decoder,
        updates: &[TableUpdate<'_>],
        slots: &[SlotRecord<'_>],
    ) -> Result<(), GpuError> {
        assert!(decoder.in_flight.len() < IN_FLIGHT, "too many steps in flight");
        let stream = self.device.stream.clone();
        let size = decoder.size_for(slots.len());
        let len = SlotRecord::len(decoder.width);
        let host = &mut decoder.host[decoder.n_launched % IN_FLIGHT];
        update_tables(&stream, updates, &mut decoder.tables, (host, decoder.stride))?;
        let records = &mut host.records[..size * len];
        for (idx, record) in records.chunks_exact_mut(len).enumerate() {
            match slots.get(idx) {
                Some(slot) => slot.write(record),
                None => SlotRecord::write_empty(record),
            }
        }
        let to = decoder.records.slice_mut(..size * len);
        // SAFETY: this half of the host's memory is written again only when the step that reads
        // it has been collected.
        #[expect(unsafe_code, reason = "copies that outlive the call")]
        unsafe {
            stream.upload_async(&host.records, 0, to)?;
        }
        match decoder.graphs.get(&size) {
            Some(graph) => stream.replay(graph)?,
            None => self.queue(decoder, size)?,
        }
        let host = &mut decoder.host[decoder.n_launched % IN_FLIGHT];
        // SAFETY: this half of the host's memory is read only when the step is collected.
        #[expect(unsafe_code, reason = "copies that outlive the call")]
        unsafe {
            stream.download_async(&decoder.state, &mut host.result, 0)?;
        }
        stream.record(&host.done)?;
        decoder.in_flight.push(size);
        decoder.n_launched += 1;
        decoder.n_last = size;
        Ok(())
    }

    /// Waits for the oldest step in flight and shows what came of each of its `n_slots` slots.
    ///
    /// # Errors
    ///
    /// [`GpuError`] if the device failed.
    ///
    /// # Panics
    ///
    /// If no step is in flight.
    pub fn collect_step(
        &mut self,
        n_slots: usize,
        show: &mut dyn FnMut(usize, SlotResult<'_>),
    ) -> Result<(), GpuError> {
        let decoder = self.decoder.as_mut().expect("decode steps are prepared");
        let oldest = decoder.n_launched - decoder.in_flight.len();
        decoder.in_flight.remove(0);
        let host = &decoder.host[oldest % IN_FLIGHT];
        host.done.synchronize()?;
        let (n, width) = (decoder.n_most, decoder.width);
        let (k, result) = (width - 1, &host.result);
        for slot in 0..n_slots {
            let n_emitted = result[2 * n + slot] as usize;
            let n_drafts = if n_emitted == 0 { 0 } else { result[3 * n + slot] as usize };
            let drafts = &result[4 * n + slot * k..][..n_drafts];
            let tokens = &result[(4 + k) * n + slot * width..][..n_emitted];
            show(slot, SlotResult { tokens, drafts });
        }
        Ok(())
    }

    /// All launches of a step over `n_slots` slots.
    fn queue(&mut self, decoder: &mut Decoder, n_slots: usize) -> Result<(), GpuError> {
        self.begin_step(decoder, n_slots)?;
        self.verify_step(decoder, n_slots)?;
        if decoder.width > 1 {
            self.draft_step(decoder, n_slots)?;
        }
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

    /// The target's pass over all windows, and what it accepts.
    fn verify_step(&mut self, decoder: &mut Decoder, n_slots: usize) -> Result<(), GpuError> {
        let Decoder { width, n_most, stride, .. } = *decoder;
        let (device, stream) = (&self.device, &self.device.stream);
        let state = State::of(decoder.state.view_mut(), (n_most, n_slots), width);
        let buffers = &mut decoder.slots;
        let tables = buffers.tables.slice(..n_slots * stride);
        let slots = slots(&state, (&buffers.limit, tables), &self.limits, (n_slots, width));
        let current = (
            state.last_token.as_view(),
            state.drafts.as_view(),
            state.n_drafts.as_view(),
        );
        let n_rows = n_slots * width;
        let rows = buffers.window.first_mut((n_rows, n_slots));
        let n_verified = buffers.n_verified.slice_mut(..n_slots);
        device.step.verify(stream, &slots, current, rows, n_verified)?;
        let tables = Tables { blocks: tables, block_size: self.limits.block_size };
        let bounds = (self.limits.max_len, width);
        let pass = buffers.window.pass((n_rows, n_slots), tables, bounds);
        let target = Target { table: &self.table, layers: &self.layers, norm: &self.norm };
        target.forward(device, &pass, &mut self.caches, &mut self.work.all)?;
        let hidden = n_rows * device.sizes.hidden;
        let work = &mut self.work;
        stream.copy(work.all.x.slice(..hidden), work.hidden.slice_mut(..hidden))?;
        let head = self.head.as_ref().unwrap_or(&self.table);
        let x = (work.hidden.view(), device.sizes.hidden);
        device.linear(n_rows, x, head, work.logits.view_mut())?;
        let choices = buffers.choices.slice_mut(..n_rows);
        let logits = work.logits.slice(..n_rows * device.sizes.vocab);
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

    /// The drafts of the next step.
    fn draft_step(&mut self, decoder: &mut Decoder, n_slots: usize) -> Result<(), GpuError> {
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
        let first_keys = drafter.keys(false);
        let limit = &buffers.limit;
        for step in 0..width - 1 {
            let slots = slots(&state, (limit, table_blocks), &self.limits, (n_slots, width));
            let emitted = Emitted {
                tokens: state.emitted.as_view(),
                n_emitted: state.n_emitted.as_view(),
                drafts: state.drafts.as_view(),
            };
            let is_shared = decoder.options.index_share && first_keys == Keys::Choose;
            let keys = if step > 0 && is_shared { Keys::Selected } else { first_keys };
            if step == 0 {
                let rows = buffers.window.first_mut((n_rows, n_slots));
                let wanted = buffers.n_wanted.slice(..n_slots);
                let n_propose = buffers.n_propose.slice_mut(..n_slots);
                device.step.draft(stream, (&slots, 0), &emitted, rows, (wanted, n_propose))?;
                let pass = buffers.window.pass((n_rows, n_slots), tables, (max_len, width));
                drafter.begin(device, &pass, work.hidden.view(), (cache, keys), &mut work.all)?;
            }
            let behind = step.checked_sub(1);
            let n_propose = buffers.n_propose.slice(..n_slots);
            let rows = buffers.single.first_mut((n_slots, n_slots));
            device.step.single(stream, (&slots, step, behind), &emitted, n_propose, rows)?;
            let pass = buffers.single.pass((n_slots, n_slots), tables, (max_len, 1));
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
            device.step.take(stream, step, chosen, state.drafts.reborrow(), n_propose)?;
        }
        Ok(())
    }
}

/// What the kernels of a step know of the slots.
fn slots<'a>(
    state: &'a State<'_>,
    (limit, block_tables): (&'a Buffer<i32>, View<'a, i32>),
    limits: &crate::PassLimits,
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

/// Copies tables to the device, -1 behind their blocks.
fn update_tables(
    stream: &Stream,
    updates: &[TableUpdate<'_>],
    tables: &mut Buffer<i32>,
    (host, stride): (&mut HostSide, usize),
) -> Result<(), GpuError> {
    for (idx, update) in updates.iter().enumerate() {
        let row = &mut host.tables[idx * stride..][..stride];
        let (blocks, rest) = row.split_at_mut(update.blocks.len());
        blocks.copy_from_slice(update.blocks);
        rest.fill(-1);
        let start = update.table as usize * stride;
        let to = tables.slice_mut(start..start + stride);
        // SAFETY: this half of the host's memory is written again only when the step that reads
        // it has been collected.
        #[expect(unsafe_code, reason = "copies that outlive the call")]
        unsafe {
            stream.upload_async(&host.tables, idx * stride, to)?;
        }
    }
    Ok(())
}

//! Decode steps: a whole speculative step as one list of launches that never waits for the host,
//! and so as one graph for each number of slots.

use std::collections::BTreeMap;

use gpu_kernels::{Sampling, SlotRecord};
use gpu_runtime::{Buffer, Gpu, GpuError, Graph, Inbox, Outbox, Stream};

use crate::loader::Element;
use crate::model::GpuModel;
use crate::pass::RowArrays;

mod passes;
mod state;
mod timing;

pub(crate) use state::State;
use timing::Marks;
pub use timing::{StepPart, StepTimes};

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
    /// What is replayed as a graph.
    pub graphs: StepGraphs,
    /// Whether the records say how many drafts are accepted, for benches.
    pub is_forced: bool,
}

/// What of a decode step is one graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepGraphs {
    /// Nothing: steps are queued launch by launch.
    None,
    /// Each [`StepPart`], to see what one graph saves.
    Parts,
    /// All of it.
    Whole,
}

/// A step that was captured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CapturedStep {
    /// Its slots.
    pub n_slots: usize,
    /// Kernels, copies and fills.
    pub n_launches: usize,
    /// Bytes of the device's memory that went with its capture.
    pub n_bytes: usize,
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
    /// The graphs of a step, one behind the other.
    graphs: BTreeMap<usize, Vec<Graph>>,
    marks: Option<Marks>,
    host: [HostSide; IN_FLIGHT],
    /// Slots of the steps in flight, the oldest first.
    in_flight: Vec<usize>,
    n_launched: usize,
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
    records: Outbox<i32>,
    tables: Outbox<i32>,
    result: Inbox<i32>,
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
                records: Outbox::new(gpu, n * SlotRecord::len(width))?,
                tables: Outbox::new(gpu, n_tables * stride)?,
                result: Inbox::new(gpu, len)?,
            })
        };
        let stream = gpu.stream()?;
        let mut limit = gpu.alloc(n)?;
        // What a slot may write is the scheduler's business, which says it by the blocks.
        stream.upload(&vec![(max_len + width) as i32; n], &mut limit)?;
        let mut tables = gpu.alloc(n_tables * stride)?;
        stream.fill_bytes(&mut tables, 0xff)?;
        // The steps before the captures have empty slots.
        let mut records = gpu.alloc(n * SlotRecord::len(width))?;
        stream.fill_bytes(&mut records, 0xff)?;
        stream.synchronize()?;
        Ok(Self {
            width,
            n_most: n,
            state: gpu.alloc_zeroed(len)?,
            old: gpu.alloc_zeroed(len)?,
            records,
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
            marks: None,
            host: [host()?, host()?],
            in_flight: vec![],
            n_launched: 0,
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
    /// Prepares decode steps, and captures them where they are to be graphs: the answer has an
    /// entry for each number of slots then.
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
    ) -> Result<Vec<CapturedStep>, GpuError> {
        let k = options.num_speculative_tokens;
        assert!(k == 0 || self.mtp.len() == 1, "one MTP layer makes all drafts");
        let limits = &self.limits;
        let (gpu, vocab) = (&self.device.gpu, self.device.sizes.vocab);
        let shape = (limits.max_seqs, limits.table_stride());
        // What was prepared before gives its memory back first.
        self.decoder = None;
        let mut decoder = Decoder::new(gpu, options, shape, vocab, limits.max_len)?;
        let (sizes, graphs) = (decoder.options.sizes.clone(), decoder.options.graphs);
        let mut captured = vec![];
        for n_slots in sizes.into_iter().filter(|_| graphs != StepGraphs::None) {
            captured.push(self.capture_step(&mut decoder, n_slots)?);
        }
        self.decoder = Some(decoder);
        Ok(captured)
    }

    fn capture_step(
        &mut self,
        decoder: &mut Decoder,
        n_slots: usize,
    ) -> Result<CapturedStep, GpuError> {
        let (gpu, stream) = (self.device.gpu.clone(), self.device.stream.clone());
        // Once as it is: what is made at a first use is made outside of the capture.
        self.queue(decoder, n_slots)?;
        stream.synchronize()?;
        let free = gpu.memory()?.free;
        let parts = StepPart::all(decoder.width - 1);
        let graphs = match decoder.options.graphs {
            StepGraphs::Parts => {
                let of = |part| stream.capture(|_| self.queue_part(decoder, n_slots, part));
                parts.into_iter().map(of).collect::<Result<Vec<_>, _>>()?
            }
            _ => vec![stream.capture(|_| self.queue(decoder, n_slots))?],
        };
        // A first replay may take memory, too.
        graphs.iter().try_for_each(|graph| stream.replay(graph))?;
        stream.synchronize()?;
        let n_launches = graphs.iter().map(Graph::n_nodes).sum();
        let n_bytes = free.saturating_sub(gpu.memory()?.free);
        decoder.graphs.insert(n_slots, graphs);
        Ok(CapturedStep { n_slots, n_launches, n_bytes })
    }

    /// Measures the parts of steps from now on, for [`GpuModel::collected_times`].
    ///
    /// # Errors
    ///
    /// [`GpuError`] if the device has failed.
    ///
    /// # Panics
    ///
    /// If decode steps were not prepared.
    pub fn time_parts(&mut self) -> Result<(), GpuError> {
        let decoder = self.decoder.as_mut().expect("decode steps are prepared");
        decoder.marks = Some(Marks::new(&self.device.gpu, StepPart::all(decoder.width - 1).len())?);
        Ok(())
    }

    /// The times of the step that was collected last.
    ///
    /// # Errors
    ///
    /// [`GpuError`] if the device has failed, or the step was launched before
    /// [`GpuModel::time_parts`].
    ///
    /// # Panics
    ///
    /// If no step was collected, or none is measured.
    pub fn collected_times(&self) -> Result<StepTimes, GpuError> {
        let decoder = self.decoder.as_ref().expect("decode steps are prepared");
        let marks = decoder.marks.as_ref().expect("the parts are measured");
        let n_collected = decoder.n_launched - decoder.in_flight.len();
        let step = n_collected.checked_sub(1).expect("a step was collected");
        let n_parts = match decoder.options.graphs {
            StepGraphs::Whole => 1,
            _ => StepPart::all(decoder.width - 1).len(),
        };
        marks.times(step, n_parts)
    }

    /// Queues a step over `slots`, and does not wait for it. At most two steps are not collected.
    /// One without slots ends with what was queued before it.
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
        if slots.is_empty() {
            decoder.host[decoder.n_launched % IN_FLIGHT].result.receive(&stream, &decoder.state)?;
            decoder.in_flight.push(0);
            decoder.n_launched += 1;
            return Ok(());
        }
        let size = decoder.size_for(slots.len());
        let (len, step) = (SlotRecord::len(decoder.width), decoder.n_launched);
        let marks = decoder.marks.take();
        let mark = |place| marks.as_ref().map_or(Ok(()), |marks| marks.set(&stream, step, place));
        mark(0)?;
        let host = &mut decoder.host[step % IN_FLIGHT];
        update_tables(&stream, updates, &mut decoder.tables, (host, decoder.stride))?;
        let records = &mut host.records.fill()?[..size * len];
        for (idx, record) in records.chunks_exact_mut(len).enumerate() {
            match slots.get(idx) {
                Some(slot) => slot.write(record),
                None => SlotRecord::write_empty(record),
            }
        }
        host.records.send(&stream, 0, decoder.records.slice_mut(..size * len))?;
        mark(1)?;
        let mut n_parts = 0;
        let mut end_part = || {
            n_parts += 1;
            mark(1 + n_parts)
        };
        if let Some(graphs) = decoder.graphs.get(&size) {
            graphs.iter().try_for_each(|graph| stream.replay(graph).and_then(|()| end_part()))?;
        } else {
            for part in StepPart::all(decoder.width - 1) {
                self.queue_part(decoder, size, part)?;
                end_part()?;
            }
        }
        let host = &mut decoder.host[step % IN_FLIGHT];
        host.result.receive(&stream, &decoder.state)?;
        mark(n_parts + 2)?;
        decoder.marks = marks;
        decoder.in_flight.push(size);
        decoder.n_launched += 1;
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
        let (n, width) = (decoder.n_most, decoder.width);
        let (k, result) = (width - 1, decoder.host[oldest % IN_FLIGHT].result.read()?);
        for slot in 0..n_slots {
            let n_emitted = result[2 * n + slot] as usize;
            let n_drafts = if n_emitted == 0 { 0 } else { result[3 * n + slot] as usize };
            let drafts = &result[4 * n + slot * k..][..n_drafts];
            let tokens = &result[(4 + k) * n + slot * width..][..n_emitted];
            show(slot, SlotResult { tokens, drafts });
        }
        Ok(())
    }
}

/// Copies tables to the device, -1 behind their blocks.
fn update_tables(
    stream: &Stream,
    updates: &[TableUpdate<'_>],
    tables: &mut Buffer<i32>,
    (host, stride): (&mut HostSide, usize),
) -> Result<(), GpuError> {
    let rows = host.tables.fill()?.chunks_exact_mut(stride);
    for (row, update) in rows.zip(updates) {
        let (blocks, rest) = row.split_at_mut(update.blocks.len());
        blocks.copy_from_slice(update.blocks);
        rest.fill(-1);
    }
    for (idx, update) in updates.iter().enumerate() {
        let start = update.table as usize * stride;
        host.tables.send(stream, idx * stride, tables.slice_mut(start..start + stride))?;
    }
    Ok(())
}

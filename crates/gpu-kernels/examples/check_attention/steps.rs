//! Whole steps of step state, each a replay of one captured graph, against a model on the host.

use anyhow::{Result, ensure};
use gpu_kernels::{AcceptedRuns, Emitted, NextState, RowsMut, Sampling, Slots, Step, Windows};
use gpu_runtime::{Buffer, GpuError, Graph, Stream};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::batch::{Elem, poisoned, upload};
use crate::sample::accepted_run;

#[derive(Clone, Copy)]
struct Shape {
    n_slots: usize,
    n_drafts: usize,
    n_layers: usize,
}

const BLOCK_SIZE: usize = 4;
const STRIDE: usize = 12;

/// A pass' rows: positions, sequences, slots, ids, first rows, lengths.
type Rows = [Vec<i32>; 6];

pub(crate) fn check<E: Elem>(stream: &Stream) -> Result<()> {
    let mut rng = ChaCha8Rng::seed_from_u64(4);
    let mut n_steps = 0;
    for n_slots in [1, 14, 130] {
        for (n_drafts, n_layers) in [(0, 1), (1, 1), (3, 1), (8, 1), (3, 2), (2, 3), (5, 2)] {
            let shape = Shape { n_slots, n_drafts, n_layers };
            let mut model = Model::new(&mut rng, shape);
            let mut device = Device::new::<E>(stream, &model)?;
            let graph = device.capture(stream)?;
            for _ in 0..8 {
                n_steps += 1;
                model.choose(&mut rng);
                device.feed(stream, &model)?;
                stream.replay(&graph)?;
                let passes = model.step();
                device.compare(stream, &model, &passes)?;
            }
        }
    }
    println!("step    {:4} {n_steps} captured steps: exact", E::NAME);
    Ok(())
}

/// What each slot has, and what the models would choose in the next step.
struct Model {
    shape: Shape,
    tables: Vec<i32>,
    limit: Vec<i32>,
    n_wanted: Vec<i32>,
    valid_len: Vec<i32>,
    last_token: Vec<i32>,
    drafts: Vec<i32>,
    n_drafts: Vec<i32>,
    ids: Vec<i32>,
    chosen: Vec<Vec<i32>>,
    emitted: Vec<Vec<i32>>,
}

impl Model {
    fn new(rng: &mut ChaCha8Rng, shape: Shape) -> Self {
        let Shape { n_slots, n_drafts: k, .. } = shape;
        let mut some = |n: usize, low: i32, high: i32| -> Vec<i32> {
            (0..n).map(|_| rng.random_range(low..high)).collect()
        };
        let most = (BLOCK_SIZE * STRIDE) as i32;
        Self {
            shape,
            tables: some(n_slots * STRIDE, 0, 1000),
            limit: some(n_slots, 10, most + 1),
            n_wanted: some(n_slots, 0, k as i32 + 1),
            valid_len: some(n_slots, -1, 10),
            last_token: some(n_slots, 0, 100),
            drafts: some(n_slots * k, 0, 100),
            n_drafts: some(n_slots, 0, k as i32 + 1),
            ids: vec![0; n_slots * (k + 1)],
            chosen: vec![vec![0; n_slots]; k],
            emitted: vec![Vec::new(); n_slots],
        }
    }

    /// Chooses what the target and the draft layers would: mostly the drafts, seldom nothing.
    fn choose(&mut self, rng: &mut ChaCha8Rng) {
        let Shape { n_slots, n_drafts: k, .. } = self.shape;
        for slot in 0..n_slots {
            for i in 0..=k {
                let right = i < k && rng.random_range(0..4) > 0;
                let id = if right { self.drafts[slot * k + i] } else { rng.random_range(0..100) };
                let fails = rng.random_range(0..40) == 0;
                self.ids[slot * (k + 1) + i] = if fails { -1 } else { id };
            }
        }
        let mut id = || if rng.random_range(0..20) == 0 { -1 } else { rng.random_range(0..100) };
        self.chosen.iter_mut().flatten().for_each(|chosen| *chosen = id());
    }

    fn cache_slot(&self, slot: usize, pos: usize) -> i32 {
        let block = self.tables[slot * STRIDE + pos / BLOCK_SIZE];
        block * BLOCK_SIZE as i32 + (pos % BLOCK_SIZE) as i32
    }

    /// A pass of the given rows of each slot, position, whether it writes, and id, in windows of
    /// `width` rows.
    fn pass(&self, width: usize, rows: &[Vec<(usize, bool, i32)>]) -> Rows {
        let [mut pos, mut seq, mut to, mut ids, mut starts, mut lens] = Rows::default();
        for (slot, rows) in rows.iter().enumerate() {
            starts.push((slot * width) as i32);
            lens.push(rows.last().map_or(0, |&(at, ..)| at as i32 + 1));
            for &(at, writes, id) in rows {
                pos.push(at as i32);
                seq.push(slot as i32);
                to.push(if writes { self.cache_slot(slot, at) } else { -1 });
                ids.push(id);
            }
            for array in [&mut pos, &mut seq, &mut to] {
                array.resize((slot + 1) * width, -1);
            }
            ids.resize((slot + 1) * width, 0);
        }
        starts.push((rows.len() * width) as i32);
        [pos, seq, to, ids, starts, lens]
    }

    /// Takes a step and returns its passes.
    fn step(&mut self) -> Vec<Rows> {
        let Shape { n_slots, n_drafts: k, n_layers } = self.shape;
        let (width, mut passes) = (k + 1, Vec::new());
        // The tokens of each slot's window, as many as fit.
        let window = |slot: usize| {
            let (len, limit) = (self.valid_len[slot], self.limit[slot]);
            if len < 0 || len >= limit {
                return Vec::new();
            }
            let n = self.n_drafts[slot].min(limit - 1 - len) as usize;
            let drafts = &self.drafts[slot * k..][..n];
            [&[self.last_token[slot]], drafts].concat()
        };
        let windows: Vec<Vec<i32>> = (0..n_slots).map(window).collect();
        let first: Vec<usize> = self.valid_len.iter().map(|&len| len.max(0) as usize).collect();
        let place = |slot: usize, tokens: &[i32]| {
            let rows = tokens.iter().enumerate();
            rows.map(|(i, &token)| (first[slot] + i, true, token)).collect::<Vec<_>>()
        };
        let rows: Vec<_> = (0..n_slots).map(|slot| place(slot, &windows[slot])).collect();
        passes.push(self.pass(width, &rows));

        let run = |slot: usize| match windows[slot].get(1..) {
            Some(drafts) => accepted_run(&self.ids[slot * width..], drafts, None),
            None => Vec::new(),
        };
        let emitted: Vec<Vec<i32>> = (0..n_slots).map(run).collect();
        let wanted = |slot: usize| {
            let end = (first[slot] + emitted[slot].len()) as i32;
            let most = self.n_wanted[slot].min(self.limit[slot] - 1 - end).max(0) as usize;
            if emitted[slot].is_empty() { 0 } else { most }
        };
        let mut n_propose: Vec<usize> = (0..n_slots).map(wanted).collect();
        let mut drafts = vec![Vec::new(); n_slots];
        for step in 0..k {
            if step < n_layers {
                // Row i embeds the token 1 + step behind it, or the last known one.
                let row_ids = |slot: usize| -> Vec<i32> {
                    let known = [&emitted[slot][..], &drafts[slot]].concat();
                    let at = |i: usize| (i + step).min(known.len() - 1);
                    (0..emitted[slot].len()).map(|i| known[at(i)]).collect()
                };
                let rows: Vec<_> = (0..n_slots).map(|slot| place(slot, &row_ids(slot))).collect();
                passes.push(self.pass(width, &rows));
            }
            let single = |slot: usize| {
                let end = first[slot] + emitted[slot].len();
                match (n_propose[slot] > step, step < n_layers) {
                    (false, _) => vec![],
                    (true, true) => vec![(end - 1, false, 0)],
                    (true, false) => {
                        vec![(end + step / n_layers - 1, true, drafts[slot][step - 1])]
                    }
                }
            };
            let rows: Vec<_> = (0..n_slots).map(single).collect();
            passes.push(self.pass(1, &rows));
            for slot in 0..n_slots {
                let id = self.chosen[step][slot];
                if n_propose[slot] > step && id >= 0 {
                    drafts[slot].push(id);
                } else {
                    n_propose[slot] = n_propose[slot].min(step);
                }
            }
        }
        self.emitted = emitted;
        self.advance(&drafts, &n_propose);
        passes
    }

    /// Moves the state behind what was emitted.
    fn advance(&mut self, drafts: &[Vec<i32>], n_propose: &[usize]) {
        let k = self.shape.n_drafts;
        for (slot, emitted) in self.emitted.iter().enumerate() {
            let Some(&last) = emitted.last() else { continue };
            self.last_token[slot] = last;
            self.valid_len[slot] += emitted.len() as i32;
            self.n_drafts[slot] = n_propose[slot] as i32;
            self.drafts[slot * k..][..n_propose[slot]].copy_from_slice(&drafts[slot]);
        }
    }
}

/// The same on the device.
struct Device {
    shape: Shape,
    kernels: (Step, Sampling),
    /// Tables, limits, wanted drafts.
    fixed: [Buffer<i32>; 3],
    /// Valid lengths, last tokens, numbers of drafts.
    state: [Buffer<i32>; 3],
    drafts: Buffer<i32>,
    ids: Buffer<i32>,
    chosen: Vec<Buffer<i32>>,
    /// Verified and proposed drafts, lengths of runs, last rows.
    counts: [Buffer<i32>; 4],
    emitted: Buffer<i32>,
    passes: Vec<[Buffer<i32>; 6]>,
}

impl Device {
    fn new<E: Elem>(stream: &Stream, model: &Model) -> Result<Self> {
        let gpu = stream.gpu();
        let shape = model.shape;
        let Shape { n_slots, n_drafts: k, n_layers } = shape;
        let filled = |n: usize| poisoned::<i32>(gpu, stream, n, 0x7b);
        let mut passes = Vec::new();
        let mut add = |width: usize| -> Result<()> {
            let n_rows = n_slots * width;
            let rows = || filled(n_rows);
            passes.push([
                rows()?,
                rows()?,
                rows()?,
                rows()?,
                filled(n_slots + 1)?,
                filled(n_slots)?,
            ]);
            Ok(())
        };
        add(k + 1)?;
        for step in 0..k {
            if step < n_layers {
                add(k + 1)?;
            }
            add(1)?;
        }
        let up = |values: &[i32]| upload(stream, values);
        Ok(Self {
            shape,
            kernels: (Step::new::<E>(gpu)?, Sampling::new::<E>(gpu)?),
            fixed: [up(&model.tables)?, up(&model.limit)?, up(&model.n_wanted)?],
            state: [up(&model.valid_len)?, up(&model.last_token)?, up(&model.n_drafts)?],
            drafts: up(&model.drafts)?,
            ids: filled(n_slots * (k + 1))?,
            chosen: (0..k).map(|_| filled(n_slots)).collect::<Result<_>>()?,
            counts: [filled(n_slots)?, filled(n_slots)?, filled(n_slots)?, filled(n_slots)?],
            emitted: filled(n_slots * (k + 1))?,
            passes,
        })
    }

    fn feed(&mut self, stream: &Stream, model: &Model) -> Result<()> {
        stream.upload(&model.ids, &mut self.ids)?;
        for (to, from) in self.chosen.iter_mut().zip(&model.chosen) {
            stream.upload(from, to)?;
        }
        Ok(())
    }

    fn capture(&mut self, stream: &Stream) -> Result<Graph> {
        Ok(stream.capture(|stream| self.launch(stream))?)
    }

    fn launch(&mut self, stream: &Stream) -> Result<(), GpuError> {
        let Shape { n_drafts: k, n_layers, .. } = self.shape;
        let (kernels, sampling) = &self.kernels;
        let [tables, limit, n_wanted] = &self.fixed;
        let [valid_len, last_token, n_drafts] = &mut self.state;
        let [n_verified, n_propose, n_emitted, last_row] = &mut self.counts;
        let slots = Slots {
            valid_len: valid_len.view(),
            limit: limit.view(),
            block_tables: tables.view(),
            block_size: BLOCK_SIZE,
            n_cache_slots: 1000 * BLOCK_SIZE,
            width: k + 1,
        };
        let mut passes = self.passes.iter_mut().map(rows_mut);
        let mut pass = || passes.next().expect("as many passes as `new` made");
        let known = (last_token.view(), self.drafts.view(), n_drafts.view());
        kernels.verify(stream, &slots, known, pass(), n_verified.view_mut())?;
        let windows = Windows {
            ids: self.ids.view(),
            drafts: self.drafts.view(),
            n_drafts: n_verified.view(),
            forced: None,
        };
        let out = AcceptedRuns {
            emitted: self.emitted.view_mut(),
            n_emitted: n_emitted.view_mut(),
            last_row: last_row.view_mut(),
        };
        sampling.verify(stream, &windows, out)?;
        for step in 0..k {
            let emitted = Emitted {
                tokens: self.emitted.view(),
                n_emitted: n_emitted.view(),
                drafts: self.drafts.view(),
            };
            if step < n_layers {
                let wanted = (n_wanted.view(), n_propose.view_mut());
                kernels.draft(stream, (&slots, step), &emitted, pass(), wanted)?;
            }
            let behind = (step / n_layers).checked_sub(1);
            kernels.single(stream, (&slots, step, behind), &emitted, n_propose.view(), pass())?;
            let chosen = self.chosen[step].view();
            kernels.take(stream, step, chosen, self.drafts.view_mut(), n_propose.view_mut())?;
        }
        if k == 0 {
            // Nothing decides how many drafts are proposed.
            stream.fill_bytes(&mut *n_propose, 0)?;
        }
        let state = NextState {
            valid_len: valid_len.view_mut(),
            last_token: last_token.view_mut(),
            n_drafts: n_drafts.view_mut(),
        };
        let counts = (n_emitted.view(), n_propose.view());
        kernels.advance(stream, self.emitted.view(), counts, state)
    }

    fn compare(&self, stream: &Stream, model: &Model, passes: &[Rows]) -> Result<()> {
        let Shape { n_slots, n_drafts: k, n_layers } = self.shape;
        let name = format!("{n_slots} slots, {k} drafts, {n_layers} layers");
        ensure!(passes.len() == self.passes.len(), "{name}: the number of passes");
        for (at, (want, got)) in passes.iter().zip(&self.passes).enumerate() {
            for (array, (want, got)) in want.iter().zip(got).enumerate() {
                let got = stream.download(got)?;
                ensure!(got == *want, "{name}: pass {at}, array {array}: {got:?}, not {want:?}");
            }
        }
        let state = [&model.valid_len, &model.last_token, &model.n_drafts];
        for (want, got) in state.iter().zip(&self.state) {
            ensure!(stream.download(got)? == **want, "{name}: the state");
        }
        let (drafts, emitted) = (stream.download(&self.drafts)?, stream.download(&self.emitted)?);
        for slot in 0..n_slots {
            let n = model.n_drafts[slot] as usize;
            let same = drafts[slot * k..][..n] == model.drafts[slot * k..][..n];
            let run = &model.emitted[slot];
            ensure!(same && emitted[slot * (k + 1)..][..run.len()] == *run, "{name}: tokens");
        }
        Ok(())
    }
}

fn rows_mut(arrays: &mut [Buffer<i32>; 6]) -> RowsMut<'_> {
    let [row_pos, row_seq, row_slot, ids, row_start, kv_len] =
        arrays.each_mut().map(|array| array.view_mut());
    RowsMut { row_pos, row_seq, row_slot, ids, row_start, kv_len }
}

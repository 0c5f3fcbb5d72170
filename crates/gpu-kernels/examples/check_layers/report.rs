//! How a kernel is checked, and what came of it.

use std::collections::BTreeMap;

use anyhow::{Result, bail};
use gpu_kernels::PassRows;
use gpu_runtime::{Buffer, Pod};
use half::bf16;

use crate::ROW_COUNTS;
use crate::layers::{Device, Element, noise};

/// Positions of the rotary tables.
pub(crate) const N_POSITIONS: usize = 500;
/// Rows whose reference is computed, and that are run alone.
const MAX_SAMPLES: usize = 9;

/// Rows on the device. A row's inputs and its results depend on its number alone.
pub(crate) struct Batch<'a, E> {
    pub(crate) device: &'a Device<E>,
    /// The number of each row; `None` for padding.
    pub(crate) rows: Vec<Option<usize>>,
    seq: Buffer<i32>,
    pos: Buffer<i32>,
    slot: Buffer<i32>,
}

/// The position of a row.
pub(crate) fn position(row: usize) -> usize {
    row * 131 % N_POSITIONS
}

impl<'a, E: Checked> Batch<'a, E> {
    fn new(device: &'a Device<E>, rows: Vec<Option<usize>>) -> Result<Self> {
        let seq: Vec<i32> = rows.iter().map(|row| row.map_or(-1, |row| row as i32 / 3)).collect();
        let pos: Vec<i32> =
            rows.iter().map(|row| row.map_or(-1, |row| position(row) as i32)).collect();
        // Padding rows have a slot as well, which they must not write.
        let slot: Vec<i32> = (0..rows.len() as i32).rev().map(|slot| slot + 1).collect();
        let (seq, pos) = (device.upload(&seq)?, device.upload(&pos)?);
        Ok(Self { device, rows, seq, pos, slot: device.upload(&slot)? })
    }

    pub(crate) fn pass(&self) -> PassRows<'_> {
        let n_rows = self.rows.len();
        PassRows { n_rows, seq: self.seq.view(), pos: self.pos.view(), slot: self.slot.view() }
    }

    /// Slots of a cache: one for each row, and one more at either end.
    pub(crate) fn n_slots(&self) -> usize {
        self.rows.len() + 2
    }

    /// What the rows wrote to a cache, and what is in the slots of no row.
    pub(crate) fn of_slots<T: Bits>(&self, cache: &Buffer<T>) -> Result<Output> {
        let mut output = Output::new(self, cache, self.n_slots())?;
        output.rows[1..=self.rows.len()].reverse();
        let first = output.rows.remove(self.rows.len() + 1);
        let last = output.rows.remove(0);
        output.rows.extend([first, last]);
        Ok(output)
    }

    /// Memory whose every value is a NaN, or -1.
    pub(crate) fn poisoned<T: Pod>(&self, n: usize) -> Result<Buffer<T>> {
        let mut buffer = self.device.gpu.alloc(n)?;
        self.device.stream.fill_bytes(&mut buffer, 0xff)?;
        Ok(buffer)
    }

    /// Rows of `n` values made by `of`, and what padding rows have.
    pub(crate) fn input<T: Pod>(
        &self,
        n: usize,
        padding: T,
        of: impl Fn(usize) -> Vec<T>,
    ) -> Result<Buffer<T>> {
        let of = |row: &Option<usize>| row.map_or_else(|| vec![padding; n], &of);
        self.device.upload(&self.rows.iter().flat_map(of).collect::<Vec<T>>())
    }

    /// Rows of `n` random values, and poison in padding rows.
    pub(crate) fn noise<T: Checked>(&self, seed: u64, n: usize) -> Result<Buffer<T>> {
        let poison = T::of(f32::from_bits(u32::MAX));
        self.input(n, poison, |row| row_noise(seed, row, n))
    }
}

/// The values of a row under one name.
pub(crate) fn row_noise<T: Checked>(seed: u64, row: usize, n: usize) -> Vec<T> {
    noise(seed << 32 | row as u64, n, 2.0)
}

/// As [`row_noise`], for references.
pub(crate) fn row_values<T: Checked>(seed: u64, row: usize, n: usize) -> Vec<f64> {
    values(&row_noise::<T>(seed, row, n))
}

pub(crate) fn values<T: Checked>(values: &[T]) -> Vec<f64> {
    values.iter().map(|&value| value.number()).collect()
}

/// What a kernel wrote, as numbers and as bits.
pub(crate) trait Bits: Pod {
    fn bits(self) -> u32;
    fn number(self) -> f64;
    const POISON: u32;
}

macro_rules! bits {
    ($ty:ty, $poison:expr, $bits:expr, $number:expr) => {
        impl Bits for $ty {
            const POISON: u32 = $poison;
            fn bits(self) -> u32 {
                $bits(self)
            }
            fn number(self) -> f64 {
                $number(self)
            }
        }
    };
}
bits!(f32, u32::MAX, f32::to_bits, f64::from);
bits!(bf16, 0xffff, |x: bf16| u32::from(x.to_bits()), bf16::to_f64);
bits!(i32, u32::MAX, i32::cast_unsigned, f64::from);

/// An element type that can be read back.
pub(crate) trait Checked: Element + Bits {
    const NAME: &'static str;
    /// Largest error of one rounding, relative to the value.
    const ROUNDING: f64;

    fn value(self) -> f32 {
        self.number() as f32
    }
}

impl Checked for f32 {
    const NAME: &'static str = "f32";
    const ROUNDING: f64 = 6e-8;
}

impl Checked for bf16 {
    const NAME: &'static str = "bf16";
    const ROUNDING: f64 = 1.0 / 256.0;
}

/// The rows of an output buffer: those of the batch, then others that nobody may write.
#[derive(PartialEq)]
pub(crate) struct Output {
    rows: Vec<Row>,
    poison: u32,
}

#[derive(Clone)]
struct Row {
    bits: Vec<u32>,
    numbers: Vec<f64>,
}

/// Bit by bit: the NaNs of poison are equal.
impl PartialEq for Row {
    fn eq(&self, other: &Self) -> bool {
        self.bits == other.bits
    }
}

impl Output {
    pub(crate) fn new<E, T: Bits>(
        batch: &Batch<'_, E>,
        buffer: &Buffer<T>,
        n_rows: usize,
    ) -> Result<Self> {
        let values = batch.device.stream.download(buffer)?;
        let row = |row: &[T]| Row {
            bits: row.iter().map(|&value| value.bits()).collect(),
            numbers: row.iter().map(|&value| value.number()).collect(),
        };
        let rows = values.chunks_exact(values.len() / n_rows).map(row).collect();
        Ok(Self { rows, poison: T::POISON })
    }
}

/// One kernel: how it runs, and what it computes.
pub(crate) struct Case<'a, E> {
    pub(crate) name: &'static str,
    /// Runs a batch and gives the outputs, some of one row each.
    pub(crate) run: &'a dyn Fn(&Batch<'_, E>) -> Result<Vec<Output>>,
    /// The outputs of a row.
    pub(crate) reference: &'a dyn Fn(usize) -> Vec<Vec<f64>>,
    /// Largest error of an output, relative to the greatest value of its row.
    pub(crate) tolerance: f64,
}

#[derive(Default)]
struct Line {
    n_batches: usize,
    worst: f64,
    tolerance: f64,
    n_faults: usize,
}

/// The outcome by kernel and element type.
#[derive(Default)]
pub(crate) struct Report {
    what: String,
    element: &'static str,
    lines: BTreeMap<(String, &'static str), Line>,
    n_faults: usize,
}

impl Report {
    pub(crate) fn begin(&mut self, what: String, element: &'static str) {
        (self.what, self.element) = (what, element);
    }

    pub(crate) fn check<E: Checked>(
        &mut self,
        device: &Device<E>,
        case: &Case<'_, E>,
    ) -> Result<()> {
        for n_rows in ROW_COUNTS {
            let mut faults = Vec::new();
            let worst = check_batch(device, case, n_rows, &mut faults)?;
            let line = self.lines.entry((case.name.to_owned(), self.element)).or_default();
            line.n_batches += 1;
            // A NaN is the worst.
            line.worst = if worst.is_nan() { worst } else { line.worst.max(worst) };
            line.tolerance = case.tolerance;
            line.n_faults += faults.len();
            self.n_faults += faults.len();
            for fault in faults.iter().take(3) {
                println!("FAULT {} {} {n_rows} rows: {fault}", self.what, case.name);
            }
        }
        Ok(())
    }

    pub(crate) fn finish(self) -> Result<()> {
        println!("{:<22} {:<5} batches   worst error   limit  faults", "kernel", "type");
        for ((name, element), line) in &self.lines {
            println!(
                "{name:<22} {element:<5} {:>7}   {:>11.2e} {:>7.0e} {:>7}",
                line.n_batches, line.worst, line.tolerance, line.n_faults
            );
        }
        match self.n_faults {
            0 => Ok(()),
            n => bail!("{n} faults"),
        }
    }
}

fn check_batch<E: Checked>(
    device: &Device<E>,
    case: &Case<'_, E>,
    n_rows: usize,
    faults: &mut Vec<String>,
) -> Result<f64> {
    // Padding behind every fourth row, and at the end.
    let mut rows: Vec<Option<usize>> = Vec::new();
    for row in 0..n_rows {
        rows.push(Some(row));
        if row % 4 == 3 || row + 1 == n_rows {
            rows.push(None);
        }
    }
    let batch = Batch::new(device, rows)?;
    let outputs = (case.run)(&batch)?;
    if (case.run)(&batch)? != outputs {
        faults.push("two runs differ".to_owned());
    }
    for (idx, output) in outputs.iter().enumerate() {
        let is_padding = |at: usize| batch.rows.get(at).copied().flatten().is_none();
        let is_poison = |row: &Row| row.bits.iter().all(|&bits| bits == output.poison);
        let written =
            output.rows.iter().enumerate().filter(|(at, row)| is_padding(*at) && !is_poison(row));
        let n_written = written.count();
        if n_written > 0 {
            faults.push(format!("output {idx}: {n_written} rows of nobody were written"));
        }
    }
    let step = n_rows.div_ceil(MAX_SAMPLES);
    let sampled = (0..n_rows).step_by(step).chain([n_rows - 1]);
    let mut worst = 0.0f64;
    for row in sampled {
        let at = batch.rows.iter().position(|&r| r == Some(row)).expect("a row of the batch");
        let alone = (case.run)(&Batch::new(device, vec![Some(row)])?)?;
        for (idx, expected) in (case.reference)(row).iter().enumerate() {
            let found = &outputs[idx].rows[at];
            if alone[idx].rows[0].bits != found.bits {
                faults.push(format!("output {idx}, row {row}: other bits alone"));
            }
            let error = relative_error(&found.numbers, expected);
            if error.is_nan() || error > case.tolerance {
                faults.push(format!("output {idx}, row {row}: error {error:.2e}"));
            }
            worst = if error.is_nan() { error } else { worst.max(error) };
        }
    }
    Ok(worst)
}

/// The greatest difference over the greatest expected value; NaN where something is NaN.
fn relative_error(found: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len(), "an output and its reference are of one width");
    let scale = expected.iter().fold(1e-30f64, |max, x| max.max(x.abs()));
    let differences = found.iter().zip(expected).map(|(a, b)| (a - b).abs() / scale);
    differences.fold(0.0, |worst: f64, x| if x > worst || x.is_nan() { x } else { worst })
}

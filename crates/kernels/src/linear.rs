//! Linear layers with packed weights.

use std::ops::Range;

use half::bf16;
use quantization::{Codes, QuantizedMatrix};

use crate::parallel::{Disjoint, for_each_task, n_threads};
use crate::simd::{Isa, dispatch};

mod panels;
mod quantized;
mod tile;

use panels::{Bf16Row, E2m1Row, E4m3Row, F32Row, PANEL, PanelRow, join, pack};
use quantized::QuantizedPanels;
use tile::{Input, Output, Tile};

/// Panels of a task.
const TASK_PANELS: usize = 4;
/// Rows of a task, a multiple of the tallest register tile.
const TASK_ROWS: usize = 64;

/// The weight of a linear layer `y = x W^T`, packed for the CPU.
///
/// The weight `[n_out, n_in]` is stored as panels of 32 outputs, each `[n_in, 32]` and padded with
/// zero outputs. Every output element is one chain of fused multiply-adds over the inputs in
/// ascending order, in f32, whatever the storage type and the batch: a quantised weight gives the
/// bits that its values in f32 give.
#[derive(Clone, Debug)]
pub struct PackedLinear {
    n_in: usize,
    n_out: usize,
    /// One behind the other along the outputs; at least one.
    parts: Vec<Part>,
}

#[derive(Clone, Debug)]
struct Part {
    n_out: usize,
    panels: Panels,
}

#[derive(Clone, Debug)]
enum Panels {
    F32(Vec<F32Row>),
    Bf16(Vec<Bf16Row>),
    E4m3(QuantizedPanels<E4m3Row>),
    E2m1(QuantizedPanels<E2m1Row>),
}

impl PackedLinear {
    /// Packs an f32 weight `[n_out, n_in]`, row-major.
    ///
    /// # Panics
    ///
    /// If `n_in` is 0 or does not divide the number of weights.
    #[must_use]
    pub fn from_f32(weight: &[f32], n_in: usize) -> Self {
        let n_out = count_outputs(weight.len(), n_in);
        Self::of_part(n_in, n_out, Panels::F32(pack(weight, n_in)))
    }

    /// Packs a bf16 weight `[n_out, n_in]`, row-major; it stays bf16 in memory.
    ///
    /// # Panics
    ///
    /// If `n_in` is 0 or does not divide the number of weights.
    #[must_use]
    pub fn from_bf16(weight: &[bf16], n_in: usize) -> Self {
        let n_out = count_outputs(weight.len(), n_in);
        Self::of_part(n_in, n_out, Panels::Bf16(pack(weight, n_in)))
    }

    /// Packs a quantised weight; its codes and scales stay as they are in memory, unless there is
    /// a scale of 2^120 or more among them: then the weight becomes f32.
    ///
    /// # Panics
    ///
    /// If the weight has no columns.
    #[must_use]
    pub fn from_quantized(weight: &QuantizedMatrix) -> Self {
        let (n_in, n_out) = (weight.n_in(), weight.n_out());
        assert!(n_in > 0, "the weight is [n_out, n_in]");
        let panels = match weight.codes() {
            Codes::E4m3(codes) => QuantizedPanels::new(weight, codes).map(Panels::E4m3),
            Codes::E2m1(codes) => QuantizedPanels::new(weight, codes).map(Panels::E2m1),
        };
        let panels = panels.unwrap_or_else(|| {
            let mut values = vec![0.0; n_in * n_out];
            for (row, values) in values.chunks_exact_mut(n_in).enumerate() {
                weight.dequantize_row(row, values);
            }
            Panels::F32(pack(&values, n_in))
        });
        Self::of_part(n_in, n_out, panels)
    }

    /// One layer of the outputs of some, one behind the other.
    ///
    /// # Panics
    ///
    /// If there is none or they differ in their inputs.
    #[must_use]
    pub fn stack(layers: impl IntoIterator<Item = Self>) -> Self {
        let mut layers = layers.into_iter();
        let mut stack = layers.next().expect("a stack has at least one layer");
        for layer in layers {
            assert_eq!(layer.n_in, stack.n_in, "layers of a stack have the same inputs");
            stack.n_out += layer.n_out;
            for part in layer.parts {
                stack.push(part);
            }
        }
        stack
    }

    fn of_part(n_in: usize, n_out: usize, panels: Panels) -> Self {
        Self { n_in, n_out, parts: vec![Part { n_out, panels }] }
    }

    /// Appends a part, to the last one if it can: longer parts make better tasks.
    fn push(&mut self, mut part: Part) {
        let last = self.parts.last_mut().expect("a layer has a part");
        let is_joined = last.n_out.is_multiple_of(PANEL)
            && match (&mut last.panels, &mut part.panels) {
                (Panels::F32(last), Panels::F32(part)) => join(last, part),
                (Panels::Bf16(last), Panels::Bf16(part)) => join(last, part),
                (Panels::E4m3(last), Panels::E4m3(part)) => last.join(part),
                (Panels::E2m1(last), Panels::E2m1(part)) => last.join(part),
                _ => false,
            };
        if is_joined {
            last.n_out += part.n_out;
        } else {
            self.parts.push(part);
        }
    }

    /// Inputs of a row.
    #[must_use]
    pub fn n_in(&self) -> usize {
        self.n_in
    }

    /// Outputs of a row.
    #[must_use]
    pub fn n_out(&self) -> usize {
        self.n_out
    }

    /// `y = x W^T` for `x` `[n_rows, n_in]` and `y` `[n_rows, n_out]`.
    ///
    /// # Panics
    ///
    /// If the lengths do not match.
    pub fn forward(&self, x: &[f32], y: &mut [f32]) {
        self.forward_on(Isa::detect(), x, y);
    }

    /// The cost of a call, in multiply-adds.
    pub(crate) fn cost(&self, n_rows: usize) -> usize {
        let parts = self.parts.iter();
        parts.map(|part| part.n_out * self.n_in * (n_rows + part.panels.cost_of_weight())).sum()
    }

    pub(crate) fn forward_on(&self, isa: Isa, x: &[f32], y: &mut [f32]) {
        assert!(x.len().is_multiple_of(self.n_in), "x is [n_rows, n_in]");
        let n_rows = x.len() / self.n_in;
        assert_eq!(y.len(), n_rows * self.n_out, "y is [n_rows, n_out]");
        let n_column_tasks: usize = self.parts.iter().map(Part::n_tasks).sum();
        let n_tasks = n_column_tasks * n_rows.div_ceil(TASK_ROWS);
        let y = Disjoint::new(y);
        for_each_task(n_tasks, n_threads(self.cost(n_rows)), |task| {
            let first_row = task / n_column_tasks * TASK_ROWS;
            let row_end = n_rows.min(first_row + TASK_ROWS);
            let x = &x[first_row * self.n_in..row_end * self.n_in];
            let input = Input { x, stride: self.n_in, n_in: self.n_in };
            let (part, part_output, part_task) = self.column_task(task % n_column_tasks);
            let panels = part_task * TASK_PANELS..(part_task + 1) * TASK_PANELS;
            let panels = panels.start..panels.end.min(part.n_out.div_ceil(PANEL));
            let output = Output {
                y: &y,
                stride: self.n_out,
                first_row,
                first_output: part_output + panels.start * PANEL,
                output_end: part_output + part.n_out,
            };
            part.panels.run(isa, panels, input, output);
        });
    }

    /// The part of a task over the parts, its first output and the task among its own.
    fn column_task(&self, mut task: usize) -> (&Part, usize, usize) {
        let mut first_output = 0;
        for part in &self.parts {
            if task < part.n_tasks() {
                return (part, first_output, task);
            }
            task -= part.n_tasks();
            first_output += part.n_out;
        }
        unreachable!("a task has its part")
    }
}

impl Part {
    fn n_tasks(&self) -> usize {
        self.n_out.div_ceil(PANEL * TASK_PANELS)
    }
}

impl Panels {
    /// What it costs to have a weight at hand, in multiply-adds: reading a byte takes as long as
    /// two of them, and decoding a code as reading a few bytes.
    fn cost_of_weight(&self) -> usize {
        match self {
            Self::F32(_) | Self::E4m3(_) | Self::E2m1(_) => 8,
            Self::Bf16(_) => 4,
        }
    }

    fn run(&self, isa: Isa, range: Range<usize>, input: Input<'_>, output: Output<'_>) {
        match self {
            Self::F32(panels) => run_tile(isa, panels, range, input, output),
            Self::Bf16(panels) => run_tile(isa, panels, range, input, output),
            Self::E4m3(panels) => panels.run(isa, range, input, output),
            Self::E2m1(panels) => panels.run(isa, range, input, output),
        }
    }
}

fn run_tile<W: PanelRow>(
    isa: Isa,
    panels: &[W],
    range: Range<usize>,
    input: Input<'_>,
    output: Output<'_>,
) {
    let panels = &panels[range.start * input.n_in..range.end * input.n_in];
    dispatch(isa, Tile { input, panels, output, is_continued: false });
}

fn count_outputs(n_weights: usize, n_in: usize) -> usize {
    assert!(n_in > 0 && n_weights.is_multiple_of(n_in), "the weight is [n_out, n_in]");
    n_weights / n_in
}

#[cfg(test)]
mod tests;

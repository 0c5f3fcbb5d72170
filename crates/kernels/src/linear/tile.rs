//! The product of some rows and some panels in registers.

use std::ops::Range;

use super::panels::{PANEL, PanelRow};
use crate::parallel::Disjoint;
use crate::simd::{F32x16, Kernel, LANES};

/// Rows of inputs: the first `n_in` values of every `stride` of `x`.
#[derive(Clone, Copy)]
pub(super) struct Input<'a> {
    pub(super) x: &'a [f32],
    pub(super) stride: usize,
    pub(super) n_in: usize,
}

impl Input<'_> {
    /// Some of the inputs of each row.
    pub(super) fn columns(self, inputs: Range<usize>) -> Self {
        Self { x: &self.x[inputs.start..], stride: self.stride, n_in: inputs.len() }
    }

    fn n_rows(&self) -> usize {
        self.x.len().div_ceil(self.stride)
    }
}

/// Where results go: the rows and outputs of `y` `[.., stride]` that a task owns.
#[derive(Clone, Copy)]
pub(super) struct Output<'a> {
    pub(super) y: &'a Disjoint<'a, f32>,
    pub(super) stride: usize,
    pub(super) first_row: usize,
    pub(super) first_output: usize,
    /// Behind the last output that has a weight.
    pub(super) output_end: usize,
}

/// Some rows times some panels.
pub(super) struct Tile<'a, W> {
    pub(super) input: Input<'a>,
    /// `[n_panels, n_in]`.
    pub(super) panels: &'a [W],
    pub(super) output: Output<'a>,
    /// Whether sums go on from the output, where earlier inputs left them.
    pub(super) is_continued: bool,
}

impl<W: PanelRow> Kernel for Tile<'_, W> {
    type Output = ();

    #[inline(always)]
    fn run<V: F32x16>(self) {
        let n_rows = self.input.n_rows();
        let mut row = 0;
        while row < n_rows {
            row += self.rows::<V>(row, n_rows - row);
        }
    }
}

impl<W: PanelRow> Tile<'_, W> {
    /// Computes the next rows, at most as many as a register tile holds, and says how many.
    ///
    /// Few rows take several panels at once, so that enough chains hide the latency.
    #[inline(always)]
    fn rows<V: F32x16>(&self, row: usize, n_left: usize) -> usize {
        let tallest = if V::WIDE { 8 } else { 3 };
        let n_rows = n_left.min(tallest);
        match (n_rows, V::WIDE) {
            (1, true) => self.columns::<V, 1, 4>(row),
            (1, false) => self.columns::<V, 1, 2>(row),
            (2, true) => self.columns::<V, 2, 4>(row),
            (2, false) => self.columns::<V, 2, 1>(row),
            (3, true) => self.columns::<V, 3, 2>(row),
            (3, false) => self.columns::<V, 3, 1>(row),
            (4, _) => self.columns::<V, 4, 2>(row),
            (5, _) => self.columns::<V, 5, 2>(row),
            (6, _) => self.columns::<V, 6, 2>(row),
            (7, _) => self.columns::<V, 7, 1>(row),
            _ => self.columns::<V, 8, 1>(row),
        }
        n_rows
    }

    /// `R` rows times all panels of the tile, `P` at a time.
    #[inline(always)]
    fn columns<V: F32x16, const R: usize, const P: usize>(&self, row: usize) {
        let n_panels = self.panels.len() / self.input.n_in;
        let mut panel = 0;
        while panel + P <= n_panels {
            self.micro::<V, R, P>(row, panel);
            panel += P;
        }
        while panel < n_panels {
            self.micro::<V, R, 1>(row, panel);
            panel += 1;
        }
    }

    #[inline(always)]
    fn micro<V: F32x16, const R: usize, const P: usize>(&self, row: usize, panel: usize) {
        let Input { x, stride, n_in } = self.input;
        let x = &x[row * stride..][..(R - 1) * stride + n_in];
        let panels = &self.panels[panel * n_in..(panel + P) * n_in];
        let mut sums = [[[V::splat(0.0); 2]; P]; R];
        if self.is_continued {
            for (r, sums) in sums.iter_mut().enumerate() {
                for (p, sums) in sums.iter_mut().enumerate() {
                    *sums = self.load(row + r, panel + p);
                }
            }
        }
        for k in 0..n_in {
            let mut weights = [[V::splat(0.0); 2]; P];
            for (p, weights) in weights.iter_mut().enumerate() {
                // SAFETY: `panels` holds P * n_in rows, p < P and k < n_in.
                *weights = unsafe { panels.get_unchecked(p * n_in + k) }.load();
            }
            for (r, sums) in sums.iter_mut().enumerate() {
                // SAFETY: `x` holds (R - 1) * stride + n_in values, r < R and k < n_in.
                let value = V::splat(*unsafe { x.get_unchecked(r * stride + k) });
                for (sums, weights) in sums.iter_mut().zip(&weights) {
                    sums[0] = value.mul_add(weights[0], sums[0]);
                    sums[1] = value.mul_add(weights[1], sums[1]);
                }
            }
        }
        for (r, sums) in sums.into_iter().enumerate() {
            for (p, sums) in sums.into_iter().enumerate() {
                self.store(row + r, panel + p, sums);
            }
        }
    }

    /// The outputs of a row and a panel.
    #[inline(always)]
    #[expect(clippy::mut_from_ref, reason = "the output is a buffer that tasks share")]
    fn outputs(&self, row: usize, panel: usize) -> &mut [f32] {
        let Output { y, stride, first_row, first_output, output_end } = self.output;
        let output = first_output + panel * PANEL;
        let n_outputs = (output_end - output).min(PANEL);
        // SAFETY: an element of the output belongs to one row and one panel, hence to one task,
        // and a task holds the outputs of one row and one panel at a time.
        unsafe { y.slice((first_row + row) * stride + output, n_outputs) }
    }

    #[inline(always)]
    fn load<V: F32x16>(&self, row: usize, panel: usize) -> [V; 2] {
        let y = self.outputs(row, panel);
        if let ([low, high], []) = y.as_chunks::<LANES>() {
            return [V::load(low), V::load(high)];
        }
        let mut lanes = [[0.0; LANES]; 2];
        lanes.as_flattened_mut()[..y.len()].copy_from_slice(y);
        lanes.map(|lanes| V::load(&lanes))
    }

    #[inline(always)]
    fn store<V: F32x16>(&self, row: usize, panel: usize, sums: [V; 2]) {
        let y = self.outputs(row, panel);
        if let ([low, high], []) = y.as_chunks_mut::<LANES>() {
            sums[0].store(low);
            sums[1].store(high);
            return;
        }
        let mut lanes = [[0.0; LANES]; 2];
        sums[0].store(&mut lanes[0]);
        sums[1].store(&mut lanes[1]);
        y.copy_from_slice(&lanes.as_flattened()[..y.len()]);
    }
}

//! Linear layers with packed weights.

use half::bf16;
use rayon::prelude::*;

use crate::parallel::{Disjoint, for_each_task, n_threads};
use crate::simd::{F32x16, Isa, Kernel, LANES, Lanes, dispatch};

/// Outputs of a panel: two vectors.
const PANEL: usize = 2 * LANES;
/// Panels of a task.
const TASK_PANELS: usize = 4;
/// Inputs that are packed at once.
const PACK_INPUTS: usize = 64;
/// Rows of a task, a multiple of the tallest register tile.
const TASK_ROWS: usize = 64;

/// The weight of a linear layer `y = x W^T`, packed for the CPU.
///
/// The weight `[n_out, n_in]` is stored as panels of 32 outputs, each `[n_in, 32]` and padded with
/// zero outputs. Every output element is one chain of fused multiply-adds over the inputs in
/// ascending order, in f32, whatever the storage type and the batch.
#[derive(Clone, Debug)]
pub struct PackedLinear {
    n_in: usize,
    n_out: usize,
    panels: Panels,
}

#[derive(Clone, Debug)]
enum Panels {
    F32(Vec<F32Row>),
    Bf16(Vec<Bf16Row>),
}

/// The weights of one input and the outputs of one panel.
trait PanelRow: Copy + Send + Sync {
    type Element: Copy + Sync;
    const ZERO: Self;

    /// Sets the weight of an output, which is zero so far.
    fn set(&mut self, output: usize, weight: Self::Element);
    fn load<V: F32x16>(&self) -> [V; 2];
}

#[derive(Clone, Copy, Debug)]
struct F32Row([Lanes; 2]);

/// Word `i` holds output `i` in its low half and output `16 + i` in its high half.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
struct Bf16Row([u32; LANES]);

impl PanelRow for F32Row {
    type Element = f32;
    const ZERO: Self = Self([Lanes::ZERO; 2]);

    fn set(&mut self, output: usize, weight: f32) {
        self.0[output / LANES].0[output % LANES] = weight;
    }

    #[inline(always)]
    fn load<V: F32x16>(&self) -> [V; 2] {
        [V::load(&self.0[0].0), V::load(&self.0[1].0)]
    }
}

impl PanelRow for Bf16Row {
    type Element = bf16;
    const ZERO: Self = Self([0; LANES]);

    fn set(&mut self, output: usize, weight: bf16) {
        self.0[output % LANES] |= u32::from(weight.to_bits()) << (16 * (output / LANES));
    }

    #[inline(always)]
    fn load<V: F32x16>(&self) -> [V; 2] {
        V::load_bf16_pair(&self.0)
    }
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
        Self { n_in, n_out, panels: Panels::F32(pack(weight, n_in)) }
    }

    /// Packs a bf16 weight `[n_out, n_in]`, row-major; it stays bf16 in memory.
    ///
    /// # Panics
    ///
    /// If `n_in` is 0 or does not divide the number of weights.
    #[must_use]
    pub fn from_bf16(weight: &[bf16], n_in: usize) -> Self {
        let n_out = count_outputs(weight.len(), n_in);
        Self { n_in, n_out, panels: Panels::Bf16(pack(weight, n_in)) }
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

    /// The cost of a call; reading a byte of the weight takes as long as two multiply-adds.
    pub(crate) fn cost(&self, n_rows: usize) -> usize {
        let n_bytes = match self.panels {
            Panels::F32(_) => size_of::<f32>(),
            Panels::Bf16(_) => size_of::<bf16>(),
        };
        self.n_in * self.n_out * (n_rows + 2 * n_bytes)
    }

    pub(crate) fn forward_on(&self, isa: Isa, x: &[f32], y: &mut [f32]) {
        assert!(x.len().is_multiple_of(self.n_in), "x is [n_rows, n_in]");
        let n_rows = x.len() / self.n_in;
        assert_eq!(y.len(), n_rows * self.n_out, "y is [n_rows, n_out]");
        match &self.panels {
            Panels::F32(panels) => self.run(isa, panels, x, y),
            Panels::Bf16(panels) => self.run(isa, panels, x, y),
        }
    }

    fn run<W: PanelRow>(&self, isa: Isa, panels: &[W], x: &[f32], y: &mut [f32]) {
        let n_rows = x.len() / self.n_in;
        let n_column_tasks = self.n_out.div_ceil(PANEL * TASK_PANELS);
        let n_tasks = n_column_tasks * n_rows.div_ceil(TASK_ROWS);
        let y = Disjoint::new(y);
        for_each_task(n_tasks, n_threads(self.cost(n_rows)), |task| {
            let first_row = task / n_column_tasks * TASK_ROWS;
            let row_end = n_rows.min(first_row + TASK_ROWS);
            let first_panel = task % n_column_tasks * TASK_PANELS;
            let panels = &panels[first_panel * self.n_in..];
            let tile = Tile {
                x: &x[first_row * self.n_in..row_end * self.n_in],
                n_in: self.n_in,
                panels: &panels[..panels.len().min(TASK_PANELS * self.n_in)],
                y: &y,
                n_out: self.n_out,
                first_row,
                first_output: first_panel * PANEL,
            };
            dispatch(isa, tile);
        });
    }
}

fn count_outputs(n_weights: usize, n_in: usize) -> usize {
    assert!(n_in > 0 && n_weights.is_multiple_of(n_in), "the weight is [n_out, n_in]");
    n_weights / n_in
}

fn pack<W: PanelRow>(weight: &[W::Element], n_in: usize) -> Vec<W> {
    let n_panels = (weight.len() / n_in).div_ceil(PANEL);
    let mut panels = Vec::new();
    (0..n_panels * n_in).into_par_iter().map(|_| W::ZERO).collect_into_vec(&mut panels);
    let outputs = weight.par_chunks(PANEL * n_in);
    panels.par_chunks_mut(n_in).zip(outputs).for_each(|(panel, rows)| {
        // A few inputs at a time, so that what is written stays in the nearest cache.
        for first in (0..n_in).step_by(PACK_INPUTS) {
            let inputs = first..n_in.min(first + PACK_INPUTS);
            for (output, row) in rows.chunks_exact(n_in).enumerate() {
                for (dst, &weight) in panel[inputs.clone()].iter_mut().zip(&row[inputs.clone()]) {
                    dst.set(output, weight);
                }
            }
        }
    });
    panels
}

/// Some rows times some panels.
struct Tile<'a, W> {
    /// `[n_rows, n_in]`.
    x: &'a [f32],
    n_in: usize,
    /// `[n_panels, n_in]`.
    panels: &'a [W],
    /// The whole output, `[.., n_out]`; this tile owns its rows and panels of it.
    y: &'a Disjoint<'a, f32>,
    n_out: usize,
    first_row: usize,
    first_output: usize,
}

impl<W: PanelRow> Kernel for Tile<'_, W> {
    type Output = ();

    #[inline(always)]
    fn run<V: F32x16>(self) {
        let n_rows = self.x.len() / self.n_in;
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
        let n_panels = self.panels.len() / self.n_in;
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
        let n_in = self.n_in;
        let x = &self.x[row * n_in..(row + R) * n_in];
        let panels = &self.panels[panel * n_in..(panel + P) * n_in];
        let mut sums = [[[V::splat(0.0); 2]; P]; R];
        for k in 0..n_in {
            let mut weights = [[V::splat(0.0); 2]; P];
            for (p, weights) in weights.iter_mut().enumerate() {
                // SAFETY: `panels` holds P * n_in rows, p < P and k < n_in.
                *weights = unsafe { panels.get_unchecked(p * n_in + k) }.load();
            }
            for (r, sums) in sums.iter_mut().enumerate() {
                // SAFETY: `x` holds R * n_in values, r < R and k < n_in.
                let value = V::splat(*unsafe { x.get_unchecked(r * n_in + k) });
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

    #[inline(always)]
    fn store<V: F32x16>(&self, row: usize, panel: usize, sums: [V; 2]) {
        let output = self.first_output + panel * PANEL;
        let n_outputs = (self.n_out - output).min(PANEL);
        let start = (self.first_row + row) * self.n_out + output;
        // SAFETY: an element of the output belongs to one row and one panel, hence to one tile,
        // and a tile stores it once.
        let y = unsafe { self.y.slice(start, n_outputs) };
        let mut lanes = [[0.0; LANES]; 2];
        match y.as_chunks_mut::<LANES>() {
            ([low, high], []) => {
                sums[0].store(low);
                sums[1].store(high);
            }
            _ => {
                sums[0].store(&mut lanes[0]);
                sums[1].store(&mut lanes[1]);
                y.copy_from_slice(&lanes.as_flattened()[..n_outputs]);
            }
        }
    }
}

#[cfg(test)]
mod tests;

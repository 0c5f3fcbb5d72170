//! Small operations on rows.

use gpu_runtime::{Args, GemmElement, GpuError, Pod, View, ViewMut};

use crate::Kernels;
use crate::check::{PassRows, has, has_rows, int, invalid, row_grid, width};

kernel_table!(Table { silu_and_mul, add_rows, cast_rows, gather_rows });

const THREADS: u32 = 128;

impl<E: GemmElement> Kernels<E> {
    /// `out[r, i] = silu(gate_up[r, i]) * gate_up[r, n + i]`: `[n_rows, 2 * n]` to `[n_rows, n]`.
    ///
    /// # Errors
    ///
    /// Shapes that do not fit; a failure of the driver.
    pub fn silu_and_mul(
        &self,
        rows: PassRows<'_>,
        gate_up: View<'_, E>,
        n: usize,
        out: ViewMut<'_, E>,
    ) -> Result<(), GpuError> {
        rows.check()?;
        has_rows("gate_up", gate_up, 2 * rows.n_rows * n)?;
        has_rows("out", out.as_view(), rows.n_rows * n)?;
        let mut args = Args::new();
        args.view(rows.seq).view(gate_up).i32(width("n", n)?).view_mut(out);
        let launch = row_grid(rows.n_rows, n / 8, THREADS);
        // SAFETY: all views have the rows.
        unsafe { self.launch(&self.elementwise.silu_and_mul, launch, &args) }
    }

    /// `residual[r] += x[r]`, both `[n_rows, n]`.
    ///
    /// # Errors
    ///
    /// Shapes that do not fit; a failure of the driver.
    pub fn add(
        &self,
        rows: PassRows<'_>,
        x: View<'_, E>,
        n: usize,
        residual: ViewMut<'_, f32>,
    ) -> Result<(), GpuError> {
        rows.check()?;
        has_rows("x", x, rows.n_rows * n)?;
        has_rows("residual", residual.as_view(), rows.n_rows * n)?;
        let mut args = Args::new();
        args.view(rows.seq).view(x).i32(width("n", n)?).view_mut(residual);
        let launch = row_grid(rows.n_rows, n / 8, THREADS);
        // SAFETY: all views have the rows.
        unsafe { self.launch(&self.elementwise.add_rows, launch, &args) }
    }

    /// `out[r] = x[r]`, rounded to the kernels' type, both `[n_rows, n]`.
    ///
    /// # Errors
    ///
    /// Shapes that do not fit; a failure of the driver.
    pub fn cast(
        &self,
        rows: PassRows<'_>,
        x: View<'_, f32>,
        n: usize,
        out: ViewMut<'_, E>,
    ) -> Result<(), GpuError> {
        rows.check()?;
        has_rows("x", x, rows.n_rows * n)?;
        has_rows("out", out.as_view(), rows.n_rows * n)?;
        let mut args = Args::new();
        args.view(rows.seq).view(x).i32(width("n", n)?).view_mut(out);
        let launch = row_grid(rows.n_rows, n / 8, THREADS);
        // SAFETY: all views have the rows.
        unsafe { self.launch(&self.elementwise.cast_rows, launch, &args) }
    }

    /// `out[i] = x[rows[i]]` of rows of `n` elements of any type, `x` as many rows as it has. An
    /// index that is no row of `x`, such as -1, writes nothing.
    ///
    /// # Errors
    ///
    /// Shapes that do not fit; a failure of the driver.
    pub fn gather_rows<T: Pod>(
        &self,
        rows: View<'_, i32>,
        x: View<'_, T>,
        n: usize,
        out: ViewMut<'_, T>,
    ) -> Result<(), GpuError> {
        let bytes = n * size_of::<T>();
        if bytes == 0 || !bytes.is_multiple_of(16) || rows.len() > 65_535 {
            return invalid(format!("{} rows of {bytes} bytes are gathered", rows.len()));
        }
        has("rows", rows, 0)?;
        has_rows("x", x, 0)?;
        has_rows("out", out.as_view(), rows.len() * n)?;
        let (n_rows, pieces) = (int("rows of x", x.len() / n)?, int("n", bytes / 16)?);
        let mut args = Args::new();
        args.view(rows).i32(n_rows).view(x).i32(pieces).view_mut(out);
        let launch = row_grid(rows.len(), bytes / 16, THREADS);
        // SAFETY: the kernel checks indices; `out` has a row for each.
        unsafe { self.launch(&self.elementwise.gather_rows, launch, &args) }
    }
}

//! Embedding, RMS norms, and the input of an MTP layer.

use gpu_runtime::{Args, GemmElement, GpuError, Launch, View, ViewMut};

use crate::Kernels;
use crate::check::{PassRows, has, has_rows, int, row_grid, row_threads};

kernel_table!(Table { embed, rms_norm, add_rms_norm, mtp_input });

/// `x / sqrt(mean(x^2) + eps) * weight`, over rows as wide as the weight.
#[derive(Clone, Copy, Debug)]
pub struct Norm<'a> {
    /// `[n]`.
    pub weight: View<'a, f32>,
    /// Added to the mean square.
    pub eps: f32,
}

impl Norm<'_> {
    /// Checks the norm for rows of `n` values; the threads for one row.
    pub(crate) fn check(&self, n: usize) -> Result<u32, GpuError> {
        has_rows("the weight of a norm", self.weight, n)?;
        row_threads("the width of a norm", n)
    }
}

/// What an MTP layer is made of.
#[derive(Clone, Copy, Debug)]
pub struct MtpInput<'a, E> {
    /// The token of each row, `[n_rows]`.
    pub ids: View<'a, i32>,
    /// Embeddings `[vocab, n]`.
    pub table: View<'a, E>,
    /// The hidden states of the pass before, `[n_rows, n]`.
    pub hidden: View<'a, E>,
    /// The norm of the embeddings.
    pub enorm: Norm<'a>,
    /// The norm of the hidden states; its `eps` is that of `enorm`.
    pub hnorm: Norm<'a>,
}

impl<E: GemmElement> Kernels<E> {
    /// `residual[r] = table[ids[r]]`: rows of `n` values from a table `[vocab, n]` to
    /// `[n_rows, n]`. An id outside the table gives NaN.
    ///
    /// # Errors
    ///
    /// Shapes that do not fit; a failure of the driver.
    pub fn embed(
        &self,
        rows: PassRows<'_>,
        ids: View<'_, i32>,
        table: View<'_, E>,
        n: usize,
        residual: ViewMut<'_, f32>,
    ) -> Result<(), GpuError> {
        rows.check()?;
        let threads = row_threads("the width of an embedding", n)?;
        has("ids", ids, rows.n_rows)?;
        has_rows("the table", table, 0)?;
        has_rows("residual", residual.as_view(), rows.n_rows * n)?;
        let (vocab, n) = (int("vocab", table.len() / n)?, int("n", n)?);
        let mut args = Args::new();
        args.view(ids).view(rows.seq).view(table).i32(vocab).i32(n).view_mut(residual);
        let launch = Launch::linear(rows.n_rows as u32, threads);
        // SAFETY: ids are checked by the kernel; rows of the table and of `residual` are theirs.
        unsafe { self.launch(&self.norms.embed, launch, &args) }
    }

    /// `out[r] = norm(residual[r])`, both `[n_rows, n]` where `n` is the length of the weight.
    ///
    /// # Errors
    ///
    /// Shapes that do not fit; a failure of the driver.
    pub fn rms_norm(
        &self,
        rows: PassRows<'_>,
        residual: View<'_, f32>,
        norm: Norm<'_>,
        out: ViewMut<'_, E>,
    ) -> Result<(), GpuError> {
        rows.check()?;
        let n = norm.weight.len();
        let threads = norm.check(n)?;
        has_rows("residual", residual, rows.n_rows * n)?;
        has_rows("out", out.as_view(), rows.n_rows * n)?;
        let n = int("n", n)?;
        let mut args = Args::new();
        args.view(rows.seq).view(residual).view(norm.weight).f32(norm.eps).i32(n).view_mut(out);
        let launch = Launch::linear(rows.n_rows as u32, threads);
        // SAFETY: all views have the rows.
        unsafe { self.launch(&self.norms.rms_norm, launch, &args) }
    }

    /// `residual[r] += x[r]`, then `out[r] = norm(residual[r])`, all `[n_rows, n]`.
    ///
    /// # Errors
    ///
    /// Shapes that do not fit; a failure of the driver.
    pub fn add_rms_norm(
        &self,
        rows: PassRows<'_>,
        x: View<'_, E>,
        residual: ViewMut<'_, f32>,
        norm: Norm<'_>,
        out: ViewMut<'_, E>,
    ) -> Result<(), GpuError> {
        rows.check()?;
        let n = norm.weight.len();
        let threads = norm.check(n)?;
        has_rows("x", x, rows.n_rows * n)?;
        has_rows("residual", residual.as_view(), rows.n_rows * n)?;
        has_rows("out", out.as_view(), rows.n_rows * n)?;
        let n = int("n", n)?;
        let mut args = Args::new();
        args.view(rows.seq).view(x).view_mut(residual).view(norm.weight).f32(norm.eps);
        args.i32(n).view_mut(out);
        let launch = Launch::linear(rows.n_rows as u32, threads);
        // SAFETY: all views have the rows.
        unsafe { self.launch(&self.norms.add_rms_norm, launch, &args) }
    }

    /// `out[r] = [enorm(table[ids[r]]), hnorm(hidden[r])]`, `[n_rows, 2 * n]`. An id outside the
    /// table gives NaN in its half.
    ///
    /// # Errors
    ///
    /// Shapes that do not fit; a failure of the driver.
    pub fn mtp_input(
        &self,
        rows: PassRows<'_>,
        input: &MtpInput<'_, E>,
        out: ViewMut<'_, E>,
    ) -> Result<(), GpuError> {
        rows.check()?;
        let MtpInput { ids, table, hidden, enorm, hnorm } = *input;
        let n = enorm.weight.len();
        let threads = enorm.check(n)?;
        hnorm.check(n)?;
        has("ids", ids, rows.n_rows)?;
        has_rows("the table", table, 0)?;
        has_rows("hidden", hidden, rows.n_rows * n)?;
        has_rows("out", out.as_view(), 2 * rows.n_rows * n)?;
        let (vocab, n) = (int("vocab", table.len() / n)?, int("n", n)?);
        let mut args = Args::new();
        args.view(ids).view(rows.seq).view(table).i32(vocab).view(hidden).view(enorm.weight);
        args.view(hnorm.weight).f32(enorm.eps).i32(n).view_mut(out);
        let launch = row_grid(rows.n_rows, 2 * threads as usize, threads);
        // SAFETY: ids are checked by the kernel; all other views have the rows.
        unsafe { self.launch(&self.norms.mtp_input, launch, &args) }
    }
}

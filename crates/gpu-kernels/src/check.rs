//! What every function checks before it launches, and the launch.

use gpu_runtime::{Args, GemmElement, GpuError, Kernel, Launch, Pod, View};

use crate::Kernels;

/// The rows of a pass. The last ones may be padding: rows whose `seq` is -1.
#[derive(Clone, Copy, Debug)]
pub struct PassRows<'a> {
    /// Rows, padding included; at most 65,535.
    pub n_rows: usize,
    /// The sequence of each row, `[n_rows]`; -1 for padding.
    pub seq: View<'a, i32>,
    /// The position of each row in its sequence, `[n_rows]`.
    pub pos: View<'a, i32>,
    /// The cache slot that each row writes, `[n_rows]`; -1 for none.
    pub slot: View<'a, i32>,
}

impl PassRows<'_> {
    pub(crate) fn check(&self) -> Result<(), GpuError> {
        if self.n_rows > 65_535 {
            return invalid(format!("{} rows in one pass", self.n_rows));
        }
        for (what, view) in [("seq", self.seq), ("pos", self.pos), ("slot", self.slot)] {
            has(what, view, self.n_rows)?;
        }
        Ok(())
    }
}

pub(crate) fn invalid<T>(what: impl Into<String>) -> Result<T, GpuError> {
    Err(GpuError::Invalid(what.into()))
}

/// Checks that a view has `n` elements.
pub(crate) fn has<T: Pod>(what: &str, view: View<'_, T>, n: usize) -> Result<(), GpuError> {
    if view.len() < n {
        return invalid(format!("{what} has {} elements of {n}", view.len()));
    }
    Ok(())
}

/// Checks that a view has `n` elements, which vector loads can read.
pub(crate) fn has_rows<T: Pod>(what: &str, view: View<'_, T>, n: usize) -> Result<(), GpuError> {
    if !view.ptr().address().is_multiple_of(16) {
        return invalid(format!("{what} does not begin at a multiple of 16 bytes"));
    }
    has(what, view, n)
}

/// The width of rows that are read in vectors, as kernels take it.
pub(crate) fn width(what: &str, n: usize) -> Result<i32, GpuError> {
    if n == 0 || !n.is_multiple_of(8) {
        return invalid(format!("{what} is {n}, not a multiple of 8"));
    }
    int(what, n)
}

/// A number as kernels take it.
pub(crate) fn int(what: &str, n: usize) -> Result<i32, GpuError> {
    i32::try_from(n).or_else(|_| invalid(format!("{what} is {n}, too large for a kernel")))
}

/// Threads of a block that keeps a row of `n` values in registers, eight a thread.
pub(crate) fn row_threads(what: &str, n: usize) -> Result<u32, GpuError> {
    // As in `rows.cuh`.
    const MAX_WIDTH: usize = 2 * 8 * 1024;
    width(what, n)?;
    if n > MAX_WIDTH {
        return invalid(format!("{what} is {n}; the kernels' rows have at most {MAX_WIDTH}"));
    }
    // Whole warps of any device.
    Ok((n / 8).next_multiple_of(64).min(1024) as u32)
}

/// Blocks of `block` threads for rows of `n` pieces each, with the row as x.
pub(crate) fn row_grid(n_rows: usize, n: usize, block: u32) -> Launch {
    let grid = [n_rows as u32, (n as u32).div_ceil(block), 1];
    Launch { grid, block: [block, 1, 1], shared: 0 }
}

impl<E: GemmElement> Kernels<E> {
    /// Queues a kernel; a launch without blocks is none.
    ///
    /// # Safety
    ///
    /// As for [`gpu_runtime::Stream::launch`].
    pub(crate) unsafe fn launch(
        &self,
        kernel: &Kernel,
        launch: Launch,
        args: &Args<'_>,
    ) -> Result<(), GpuError> {
        if launch.grid.contains(&0) {
            return Ok(());
        }
        // SAFETY: the caller vouches for the arguments.
        unsafe { self.stream.launch(kernel, launch, args) }
    }
}

//! Rotary embedding, and the cache entries that are rotated.

use gpu_runtime::{Args, GemmElement, GpuError, Ptr, View, ViewMut};

use crate::check::{PassRows, has, has_rows, int, invalid, row_grid, width};
use crate::{Kernels, Norm};

kernel_table!(Table { rope_heads, mla_latent, index_key });

/// Cosines and sines of every position. A row at a position that the table lacks becomes NaN.
#[derive(Clone, Copy, Debug)]
pub struct RopeTable<'a> {
    /// `[n_positions, rope_dim / 2]`.
    pub cos: View<'a, f32>,
    /// `[n_positions, rope_dim / 2]`.
    pub sin: View<'a, f32>,
    /// Values of a head that are rotated.
    pub rope_dim: usize,
    /// Pairs are elements `2i` and `2i + 1` if true; `i` and `i + rope_dim / 2` if false.
    pub interleaved: bool,
}

impl<'a> RopeTable<'a> {
    /// Checks the table and appends it to the arguments of a kernel.
    fn push(&self, args: &mut Args<'a>) -> Result<(), GpuError> {
        let half = self.rope_dim / 2;
        if half == 0 || !self.rope_dim.is_multiple_of(2) || self.cos.len() != self.sin.len() {
            return invalid(format!("a rotary table of width {}", self.rope_dim));
        }
        args.view(self.cos).view(self.sin);
        args.i32(int("positions", self.cos.len() / half)?);
        args.i32(int("rope_dim", half)?).i32(self.interleaved.into());
        Ok(())
    }
}

/// Where heads lie in rows: the rotated part of head `h` of row `r` begins at element
/// `start + r * row_stride + h * head_stride`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heads {
    /// Heads of a row.
    pub n_heads: usize,
    /// The first rotated element of the first head.
    pub start: usize,
    /// From a row to the next one.
    pub row_stride: usize,
    /// From a head to the next one.
    pub head_stride: usize,
}

impl Heads {
    fn push(&self, args: &mut Args<'_>) -> Result<(), GpuError> {
        args.i32(int("the stride of rows", self.row_stride)?);
        args.i32(int("the stride of heads", self.head_stride)?);
        Ok(())
    }

    fn check(&self, what: &str, len: usize, n_rows: usize, rope: usize) -> Result<(), GpuError> {
        let Self { n_heads, start, row_stride, head_stride } = *self;
        let last = |n: usize| n.saturating_sub(1);
        let end = start + last(n_rows) * row_stride + last(n_heads) * head_stride + rope;
        let are_apart = head_stride >= rope && row_stride >= last(n_heads) * head_stride + rope;
        if n_heads == 0 || !are_apart || (n_rows > 0 && end > len) {
            return invalid(format!("{n_rows} rows of {what}, {self:?}, in {len} elements"));
        }
        Ok(())
    }
}

/// Rows `[query, latent, key, ..]` of the projections from the hidden state.
#[derive(Debug)]
pub struct MlaLatents<'a, E> {
    /// `[n_rows, row_stride]`.
    pub qkv: View<'a, E>,
    /// From a row to the next one, a multiple of 8.
    pub row_stride: usize,
    /// Width of the query part in front.
    pub q_width: usize,
    /// Normalises the query part to `[n_rows, q_width]`; `None` leaves it to the caller.
    pub q_norm: Option<(Norm<'a>, ViewMut<'a, E>)>,
    /// Normalises the latent; as long as the latent is wide.
    pub kv_norm: Norm<'a>,
}

/// Index keys before their norm.
#[derive(Clone, Copy, Debug)]
pub struct IndexKeys<'a, E> {
    /// `[n_rows, row_stride]`, of which the first values are the key.
    pub keys: View<'a, E>,
    /// From a row to the next one.
    pub row_stride: usize,
    /// Weight of the layer norm, as long as the key is wide: at most 1024.
    pub weight: View<'a, f32>,
    /// Bias of the layer norm.
    pub bias: View<'a, f32>,
    /// Added to the variance.
    pub eps: f32,
}

impl<E: GemmElement> Kernels<E> {
    /// Rotates the heads of `x` in place.
    ///
    /// # Errors
    ///
    /// Shapes that do not fit; a failure of the driver.
    pub fn rope_in_place(
        &self,
        rows: PassRows<'_>,
        table: RopeTable<'_>,
        x: ViewMut<'_, E>,
        heads: Heads,
    ) -> Result<(), GpuError> {
        heads.check("x", x.len(), rows.n_rows, table.rope_dim)?;
        let from = x.ptr().offset(heads.start);
        let mut args = Args::new();
        heads.push(args.ptr(from))?;
        heads.push(args.view_mut(x.slice(heads.start..)))?;
        // SAFETY: the heads lie in `x`, and each thread reads its pair before it writes it.
        unsafe { self.rotate(rows, table, heads.n_heads, args) }
    }

    /// Rotates the heads of `x` into those of `out`, which has as many; other elements of `out`
    /// stay.
    ///
    /// # Errors
    ///
    /// Shapes that do not fit; a failure of the driver.
    pub fn rope(
        &self,
        rows: PassRows<'_>,
        table: RopeTable<'_>,
        (x, x_heads): (View<'_, E>, Heads),
        (out, out_heads): (ViewMut<'_, E>, Heads),
    ) -> Result<(), GpuError> {
        x_heads.check("x", x.len(), rows.n_rows, table.rope_dim)?;
        out_heads.check("out", out.len(), rows.n_rows, table.rope_dim)?;
        if x_heads.n_heads != out_heads.n_heads {
            return invalid(format!("{x_heads:?} rotated into {out_heads:?}"));
        }
        let mut args = Args::new();
        x_heads.push(args.view(x.slice(x_heads.start..)))?;
        out_heads.push(args.view_mut(out.slice(out_heads.start..)))?;
        // SAFETY: the heads lie in `x` and `out`.
        unsafe { self.rotate(rows, table, x_heads.n_heads, args) }
    }

    /// # Safety
    ///
    /// `args` are heads to read and heads to write, of the rows and as many as `n_heads`.
    unsafe fn rotate<'a>(
        &self,
        rows: PassRows<'a>,
        table: RopeTable<'a>,
        n_heads: usize,
        mut args: Args<'a>,
    ) -> Result<(), GpuError> {
        rows.check()?;
        args.i32(int("heads", n_heads)?).view(rows.seq).view(rows.pos);
        table.push(&mut args)?;
        let launch = row_grid(rows.n_rows, n_heads * table.rope_dim / 2, 128);
        // SAFETY: the caller vouches for the heads; the kernel checks positions.
        unsafe { self.launch(&self.rope.rope_heads, launch, &args) }
    }

    /// Writes the cache entries `[latent, key]` of the rows, `[n_slots, kv_rank + rope_dim]` of
    /// `cache`: the latent normalised, the key rotated. Normalises the query part beside it. A slot
    /// outside the cache writes no entry.
    ///
    /// # Errors
    ///
    /// Shapes that do not fit; a failure of the driver.
    pub fn mla_latent(
        &self,
        rows: PassRows<'_>,
        table: RopeTable<'_>,
        latents: MlaLatents<'_, E>,
        cache: ViewMut<'_, E>,
    ) -> Result<(), GpuError> {
        rows.check()?;
        let MlaLatents { qkv, row_stride, q_width, q_norm, kv_norm } = latents;
        let kv_rank = kv_norm.weight.len();
        let entry = kv_rank + table.rope_dim;
        let mut threads = kv_norm.check(kv_rank)?;
        has_rows("qkv", qkv, rows.n_rows * row_stride)?;
        has_rows("cache", cache.as_view(), entry)?;
        if q_width + entry > row_stride || !q_width.is_multiple_of(8) || !entry.is_multiple_of(8) {
            return invalid(format!("a query of {q_width}, an entry of {entry} in {row_stride}"));
        }
        let n_slots = int("slots", cache.len() / entry)?;
        let mut args = Args::new();
        args.view(rows.seq).view(rows.pos).view(rows.slot);
        table.push(&mut args)?;
        args.view(qkv).i32(width("the stride of qkv", row_stride)?);
        args.i32(int("q_width", q_width)?).i32(int("kv_rank", kv_rank)?);
        let n_parts = if q_norm.is_some() { 2 } else { 1 };
        let q_a = match q_norm {
            Some((norm, q_a)) => {
                threads = threads.max(norm.check(q_width)?);
                has_rows("q_a", q_a.as_view(), rows.n_rows * q_width)?;
                args.view(norm.weight).f32(norm.eps);
                Some(q_a)
            }
            None => {
                args.ptr(Ptr::<f32>::NULL).f32(0.0);
                None
            }
        };
        args.view(kv_norm.weight).f32(kv_norm.eps);
        match q_a {
            Some(q_a) => args.view_mut(q_a),
            None => args.ptr(Ptr::<E>::NULL),
        };
        args.view_mut(cache).i32(n_slots);
        let launch = row_grid(rows.n_rows, n_parts * threads as usize, threads);
        // SAFETY: all views have the rows; the kernel checks slots and positions, and writes `q_a`
        // only where there are two parts.
        unsafe { self.launch(&self.rope.mla_latent, launch, &args) }
    }

    /// Writes the index keys of the rows, `[n_slots, n]` of `cache`: layer norm, then rotation of
    /// the first `rope_dim` values. A slot outside the cache writes none.
    ///
    /// # Errors
    ///
    /// Shapes that do not fit; a failure of the driver.
    pub fn index_key(
        &self,
        rows: PassRows<'_>,
        table: RopeTable<'_>,
        keys: &IndexKeys<'_, E>,
        cache: ViewMut<'_, E>,
    ) -> Result<(), GpuError> {
        rows.check()?;
        let IndexKeys { keys, row_stride, weight, bias, eps } = *keys;
        let n = weight.len();
        has("keys", keys, rows.n_rows * row_stride)?;
        has("the bias of a norm", bias, n)?;
        if n == 0 || n > 1024 || n < table.rope_dim || row_stride < n {
            return invalid(format!("index keys of {n}, rotary width {}", table.rope_dim));
        }
        let n_slots = int("slots", cache.len() / n)?;
        let mut args = Args::new();
        args.view(rows.seq).view(rows.pos).view(rows.slot);
        table.push(&mut args)?;
        args.view(keys).i32(int("the stride of keys", row_stride)?).view(weight).view(bias);
        args.f32(eps).i32(int("n", n)?).view_mut(cache).i32(n_slots);
        let launch = row_grid(rows.n_rows, 1, 128);
        // SAFETY: all views have the rows; the kernel checks slots and positions.
        unsafe { self.launch(&self.rope.index_key, launch, &args) }
    }
}

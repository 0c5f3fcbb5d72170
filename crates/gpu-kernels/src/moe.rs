//! The experts of a mixture, from routed rows to their sum.

use gpu_runtime::{
    Args, Buffer, GemmElement, Gpu, GpuError, Kernel, Launch, Module, Ptr, View, ViewMut,
};

use crate::attention::has_hopper_unit;
use crate::check::{PassRows, has, has_rows, int, invalid, row_grid, width};
use crate::router::MAX_EXPERTS;
use crate::{Kernels, Norm};

kernel_table!(Table { moe_group, moe_combine, moe_combine_rms_norm });

/// Kernels of the products in tiles of one shape.
#[derive(Debug)]
pub(crate) struct Tile {
    gate_up: Kernel,
    down: Kernel,
    /// Rows of a tile.
    height: usize,
    /// Weight rows of a tile.
    n_out: usize,
    threads: u32,
    /// Bytes of dynamic shared memory.
    shared: u32,
    /// `None` for a block for each tile.
    wide: Option<Wide>,
}

/// Clusters of blocks that go through all tiles in turn and copy weights by a tensor map.
#[derive(Debug)]
struct Wide {
    n_clusters: usize,
    /// Blocks of a cluster.
    n_blocks: usize,
    /// Weight rows that are copied at once.
    box_rows: u32,
}

impl Tile {
    /// The tiles for this device, lowest first.
    pub(crate) fn load_all<E: GemmElement>(
        gpu: &Gpu,
        module: &Module,
    ) -> Result<Vec<Self>, GpuError> {
        if has_hopper_unit::<E>(gpu) {
            // Height and stages, as in `moe_hopper.cu`.
            let shapes = [(16, 5), (32, 5), (64, 4)];
            let shape = |(height, n_stages)| {
                let shared = n_stages * (height + 128) as u32 * 128;
                Self::load(module, &format!("hopper_{height}"), (height, 128, 128, shared))
            };
            let tiles = shapes.into_iter().map(shape);
            if !gpu.has_tensor_maps() {
                return tiles.collect();
            }
            // As in `moe_wide.cu`: a stage of 256 weights and 160 tokens, and two barriers for it.
            let shape = (2 * 160, 256, 384, 4 * ((256 + 160) * 128 + 16));
            let n_clusters = gpu.info().n_multiprocessors as usize / 2;
            let wide = Some(Wide { n_clusters, n_blocks: 2, box_rows: 64 });
            let wide = Self { wide, ..Self::load(module, "wide", shape)? };
            return tiles.chain([Ok(wide)]).collect();
        }
        // Height, weight rows, threads, pieces of 16 bytes a step, stages: as in `moe_gemm.cu`.
        let shapes = [(16, 32, 64, 16, 4), (64, 128, 128, 8, 3), (128, 128, 256, 8, 3)];
        let mut tiles = Vec::new();
        for (height, n_out, threads, n_pieces, n_stages) in shapes {
            let shared = n_stages * (height + n_out) as u32 * (n_pieces + 1) * 16;
            // Those that a block of this device has the shared memory for.
            if shared <= gpu.info().max_shared_per_block || tiles.is_empty() {
                let shape = (height, n_out, threads, shared);
                tiles.push(Self::load(module, &height.to_string(), shape)?);
            }
        }
        Ok(tiles)
    }

    fn load(
        module: &Module,
        name: &str,
        (height, n_out, threads, shared): (usize, usize, u32, u32),
    ) -> Result<Self, GpuError> {
        let kernel = |product: &str| {
            let kernel = module.kernel(&format!("moe_{product}_{name}"))?;
            kernel.allow_shared(shared).map(|()| kernel)
        };
        let (gate_up, down) = (kernel("gate_up")?, kernel("down")?);
        Ok(Self { gate_up, down, height, n_out, threads, shared, wide: None })
    }

    /// Blocks for all tiles that `n_pairs` can make, by slices of their outputs.
    fn launch(&self, n_pairs: usize, n_experts: usize, n_slices: usize) -> Launch {
        // Each expert with a row may leave a tile all but one row empty.
        let n_active = n_pairs.min(n_experts);
        let n_tiles = (n_pairs + n_active * (self.height - 1)) / self.height;
        let grid = match self.wide {
            Some(Wide { n_clusters, n_blocks, .. }) => {
                [(n_clusters.min(n_tiles * n_slices) * n_blocks) as u32, 1, 1]
            }
            None => [n_tiles as u32, n_slices as u32, 1],
        };
        Launch { grid, block: [self.threads, 1, 1], shared: self.shared }
    }

    /// Adds the weights `[.., n_in]` to the arguments of a kernel, as it takes them.
    fn push_weights<'a, E: GemmElement>(
        &self,
        gpu: &Gpu,
        weights: View<'a, E>,
        n_in: usize,
        args: &mut Args<'a>,
    ) -> Result<(), GpuError> {
        match self.wide {
            Some(Wide { box_rows, .. }) => {
                args.tensor_map(&gpu.tensor_map(weights, n_in, box_rows)?);
            }
            None => {
                args.view(weights);
            }
        }
        Ok(())
    }
}

/// The weights of a layer's experts.
#[derive(Clone, Copy, Debug)]
pub struct Experts<'a, E> {
    /// Routed experts.
    pub n_experts: usize,
    /// Inputs and outputs of a row.
    pub hidden: usize,
    /// Inner width of an expert.
    pub inner: usize,
    /// Gates over ups, `[n_experts, 2 * inner, hidden]`.
    pub gate_up: View<'a, E>,
    /// `[n_experts, hidden, inner]`.
    pub down: View<'a, E>,
}

/// The experts of each row, `[n_rows, top_k]` both.
#[derive(Clone, Copy, Debug)]
pub struct Routing<'a> {
    /// Experts of a row.
    pub top_k: usize,
    /// Expert ids; one that has no expert makes its row NaN.
    pub ids: View<'a, i32>,
    /// Their weights.
    pub weights: View<'a, f32>,
}

impl Routing<'_> {
    /// Checks the routing of `n_rows` rows; the number of its pairs (row, choice).
    fn check(&self, n_rows: usize) -> Result<usize, GpuError> {
        let n_pairs = n_rows * self.top_k;
        has("ids", self.ids, n_pairs)?;
        has("weights", self.weights, n_pairs)?;
        if self.top_k == 0 { invalid("a routing to no expert") } else { Ok(n_pairs) }
    }
}

/// What experts work in, and their outputs; one serves all layers, in turn.
#[derive(Debug)]
pub struct MoeScratch<E> {
    /// For each place, pairs sorted by expert: its pair.
    pair_of: Buffer<i32>,
    place_of: Buffer<i32>,
    /// Expert, first place and places of each tile.
    tiles: Buffer<i32>,
    n_tiles: Buffer<i32>,
    /// `[places, inner]`.
    act: Buffer<E>,
    /// `[places, hidden]`.
    out: Buffer<E>,
    n_experts: usize,
    hidden: usize,
}

impl<E: GemmElement> MoeScratch<E> {
    /// For passes of at most `max_rows` rows with `top_k` experts each, and experts of the sizes
    /// of `experts`.
    ///
    /// # Errors
    ///
    /// No room on the device; a failure of the driver.
    pub fn new(
        gpu: &Gpu,
        max_rows: usize,
        top_k: usize,
        experts: &Experts<'_, E>,
    ) -> Result<Self, GpuError> {
        let &Experts { n_experts, hidden, inner, .. } = experts;
        let n_pairs = max_rows * top_k;
        Ok(Self {
            pair_of: gpu.alloc(n_pairs)?,
            // A sum may ask for any place: each is inside, whatever was routed before.
            place_of: gpu.alloc_zeroed(n_pairs)?,
            // No tile is empty.
            tiles: gpu.alloc(3 * n_pairs)?,
            n_tiles: gpu.alloc(1)?,
            act: gpu.alloc(n_pairs * inner)?,
            out: gpu.alloc(n_pairs * hidden)?,
            n_experts,
            hidden,
        })
    }
}

/// The outputs of a row's experts and how they are summed.
#[derive(Clone, Copy, Debug)]
pub struct ExpertSum<'a, E> {
    /// As it was given to [`Kernels::moe_experts`].
    pub routing: Routing<'a>,
    /// As [`Kernels::moe_experts`] left it.
    pub scratch: &'a MoeScratch<E>,
    /// The output of the shared experts `[n_rows, hidden]`, if there are any.
    pub shared: Option<View<'a, E>>,
}

impl<'a, E: GemmElement> ExpertSum<'a, E> {
    /// Checks the sum and appends it to the arguments of a kernel.
    fn push(&self, n_rows: usize, args: &mut Args<'a>) -> Result<(), GpuError> {
        let Self { routing, scratch, shared } = *self;
        let n_pairs = routing.check(n_rows)?;
        has("the experts' scratch", scratch.place_of.view(), n_pairs)?;
        args.view(scratch.out.view()).view(scratch.place_of.view());
        args.view(routing.ids).view(routing.weights);
        args.i32(int("top_k", routing.top_k)?).i32(int("experts", scratch.n_experts)?);
        match shared {
            Some(shared) => {
                has_rows("the shared experts", shared, n_rows * scratch.hidden)?;
                args.view(shared);
            }
            None => {
                args.ptr(Ptr::<E>::NULL);
            }
        }
        Ok(())
    }
}

impl<E: GemmElement> Kernels<E> {
    /// The outputs of the experts of each row of `x` `[n_rows, hidden]`, into `scratch`.
    ///
    /// Pairs (row, choice) are sorted by expert on the device, so that each expert's weights are
    /// read for all its rows at once, in tiles whose height suits the rows that an expert has on
    /// average.
    ///
    /// # Errors
    ///
    /// Shapes that do not fit; a failure of the driver.
    pub fn moe_experts(
        &self,
        rows: PassRows<'_>,
        x: View<'_, E>,
        routing: Routing<'_>,
        experts: Experts<'_, E>,
        scratch: &mut MoeScratch<E>,
    ) -> Result<(), GpuError> {
        rows.check()?;
        let Experts { n_experts, hidden, inner, gate_up, down } = experts;
        let n_pairs = routing.check(rows.n_rows)?;
        if n_experts == 0 || n_experts > MAX_EXPERTS || n_experts != scratch.n_experts {
            return invalid(format!("{n_experts} experts, scratch for {}", scratch.n_experts));
        }
        has_rows("x", x, rows.n_rows * hidden)?;
        let (n_gate_up, n_down) = (n_experts * 2 * inner * hidden, n_experts * hidden * inner);
        has_rows("gate_up", gate_up, n_gate_up)?;
        has_rows("down", down, n_down)?;
        has("the experts' scratch", scratch.pair_of.view(), n_pairs)?;
        has("the experts' scratch", scratch.act.view(), n_pairs * inner)?;
        has("the experts' scratch", scratch.out.view(), n_pairs * hidden)?;
        let tile = self.tile(n_pairs, n_experts);
        let (hidden_arg, inner_arg) = (width("hidden", hidden)?, width("inner", inner)?);
        let (top_k, n_experts_arg) = (int("top_k", routing.top_k)?, n_experts as i32);

        let mut args = Args::new();
        args.view(routing.ids).view(rows.seq).i32(int("pairs", n_pairs)?).i32(top_k);
        args.i32(n_experts_arg).i32(tile.height as i32).view_mut(scratch.pair_of.view_mut());
        args.view_mut(scratch.place_of.view_mut()).view_mut(scratch.tiles.view_mut());
        args.view_mut(scratch.n_tiles.view_mut());
        let n_blocks = if n_pairs == 0 { 0 } else { n_experts as u32 };
        let n_threads = if n_pairs > 4096 { 1024 } else { 256 };
        // SAFETY: the kernel checks ids; the scratch has a place for each pair.
        unsafe { self.launch(&self.moe.moe_group, Launch::linear(n_blocks, n_threads), &args) }?;

        let mut args = Args::new();
        args.view(scratch.tiles.view()).view(scratch.n_tiles.view());
        args.view(scratch.pair_of.view()).i32(top_k).view(x).i32(hidden_arg);
        tile.push_weights(self.stream.gpu(), gate_up.slice(..n_gate_up), hidden, &mut args)?;
        args.i32(inner_arg).view_mut(scratch.act.view_mut());
        let launch = tile.launch(n_pairs, n_experts, (2 * inner).div_ceil(tile.n_out));
        // SAFETY: tiles are of rows and experts that exist; all views have their shapes.
        unsafe { self.launch(&tile.gate_up, launch, &args) }?;

        let mut args = Args::new();
        args.view(scratch.tiles.view()).view(scratch.n_tiles.view()).view(scratch.act.view());
        args.i32(inner_arg);
        tile.push_weights(self.stream.gpu(), down.slice(..n_down), inner, &mut args)?;
        args.i32(hidden_arg).view_mut(scratch.out.view_mut());
        let launch = tile.launch(n_pairs, n_experts, hidden.div_ceil(tile.n_out));
        // SAFETY: as above.
        unsafe { self.launch(&tile.down, launch, &args) }
    }

    /// The lowest tile that holds the rows of nearly every expert: twice their deviation more
    /// than they are on average, if rows fall on experts as they like. A row that a tile lacks
    /// costs arithmetic alone, of which there is enough where weights are read for few rows; a
    /// second tile reads them again.
    fn tile(&self, n_pairs: usize, n_experts: usize) -> &Tile {
        let mean = n_pairs as f64 / n_experts as f64;
        let wanted = mean + 2.0 * mean.sqrt();
        let tile = self.tiles.iter().find(|tile| tile.height as f64 >= wanted);
        tile.unwrap_or_else(|| self.tiles.last().expect("there is a tile"))
    }

    /// `out[r] = sum_k weights[r, k] * expert[ids[r, k]](x[r]) + shared[r]`, in ascending `k`,
    /// `[n_rows, hidden]`.
    ///
    /// # Errors
    ///
    /// Shapes that do not fit; a failure of the driver.
    pub fn moe_combine(
        &self,
        rows: PassRows<'_>,
        sum: &ExpertSum<'_, E>,
        out: ViewMut<'_, E>,
    ) -> Result<(), GpuError> {
        rows.check()?;
        let hidden = sum.scratch.hidden;
        has_rows("out", out.as_view(), rows.n_rows * hidden)?;
        let mut args = Args::new();
        args.view(rows.seq);
        sum.push(rows.n_rows, &mut args)?;
        args.i32(width("hidden", hidden)?).view_mut(out);
        let launch = row_grid(rows.n_rows, hidden / 8, 128);
        // SAFETY: all views have the rows; places of real rows are in the scratch.
        unsafe { self.launch(&self.moe.moe_combine, launch, &args) }
    }

    /// Adds what [`Kernels::moe_combine`] would compute, before its rounding, to `residual`, then
    /// `out[r] = norm(residual[r])`, both `[n_rows, hidden]`.
    ///
    /// # Errors
    ///
    /// Shapes that do not fit; a failure of the driver.
    pub fn moe_combine_rms_norm(
        &self,
        rows: PassRows<'_>,
        sum: &ExpertSum<'_, E>,
        residual: ViewMut<'_, f32>,
        norm: Norm<'_>,
        out: ViewMut<'_, E>,
    ) -> Result<(), GpuError> {
        rows.check()?;
        let hidden = sum.scratch.hidden;
        let threads = norm.check(hidden)?;
        has_rows("residual", residual.as_view(), rows.n_rows * hidden)?;
        has_rows("out", out.as_view(), rows.n_rows * hidden)?;
        let mut args = Args::new();
        args.view(rows.seq);
        sum.push(rows.n_rows, &mut args)?;
        args.view_mut(residual).view(norm.weight).f32(norm.eps);
        args.i32(int("hidden", hidden)?).view_mut(out);
        let launch = Launch::linear(rows.n_rows as u32, threads);
        // SAFETY: as for `moe_combine`.
        unsafe { self.launch(&self.moe.moe_combine_rms_norm, launch, &args) }
    }
}

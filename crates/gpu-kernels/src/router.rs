//! The expert router.

use gpu_runtime::{
    Args, Buffer, GemmElement, Gpu, GpuError, Kernel, Launch, Module, Ptr, View, ViewMut,
};
use model_config::{ExpertChoice, MoeConfig, RouterScoring};

use crate::Kernels;
use crate::attention::has_matrix_unit;
use crate::check::{PassRows, has, has_rows, int, invalid, width};

// As in `router_mma.cuh`.
const THREADS: u32 = 256;
/// Rows of the lowest tile.
const MIN_ROWS: usize = 8;
/// Most experts of a layer, as in `moe.cu`.
pub(crate) const MAX_EXPERTS: usize = 512;
/// A lane keeps one of a row's experts.
const MAX_TOP_K: usize = 32;

/// The weights of a router.
#[derive(Clone, Copy, Debug)]
pub struct RouterWeights<'a> {
    /// `[n_routed_experts, hidden]`.
    pub gate: View<'a, f32>,
    /// The correction bias `[n_routed_experts]`, if there is one: a part of the choice of groups
    /// and experts, and not of the weights.
    pub bias: Option<View<'a, f32>>,
    /// How experts are chosen and weighted.
    pub config: &'a MoeConfig,
}

impl RouterWeights<'_> {
    fn check(&self, hidden: usize) -> Result<(), GpuError> {
        let MoeConfig { n_routed_experts, num_experts_per_tok, n_group, topk_group, .. } =
            *self.config;
        has_rows("the router's gate", self.gate, n_routed_experts * hidden)?;
        if let Some(bias) = self.bias {
            has("the router's bias", bias, n_routed_experts)?;
        }
        let has_groups = n_group > 0
            && (1..=n_group).contains(&topk_group)
            && n_routed_experts.is_multiple_of(n_group);
        let fits = has_groups
            && n_routed_experts <= MAX_EXPERTS
            && num_experts_per_tok <= MAX_TOP_K
            && (1..=n_routed_experts / n_group * topk_group).contains(&num_experts_per_tok);
        if fits { Ok(()) } else { invalid(format!("a router of {:?}", self.config)) }
    }
}

/// What routers work in; one serves all layers, in turn.
#[derive(Debug)]
pub struct RouterScratch {
    logits: Buffer<f32>,
    arrived: Buffer<u32>,
}

impl RouterScratch {
    /// For passes of at most `max_rows` rows.
    ///
    /// # Errors
    ///
    /// No room on the device; a failure of the driver.
    pub fn new(gpu: &Gpu, max_rows: usize, n_experts: usize) -> Result<Self, GpuError> {
        Ok(Self {
            logits: gpu.alloc(max_rows * n_experts)?,
            arrived: gpu.alloc_zeroed(max_rows.div_ceil(MIN_ROWS))?,
        })
    }
}

/// Where the experts of each row go, best first, `[n_rows, top_k]` both.
#[derive(Debug)]
pub struct RoutingMut<'a> {
    /// Expert ids.
    pub ids: ViewMut<'a, i32>,
    /// Their weights.
    pub weights: ViewMut<'a, f32>,
}

impl<E: GemmElement> Kernels<E> {
    /// Chooses the experts of `x` `[n_rows, hidden]`. Logits and scores are float32; ties go to the
    /// lower id, and a score that is NaN loses against every other one.
    ///
    /// # Errors
    ///
    /// Shapes that do not fit, more than 512 experts, more than 32 of them a row; a failure of the
    /// driver.
    pub fn route(
        &self,
        rows: PassRows<'_>,
        x: View<'_, E>,
        router: RouterWeights<'_>,
        scratch: &mut RouterScratch,
        out: RoutingMut<'_>,
    ) -> Result<(), GpuError> {
        rows.check()?;
        let config = router.config;
        let (n_experts, top_k) = (config.n_routed_experts, config.num_experts_per_tok);
        let hidden = router.gate.len() / n_experts.max(1);
        router.check(hidden)?;
        has_rows("x", x, rows.n_rows * hidden)?;
        has("the router's scratch", scratch.logits.view(), rows.n_rows * n_experts)?;
        has("the router's scratch", scratch.arrived.view(), rows.n_rows.div_ceil(MIN_ROWS))?;
        has("ids", out.ids.as_view(), rows.n_rows * top_k)?;
        has("weights", out.weights.as_view(), rows.n_rows * top_k)?;
        let is_greedy = config.choice == ExpertChoice::Greedy;
        let (n_group, topk_group) =
            if is_greedy { (1, 1) } else { (config.n_group, config.topk_group) };
        let mut args = Args::new();
        args.view(rows.seq).i32(int("rows", rows.n_rows)?).view(x).i32(width("hidden", hidden)?);
        args.view(router.gate);
        match router.bias {
            Some(bias) => args.view(bias),
            None => args.ptr(Ptr::<f32>::NULL),
        };
        args.i32(n_experts as i32).i32((config.scoring == RouterScoring::Softmax).into());
        args.i32(n_group as i32).i32(topk_group as i32);
        args.i32((config.choice == ExpertChoice::NoauxTc).into()).i32(top_k as i32);
        args.i32(config.norm_topk_prob.into()).f32(config.routed_scaling_factor as f32);
        args.view_mut(scratch.logits.view_mut()).view_mut(scratch.arrived.view_mut());
        args.view_mut(out.ids).view_mut(out.weights);
        let form = self.router.form(self.stream.gpu(), rows.n_rows, n_experts);
        let launch = form.launch(self.stream.gpu(), rows.n_rows, n_experts);
        // SAFETY: all views have the rows; the scratch is all zeros where blocks are counted.
        unsafe { self.launch(&form.kernel, launch, &args) }
    }
}

/// A kernel for tiles of rows and experts. A logit has the same bits in all of a device.
#[derive(Debug)]
struct Form {
    kernel: Kernel,
    rows: usize,
    experts: usize,
    /// Bytes of shared memory of the stages of a tile's inputs.
    stages: u32,
}

impl Form {
    /// The most that a multiprocessor reads, in bytes for each value of a row.
    fn cost(&self, gpu: &Gpu, n_rows: usize, n_experts: usize) -> usize {
        let n_blocks = n_rows.div_ceil(self.rows) * n_experts.div_ceil(self.experts);
        let per_block = self.rows * 2 + self.experts * 4;
        n_blocks.div_ceil(gpu.info().n_multiprocessors as usize) * per_block
    }

    fn launch(&self, gpu: &Gpu, n_rows: usize, n_experts: usize) -> Launch {
        let info = gpu.info();
        let tiles = n_rows.div_ceil(self.rows) as u32;
        let sharing = if self.stages > 0 {
            u32::MAX
        } else {
            // As many blocks as the device holds at once, two for each multiprocessor.
            (2 * info.n_multiprocessors / tiles.max(1)).max(1)
        };
        Launch {
            grid: [(n_experts.div_ceil(self.experts) as u32).min(sharing), tiles, 1],
            block: [THREADS, 1, 1],
            shared: self.stages.max(choice_bytes(gpu, n_experts)),
        }
    }
}

/// Three values for each warp and expert.
fn choice_bytes(gpu: &Gpu, n_experts: usize) -> u32 {
    THREADS / gpu.info().warp_size * 3 * n_experts as u32 * 4
}

/// The forms of the kernel, the highest tiles first.
#[derive(Debug)]
pub(crate) struct Table(Vec<Form>);

impl Table {
    #[cfg(test)]
    pub(crate) const NAMES: &[&str] = &["route"];

    /// The forms that the device has the shared memory for, allowed that of the most experts.
    pub(crate) fn load<E: GemmElement>(gpu: &Gpu, module: &Module) -> Result<Self, GpuError> {
        // Rows and experts of a tile; chunks of 32 inputs in the stages of each of eight warps.
        let shapes: &[(&str, usize, usize, usize)] = if has_matrix_unit::<E>(gpu) {
            &[("route_many", 64, 64, 2), ("route_middle", 32, 32, 2), ("route_few", MIN_ROWS, 4, 8)]
        } else {
            &[("route", MIN_ROWS, 4, 0)]
        };
        let mut forms = Vec::new();
        for &(name, rows, experts, n_chunks) in shapes {
            let stages = (8 * n_chunks * 32 * (rows * 2 + experts * 4)) as u32;
            if stages <= gpu.info().max_shared_per_block {
                let kernel = module.kernel(name)?;
                kernel.allow_shared(stages.max(choice_bytes(gpu, MAX_EXPERTS)))?;
                forms.push(Form { kernel, rows, experts, stages });
            }
        }
        Ok(Self(forms))
    }

    /// The form whose busiest multiprocessor reads least; the highest such tiles.
    fn form(&self, gpu: &Gpu, n_rows: usize, n_experts: usize) -> &Form {
        let best = self.0.iter().min_by_key(|form| form.cost(gpu, n_rows, n_experts));
        best.expect("the lowest tiles fit every device")
    }
}

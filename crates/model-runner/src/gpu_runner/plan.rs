//! What of a GPU's memory goes where, planned before anything is put there.

use std::fmt;

use engine_types::ExecutorLimits;
use gpu_model::{MemoryNeeds, PassLimits, check_architecture};
use gpu_runtime::Memory;
use half::bf16;
use model_config::{ModelConfig, TensorSpec};
use models::{ComputeDtype, IndexCacheDtype};

use crate::error::RunnerError;
use crate::limits::{AttentionChoice, Planned, RunnerOptions, n_bytes_per_slot, plan_limits};

/// Rows that a kernel can have.
const MAX_ROWS: u32 = 65_535;
/// Set aside for what the vendor's libraries take: the workspace of matrix products, code that is
/// loaded when it is first called, and allocations that are rounded up.
const LIBRARY_BYTES: u64 = 256 << 20;
/// Set aside for each captured step.
const GRAPH_BYTES: u64 = 16 << 20;

/// What a [`GpuRunner`](crate::GpuRunner) is made by: what its steps can be, and its memory.
#[derive(Clone, Debug, PartialEq)]
pub struct GpuPlan {
    /// The limits that every step keeps.
    pub limits: ExecutorLimits,
    /// Where the device's memory goes.
    pub memory: MemoryPlan,
    pub(super) dtype: ComputeDtype,
    /// MTP layers that draft.
    pub(super) num_mtp_layers: usize,
    /// The numbers of slots that decode steps on the device are prepared for, the most last; none
    /// where no step runs there as a whole.
    pub(super) sizes: Vec<usize>,
}

/// Bytes of a GPU's memory, item by item.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MemoryPlan {
    /// In use by no program when the plan was made.
    pub free: u64,
    /// What of that stays so.
    pub spared: u64,
    /// Weights.
    pub weights: u64,
    /// What passes work in.
    pub workspace: u64,
    /// Set aside for the vendor's libraries.
    pub libraries: u64,
    /// Set aside for the graphs of decode steps.
    pub graphs: u64,
    /// How many steps are captured.
    pub num_graphs: usize,
    /// KV blocks.
    pub num_blocks: u64,
    /// One of them.
    pub block: u64,
}

impl GpuPlan {
    /// Plans a model whose `tensors` are loaded for a device with this memory. The KV pool takes
    /// what everything else leaves of [`RunnerOptions::gpu_memory_utilization`], and no more than
    /// [`RunnerOptions::kv_cache_bytes`].
    ///
    /// # Errors
    ///
    /// [`RunnerError`] if the architecture or an option is not for a GPU, an option is outside its
    /// bounds, or [`RunnerError::GpuMemory`] if there is no room.
    pub fn new(
        memory: Memory,
        config: &ModelConfig,
        tensors: &[TensorSpec],
        dtype: ComputeDtype,
        options: &RunnerOptions,
    ) -> Result<Self, RunnerError> {
        check_architecture(config)?;
        refuse(options)?;
        let drafts = options.num_speculative_tokens;
        let num_mtp_layers = if drafts > 0 { config.num_mtp_layers } else { 0 };
        let planned = Planned { config, num_mtp_layers, kind: dtype.kind() };
        let block = u64::from(options.block_size) * n_bytes_per_slot(options, planned) as u64;
        let with_pool = |kv_cache_bytes| {
            plan_limits(&RunnerOptions { kv_cache_bytes, ..options.clone() }, planned)
        };
        // Checks the options; the pool is not known yet.
        let limits = with_pool(block)?;
        let needs_of = match dtype {
            ComputeDtype::Float32 => MemoryNeeds::of::<f32>,
            ComputeDtype::Bfloat16 => MemoryNeeds::of::<bf16>,
        };
        let needs = needs_of(config, tensors, &pass_limits(&limits));
        // Drafts of several MTP layers are made pass by pass.
        let sizes = if num_mtp_layers > 1 { vec![] } else { sizes(limits.max_num_seqs as usize) };
        let num_graphs = if options.gpu_graphs { sizes.len() } else { 0 };
        let (free, total) = (memory.free as u64, memory.total as f64);
        let spared = match options.num_blocks {
            None => (total * (1.0 - options.gpu_memory_utilization)) as u64,
            Some(_) => 0,
        };
        let mut memory = MemoryPlan {
            free,
            spared: spared.min(free),
            weights: needs.weights,
            workspace: needs.workspace,
            libraries: LIBRARY_BYTES,
            graphs: num_graphs as u64 * GRAPH_BYTES,
            num_graphs,
            num_blocks: options.num_blocks.unwrap_or(1).into(),
            block,
        };
        let left = memory.left().ok_or(RunnerError::GpuMemory(Box::new(memory)))?;
        let limits = with_pool(options.kv_cache_bytes.min(left + block))?;
        memory.num_blocks = limits.num_blocks.into();
        Ok(Self { limits, memory, dtype, num_mtp_layers, sizes })
    }

    /// The bounds of passes; blocks are counted later.
    pub(super) fn pass_limits(&self) -> PassLimits {
        pass_limits(&self.limits)
    }
}

impl MemoryPlan {
    /// What each item takes.
    #[must_use]
    pub fn items(&self) -> [(String, u64); 5] {
        let blocks = format!("{} KV blocks of {}", self.num_blocks, Size(self.block));
        [
            ("weights".to_owned(), self.weights),
            ("workspace".to_owned(), self.workspace),
            ("libraries".to_owned(), self.libraries),
            (format!("{} graphs", self.num_graphs), self.graphs),
            (blocks, self.num_blocks.saturating_mul(self.block)),
        ]
    }

    /// What all items take.
    #[must_use]
    pub fn taken(&self) -> u64 {
        self.items().iter().fold(0, |sum, (_, bytes)| sum.saturating_add(*bytes))
    }

    /// What all items leave, if there is room for them.
    #[must_use]
    pub fn left(&self) -> Option<u64> {
        (self.free - self.spared).checked_sub(self.taken())
    }

    /// The sum that does not fit.
    #[must_use]
    pub fn shortage(&self) -> String {
        let items = self.items().map(|(name, bytes)| format!("{name} ({})", Size(bytes)));
        let [room, free, spared] = [self.free - self.spared, self.free, self.spared].map(Size);
        let (items, taken) = (items.join(" + "), Size(self.taken()));
        format!(
            "{items} = {taken}, and the GPU has room for {room}: {free} are free, of which \
             {spared} are spared"
        )
    }
}

impl fmt::Display for MemoryPlan {
    /// A table, a line for each item.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut line =
            |name: &str, bytes| write!(f, "\n  {name:36} {:>12}", Size(bytes).to_string());
        line("free", self.free)?;
        self.items().iter().try_for_each(|(name, bytes)| line(name, *bytes))?;
        line("left", self.left().unwrap_or_default())?;
        line("spared", self.spared)
    }
}

/// Bytes as people read them.
pub(super) struct Size(pub(super) u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (bytes, gib) = (self.0 as f64, f64::from(1 << 30));
        match self.0 {
            0..0x40_0000 => write!(f, "{:.1} KiB", bytes / 1024.0),
            0x40_0000..0x1_0000_0000 => write!(f, "{:.1} MiB", bytes / gib * 1024.0),
            _ => write!(f, "{:.2} GiB", bytes / gib),
        }
    }
}

/// Rows of the largest decode step.
fn max_num_rows(options: &RunnerOptions) -> u32 {
    options.max_num_seqs.saturating_mul(options.num_speculative_tokens.saturating_add(1))
}

/// Refuses what runs on the CPU alone.
fn refuse(options: &RunnerOptions) -> Result<(), RunnerError> {
    let reason = if options.index_cache_dtype != IndexCacheDtype::Auto {
        "index keys of another dtype than the model's; give index_cache_dtype auto"
    } else if options.attention != AttentionChoice::Auto {
        "the reference attention; give attention auto"
    } else if options.max_num_batched_tokens > MAX_ROWS {
        "max_num_batched_tokens above 65535"
    } else if max_num_rows(options) > MAX_ROWS {
        "max_num_seqs whose tokens and drafts are above 65535 rows"
    } else {
        return Ok(());
    };
    Err(RunnerError::NotOnGpu { reason })
}

fn pass_limits(limits: &ExecutorLimits) -> PassLimits {
    PassLimits {
        max_rows: limits.max_num_batched_tokens as usize,
        max_seqs: limits.max_num_seqs as usize,
        max_len: limits.max_model_len as usize,
        max_window: limits.max_num_speculative_tokens as usize + 1,
        block_size: limits.block_size as usize,
        num_blocks: 0,
    }
}

/// The numbers of slots that steps are captured for: multiples of 8, farther apart from 64 on, so
/// that at most a quarter of the slots are empty; 1, 2 and 4; and the most.
fn sizes(most: usize) -> Vec<usize> {
    let next = |&size: &usize| match size {
        0..8 => Some(2 * size),
        // A quarter of the power of two that `size` has reached.
        _ => Some(size + (1 << size.ilog2() >> 2).max(8)),
    };
    let sizes = std::iter::successors(Some(1), next);
    sizes.take_while(|&size| size < most).chain([most]).collect()
}

//! From flags to a model, a runner and an engine.

use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};

use anyhow::{Context, Result, anyhow, ensure};
use engine::{Engine, EngineConfig, EngineHandle, EngineThread};
use engine_types::{OutputMode, StepExecutor};
use gpu_runtime::{DeviceChoice, Gpu};
use model_config::{ConfigSummary, ModelConfig, RawConfig, StoredDtype, TensorSpec};
use model_runner::{
    DraftSampling, GpuPlan, GpuRunner, IndexCacheDtype, Runner, RunnerError, RunnerOptions,
};
use models::{ComputeDtype, LoadError, LoadOptions};
use scheduler::{DraftPolicy, SchedulerConfig, SchedulingPolicy};
use settings::{
    DraftSamplingArg, DraftingArg, Dtype, EngineSettings, IndexCacheArg, IndexShareArg,
    LoadFormatArg, OutputModeArg, PolicyArg,
};
use spec_decode::{IndexShare, SyntheticAcceptance};
use tokenization::Tokenizer;
use weights::{Checkpoint, LoadFormat, WeightsError};

/// Steps of waiting that make up for one level of priority where no flag says it.
const PRIORITY_AGING_STEPS: u32 = 1000;

/// What is known of a model before its weights are read.
pub(crate) struct Model {
    pub(crate) dir: PathBuf,
    pub(crate) config: ModelConfig,
    /// As the checkpoint names it.
    pub(crate) architecture: String,
    pub(crate) tokenizer: Option<Arc<Tokenizer>>,
    pub(crate) dtype: ComputeDtype,
}

/// A running engine with its model.
pub(crate) struct LoadedEngine {
    pub(crate) model: Model,
    pub(crate) handle: EngineHandle,
    pub(crate) thread: EngineThread,
    /// Whether draft steps after the first reuse its selection of keys.
    pub(crate) index_share: bool,
    /// What the model is computed on: `cpu`, or a GPU's name with its architecture.
    pub(crate) device: String,
}

/// Reads everything of a checkpoint but its weights.
pub(crate) fn open_model(model: &str, dtype: Option<Dtype>) -> Result<Model> {
    let dir = bundled_checkpoints::resolve(model, None)?;
    let config = ModelConfig::load(&dir)?;
    let named = ConfigSummary::new(&RawConfig::load(&dir)?).architecture;
    let architecture = named.unwrap_or_else(|| format!("{:?}", config.architecture));
    let tokenizer = Tokenizer::load_if_present(&dir)?.map(Arc::new);
    let dtype = match (dtype, config.dtype) {
        (Some(Dtype::Float32), _) | (None, Some(StoredDtype::Float32)) => ComputeDtype::Float32,
        _ => ComputeDtype::Bfloat16,
    };
    Ok(Model { dir, config, architecture, tokenizer, dtype })
}

/// Loads a model and starts an engine around it, which drafts by `drafting` where no flag says how.
pub(crate) fn start_engine(args: &EngineSettings, drafting: DraftingArg) -> Result<LoadedEngine> {
    limit_threads(args.threads)?;
    let model = open_model(&args.model, args.dtype)?;
    let drafting = args.drafting.unwrap_or(drafting);
    let gpu = open_gpu(&args.device)?;
    let options = runner_options(args, gpu.is_some())?;
    let max_num_batched_tokens = options.max_num_batched_tokens;
    let scheduler = scheduler_config(args, drafting, &model.config, max_num_batched_tokens);
    if max_num_batched_tokens <= args.num_speculative_tokens {
        tracing::warn!(
            max_num_batched_tokens,
            num_speculative_tokens = args.num_speculative_tokens,
            "no step has room for a token and all its drafts: most drafts will not be verified"
        );
    }
    let (dir, dtype, format) = (model.dir.clone(), model.dtype, args.load_format);
    tracing::info!(model = %dir.display(), ?dtype, load_format = ?format, "loading");
    let (share_sender, index_share) = mpsc::sync_channel(1);
    let device = gpu.as_ref().map_or_else(
        || "cpu".to_owned(),
        |gpu| format!("{} ({})", gpu.info().name, gpu.info().arch),
    );
    tracing::info!(device, "running");
    let make_runner = move || -> Result<Box<dyn StepExecutor>> {
        // Whoever starts the engine waits for this and cannot have gone.
        let tell = |is_shared| {
            let _ = share_sender.send(is_shared);
        };
        if let Some(gpu) = gpu {
            let runner = load_gpu_runner(&gpu, &dir, dtype, format, &options)?;
            tell(runner.shares_index());
            return Ok(Box::new(runner));
        }
        let runner = load_runner(&dir, dtype, format, &options)?;
        tell(runner.shares_index());
        Ok(Box::new(runner))
    };
    let config = EngineConfig { scheduler, max_queue_wait: args.max_queue_wait };
    let (handle, thread) = Engine::spawn(config, make_runner)?;
    let index_share = index_share.recv().expect("an engine that has started has its runner");
    Ok(LoadedEngine { model, handle, thread, index_share, device })
}

fn scheduler_config(
    args: &EngineSettings,
    drafting: DraftingArg,
    model: &ModelConfig,
    max_num_batched_tokens: u32,
) -> SchedulerConfig {
    let aging_steps = args.priority_aging_steps.unwrap_or(PRIORITY_AGING_STEPS);
    let policy = match args.scheduling_policy {
        PolicyArg::Fcfs => SchedulingPolicy::Fcfs,
        PolicyArg::Priority => SchedulingPolicy::Priority { aging_steps },
    };
    SchedulerConfig {
        max_num_seqs: args.max_num_seqs,
        max_num_batched_tokens,
        max_queued_requests: args.max_queued_requests,
        policy,
        long_prefill_token_threshold: args.long_prefill_token_threshold,
        chunk_alignment: args.chunk_alignment,
        output_mode: match args.output_mode {
            OutputModeArg::Immediate => OutputMode::Immediate,
            OutputModeArg::Deferred => OutputMode::Deferred,
        },
        num_speculative_tokens: args.num_speculative_tokens,
        drafting: match drafting {
            DraftingArg::Adaptive => DraftPolicy::default(),
            DraftingArg::Fixed => DraftPolicy::Fixed,
        },
        eos_token_ids: model.eos_token_ids.clone(),
        enable_prefix_caching: !args.no_prefix_caching,
    }
}

fn runner_options(args: &EngineSettings, is_gpu: bool) -> Result<RunnerOptions> {
    // What the memory of a GPU bounds anyway.
    let (pool_mib, batched_tokens) = if is_gpu { (u64::MAX, 8192) } else { (256, 2048) };
    Ok(RunnerOptions {
        block_size: args.block_size,
        num_blocks: args.num_blocks,
        kv_cache_bytes: args.kv_cache_memory.unwrap_or(pool_mib).saturating_mul(1 << 20),
        max_num_seqs: args.max_num_seqs,
        max_num_batched_tokens: args.max_num_batched_tokens.unwrap_or(batched_tokens),
        max_model_len: args.max_model_len,
        num_speculative_tokens: args.num_speculative_tokens,
        index_share: match args.index_share {
            IndexShareArg::Auto => IndexShare::Auto,
            IndexShareArg::On => IndexShare::On,
            IndexShareArg::Off => IndexShare::Off,
        },
        index_cache_dtype: match args.index_cache_dtype {
            IndexCacheArg::Auto => IndexCacheDtype::Auto,
            IndexCacheArg::Fp8 => IndexCacheDtype::Fp8,
        },
        draft_sampling: match args.draft_sampling {
            DraftSamplingArg::Greedy => DraftSampling::Greedy,
            DraftSamplingArg::Sampled => DraftSampling::Sampled,
        },
        synthetic_acceptance: synthetic_acceptance(args)?,
        gpu_memory_utilization: args.gpu_memory_utilization,
        gpu_graphs: !args.no_gpu_graphs,
        ..RunnerOptions::default()
    })
}

fn synthetic_acceptance(args: &EngineSettings) -> Result<Option<SyntheticAcceptance>> {
    let k = args.num_speculative_tokens as usize;
    let by_length = args.spec_decode_acceptance_length.map(|length| {
        SyntheticAcceptance::from_length(length, k).context("--spec-decode-acceptance-length")
    });
    let by_rate = args.spec_decode_acceptance_rate.map(|rate| {
        SyntheticAcceptance::from_rate(rate, k).context("--spec-decode-acceptance-rate")
    });
    by_length.or(by_rate).transpose()
}

/// The GPU that `device` names; `None` for the CPU.
fn open_gpu(device: &str) -> Result<Option<Gpu>> {
    let choice: DeviceChoice = device.parse().context("--device")?;
    Gpu::open(&choice).context("--device")
}

/// The same on a GPU.
fn load_gpu_runner(
    gpu: &Gpu,
    dir: &Path,
    dtype: ComputeDtype,
    format: LoadFormatArg,
    options: &RunnerOptions,
) -> Result<GpuRunner> {
    let (mut config, drafting) = (ModelConfig::load(dir)?, options.num_speculative_tokens > 0);
    config.limit_len(options.max_model_len);
    let specs = expected_tensors(dir, &config, format, drafting);
    let specs = specs.map_err(|error| no_weights(error.into()))?;
    let plan = GpuPlan::new(gpu.memory()?, &config, &specs, dtype, options).map_err(refused)?;
    tracing::info!("memory of the GPU:{}", plan.memory);
    let target = (tch::Device::Cpu, dtype.kind());
    let tensors = weights::load(dir, &config, load_format(format), drafting, target);
    let tensors = tensors.map_err(|error| no_weights(error.into()))?;
    GpuRunner::new(gpu, &config, tensors, &plan, options).map_err(refused)
}

/// The tensors that are loaded: those that the model needs, and the optional ones that are there.
fn expected_tensors(
    dir: &Path,
    config: &ModelConfig,
    format: LoadFormatArg,
    drafting: bool,
) -> Result<Vec<TensorSpec>, WeightsError> {
    let checkpoint = match format {
        LoadFormatArg::Auto => Some(Checkpoint::open(dir)?),
        LoadFormatArg::Dummy => None,
    };
    let is_there = |name: &str| checkpoint.as_ref().is_some_and(|c| c.tensor_info(name).is_some());
    let mut specs = config.target_tensors();
    specs.extend(drafting.then(|| config.all_mtp_tensors()).into_iter().flatten());
    specs.retain(|spec| !spec.is_optional || is_there(&spec.name));
    Ok(specs)
}

fn load_format(format: LoadFormatArg) -> LoadFormat {
    match format {
        LoadFormatArg::Auto => LoadFormat::Auto,
        LoadFormatArg::Dummy => LoadFormat::Dummy,
    }
}

/// Adds the way out to an error about weights.
fn no_weights(error: LoadError) -> anyhow::Error {
    match error {
        LoadError::Weights(error @ WeightsError::NoWeights { .. }) => {
            anyhow!("{error}; give --load-format dummy to run it with random ones")
        }
        error => error.into(),
    }
}

/// Names the flags in an error of a runner.
fn refused(error: RunnerError) -> anyhow::Error {
    match error {
        RunnerError::IndexShare { reason } => {
            anyhow!("--index-share on: {reason}; give --index-share auto or off")
        }
        RunnerError::IndexCacheDtype => anyhow!(
            "--index-cache-dtype fp8: the config has no index_topk: attention is dense and has no \
             index keys; give --index-cache-dtype auto"
        ),
        RunnerError::DraftSampling { reason } => {
            anyhow!("--draft-sampling sampled: {reason}; give --draft-sampling greedy")
        }
        RunnerError::GpuMemory(plan) => anyhow!(
            "{}; raise --gpu-memory-utilization, or lower --max-num-seqs, \
             --max-num-batched-tokens, --max-model-len or --num-blocks",
            plan.shortage()
        ),
        error => error.into(),
    }
}

/// Reads or makes the weights and allocates the KV caches.
pub(crate) fn load_runner(
    dir: &Path,
    dtype: ComputeDtype,
    format: LoadFormatArg,
    options: &RunnerOptions,
) -> Result<Runner> {
    let drafting = options.num_speculative_tokens > 0;
    let format = load_format(format);
    let max_model_len = options.max_model_len;
    let load = LoadOptions { dtype, format, drafting, max_model_len, ..LoadOptions::default() };
    let model = models::load(dir, load).map_err(no_weights)?;
    Runner::new(model, options).map_err(refused)
}

/// Decides the CPU threads: those of the kernels, one a core where `threads` does not say.
///
/// libtorch gets one: what is left for it on CPU is small, and its own pool would take the cores
/// from the kernels' while it waits for work.
pub(crate) fn limit_threads(threads: Option<usize>) -> Result<()> {
    tch::set_num_threads(1);
    let Some(threads) = threads else { return Ok(()) };
    let n_cores = std::thread::available_parallelism()?.get();
    ensure!(
        (1..=n_cores).contains(&threads),
        "--threads {threads}: give 1 to {n_cores}, the cores of this machine"
    );
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
    pool.build_global().context("start the CPU threads")
}

/// The name of a dtype on the command line.
pub(crate) fn dtype_name(dtype: ComputeDtype) -> &'static str {
    match dtype {
        ComputeDtype::Float32 => "float32",
        ComputeDtype::Bfloat16 => "bfloat16",
    }
}

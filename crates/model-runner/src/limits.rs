//! Memory planning: from options and a model's sizes to the limits that plans keep.

use engine_types::{ExecutorLimits, MAX_SPECULATIVE_TOKENS};
use model_config::ModelConfig;
use models::{IndexCacheDtype, KvInit};
use spec_decode::{IndexShare, SyntheticAcceptance};
use tch::Kind;

use crate::error::RunnerError;

/// What a [`Runner`](crate::Runner) is built with.
#[derive(Clone, Debug, PartialEq)]
pub struct RunnerOptions {
    /// Tokens a KV block.
    pub block_size: u32,
    /// KV blocks in the pool; `None` takes what `max_num_seqs` requests of full length need, or
    /// what `kv_cache_bytes` hold if that is less.
    pub num_blocks: Option<u32>,
    /// Upper bound of the pool in bytes where `num_blocks` is not given.
    pub kv_cache_bytes: u64,
    /// Largest number of requests in a step.
    pub max_num_seqs: u32,
    /// Largest number of queried tokens in a step.
    pub max_num_batched_tokens: u32,
    /// Largest length of a request, prompt and output together; `None` is the model's own.
    pub max_model_len: Option<u32>,
    /// Drafts a step, 0 to [`MAX_SPECULATIVE_TOKENS`]; 0 needs no MTP layer.
    pub num_speculative_tokens: u32,
    /// Which attention runs.
    pub attention: AttentionChoice,
    /// What fresh KV caches hold.
    pub kv_init: KvInit,
    /// Whether draft steps after the first reuse its selection of keys.
    pub index_share: IndexShare,
    /// How index keys are stored.
    pub index_cache_dtype: IndexCacheDtype,
    /// How the drafts of sampled requests are made.
    pub draft_sampling: DraftSampling,
    /// Accepts drafts by a schedule for as many drafts as `num_speculative_tokens`, whatever the
    /// target says, for benches: the text is meaningless, and requests that are not greedy or
    /// exclude tokens fail.
    pub synthetic_acceptance: Option<SyntheticAcceptance>,
    /// Share of a GPU's memory that weights, workspaces and the KV pool take together, where
    /// `num_blocks` is not given, in (0, 1].
    pub gpu_memory_utilization: f64,
    /// Whether decode steps on a GPU are replayed as graphs.
    pub gpu_graphs: bool,
}

/// Which attention backend a runner uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AttentionChoice {
    /// The production backend of the device.
    #[default]
    Auto,
    /// The plain one, in tensor operations; slow, for comparison.
    Reference,
}

/// How a runner makes the drafts of requests with a temperature. What is generated has the same
/// distribution either way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DraftSampling {
    /// The likeliest token.
    #[default]
    Greedy,
    /// A draw from the drafter's distribution at the request's temperature, which is kept on the
    /// device for verification: one f32 for each token id, draft and block table.
    Sampled,
}

impl Default for RunnerOptions {
    fn default() -> Self {
        Self {
            block_size: 16,
            num_blocks: None,
            kv_cache_bytes: 256 << 20,
            max_num_seqs: 64,
            max_num_batched_tokens: 2048,
            max_model_len: None,
            num_speculative_tokens: 0,
            attention: AttentionChoice::Auto,
            kv_init: KvInit::Zero,
            index_share: IndexShare::Auto,
            index_cache_dtype: IndexCacheDtype::Auto,
            draft_sampling: DraftSampling::Greedy,
            synthetic_acceptance: None,
            gpu_memory_utilization: 0.9,
            gpu_graphs: true,
        }
    }
}

/// What planning needs to know of a model.
#[derive(Clone, Copy)]
pub(crate) struct Planned<'a> {
    pub(crate) config: &'a ModelConfig,
    /// MTP layers that are loaded.
    pub(crate) num_mtp_layers: usize,
    /// The dtype of its caches.
    pub(crate) kind: Kind,
}

/// Checks `options` against a model and plans the pool, which has latents for every loaded layer
/// and index keys for every loaded layer with an indexer.
pub(crate) fn plan_limits(
    options: &RunnerOptions,
    model: Planned<'_>,
) -> Result<ExecutorLimits, RunnerError> {
    let Planned { config, num_mtp_layers, .. } = model;
    let drafts = options.num_speculative_tokens;
    at_least_one("block_size", options.block_size)?;
    at_least_one("max_num_seqs", options.max_num_seqs)?;
    at_least_one("max_num_batched_tokens", options.max_num_batched_tokens)?;
    if drafts as usize > MAX_SPECULATIVE_TOKENS {
        let limit = format!("at most {MAX_SPECULATIVE_TOKENS}");
        return Err(invalid("num_speculative_tokens", drafts, limit));
    }
    if drafts > 0 && num_mtp_layers == 0 {
        return Err(RunnerError::NoMtpLayers { num_speculative_tokens: drafts });
    }
    if config.dsa.is_none() && options.index_cache_dtype != IndexCacheDtype::Auto {
        return Err(RunnerError::IndexCacheDtype);
    }
    check_drafting(options)?;
    let model_len = u32::try_from(config.max_position_embeddings).unwrap_or(u32::MAX);
    let max_model_len = options.max_model_len.unwrap_or(model_len);
    at_least_one("max_model_len", max_model_len)?;
    if max_model_len > model_len {
        return Err(invalid("max_model_len", max_model_len, format!("at most {model_len}")));
    }
    Ok(ExecutorLimits {
        block_size: options.block_size,
        num_blocks: num_blocks(options, n_bytes_per_slot(options, model), max_model_len)?,
        max_model_len,
        max_num_seqs: options.max_num_seqs,
        max_num_batched_tokens: options.max_num_batched_tokens,
        max_num_speculative_tokens: drafts,
        n_lookahead_max: if drafts > 0 { to_u32(num_mtp_layers) } else { 0 },
        vocab_size: to_u32(config.vocab_size),
    })
}

fn check_drafting(options: &RunnerOptions) -> Result<(), RunnerError> {
    let num_speculative_tokens = options.num_speculative_tokens;
    if options.draft_sampling == DraftSampling::Sampled {
        let reason = match options.synthetic_acceptance {
            _ if num_speculative_tokens == 0 => "num_speculative_tokens is 0",
            Some(_) => "with synthetic acceptance no request is sampled",
            None => return Ok(()),
        };
        return Err(RunnerError::DraftSampling { reason });
    }
    match &options.synthetic_acceptance {
        Some(synthetic) if synthetic.marginal().len() != num_speculative_tokens as usize => {
            let n_places = synthetic.marginal().len();
            Err(RunnerError::SyntheticAcceptance { n_places, num_speculative_tokens })
        }
        _ => Ok(()),
    }
}

/// Bytes that the caches of all loaded layers keep for a token.
pub(crate) fn n_bytes_per_slot(options: &RunnerOptions, model: Planned<'_>) -> usize {
    let Planned { config, num_mtp_layers, kind } = model;
    let latent = config.attention.cache_width() * kind.elt_size_in_bytes();
    let n_layers = config.num_hidden_layers + num_mtp_layers;
    let index = config.dsa.as_ref().map_or(0, |dsa| {
        let n_indexers = (0..n_layers).filter(|&layer_idx| config.has_indexer(layer_idx)).count();
        n_indexers * options.index_cache_dtype.n_bytes_per_key(dsa, kind)
    });
    n_layers * latent + index
}

fn num_blocks(
    options: &RunnerOptions,
    n_bytes_per_slot: usize,
    max_model_len: u32,
) -> Result<u32, RunnerError> {
    let block_bytes = u64::from(options.block_size) * n_bytes_per_slot as u64;
    let n_blocks = match options.num_blocks {
        Some(n_blocks) => {
            at_least_one("num_blocks", n_blocks)?;
            u64::from(n_blocks)
        }
        None => {
            let per_seq = u64::from(max_model_len.div_ceil(options.block_size));
            (options.kv_cache_bytes / block_bytes).min(per_seq * u64::from(options.max_num_seqs))
        }
    };
    if n_blocks == 0 {
        return Err(RunnerError::NoRoomForKv {
            kv_cache_bytes: options.kv_cache_bytes,
            block_bytes,
        });
    }
    // Slots cross to the device as i32.
    let n_slots = n_blocks.saturating_mul(u64::from(options.block_size));
    if n_slots > i32::MAX as u64 {
        let limit =
            format!("at most {} with this block size", i32::MAX as u32 / options.block_size);
        return Err(invalid("num_blocks", n_blocks, limit));
    }
    Ok(u32::try_from(n_blocks).expect("fewer blocks than slots"))
}

fn at_least_one(name: &'static str, value: u32) -> Result<(), RunnerError> {
    if value == 0 { Err(invalid(name, value, "at least 1".to_owned())) } else { Ok(()) }
}

fn invalid(name: &'static str, value: impl Into<u64>, limit: String) -> RunnerError {
    RunnerError::Option { name, value: value.into(), limit }
}

fn to_u32(value: usize) -> u32 {
    u32::try_from(value).expect("sizes of a model are below 2^32")
}

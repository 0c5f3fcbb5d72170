//! A bundled model behind an engine, and requests driven to their end.

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use engine::{ChannelSink, Engine, EngineConfig, EngineHandle, EngineThread, EventSink, Events};
use engine_types::{
    FinishReason, Request, RequestEvent, SamplingParams, SpecDecodeStats, StepExecutor, TokenId,
    Usage,
};
use model_config::ModelConfig;
use model_runner::{Runner, RunnerOptions};
use models::{ComputeDtype, LoadOptions};
use scheduler::{DraftPolicy, SchedulerConfig};

use crate::oracle::Checkpoint;
use crate::recorder::{Recorder, Records};

/// What became of a request.
#[derive(Clone, Debug, PartialEq)]
pub struct Generation {
    /// The generated tokens.
    pub token_ids: Vec<TokenId>,
    /// Accepted drafts of each verify step.
    pub accepted_per_step: Vec<u32>,
    /// The drafts of each verify step.
    pub drafts_per_step: Vec<Vec<TokenId>>,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// Token counts.
    pub usage: Usage,
    /// What drafting did.
    pub spec_decode: SpecDecodeStats,
}

/// Loads a bundled checkpoint and starts an engine around it, without a prefix cache.
///
/// # Errors
///
/// If the checkpoint, the runner or the scheduler refuses.
pub fn start(
    checkpoint: Checkpoint,
    dtype: ComputeDtype,
    options: &RunnerOptions,
) -> Result<(EngineHandle, EngineThread)> {
    spawn(scheduler_config(checkpoint, options)?, make_runner(checkpoint, dtype, options))
}

/// As [`start`], with a prefix cache.
///
/// # Errors
///
/// As [`start`].
pub fn start_cached(
    checkpoint: Checkpoint,
    dtype: ComputeDtype,
    options: &RunnerOptions,
) -> Result<(EngineHandle, EngineThread)> {
    let config = scheduler_config(checkpoint, options)?;
    let config = SchedulerConfig { enable_prefix_caching: true, ..config };
    spawn(config, make_runner(checkpoint, dtype, options))
}

/// As [`start`], and notes each step in the returned records.
///
/// # Errors
///
/// As [`start`].
pub fn start_recorded(
    checkpoint: Checkpoint,
    dtype: ComputeDtype,
    options: &RunnerOptions,
) -> Result<(EngineHandle, EngineThread, Records)> {
    start_scheduled(checkpoint, options, scheduler_config(checkpoint, options)?, dtype)
}

/// As [`start_recorded`], with a scheduler of its own kind.
///
/// # Errors
///
/// As [`start`].
pub fn start_scheduled(
    checkpoint: Checkpoint,
    options: &RunnerOptions,
    scheduler: SchedulerConfig,
    dtype: ComputeDtype,
) -> Result<(EngineHandle, EngineThread, Records)> {
    let records = Records::default();
    let (noted, make_runner) = (records.clone(), make_runner(checkpoint, dtype, options));
    let (engine, thread) = spawn(scheduler, || Ok(Recorder::new(make_runner()?, noted)))?;
    Ok((engine, thread, records))
}

/// What a scheduler takes from the runner's options and the checkpoint. Most tests have no prefix
/// cache: how many steps and rows there are depends on lengths alone.
///
/// # Errors
///
/// If the checkpoint is not there or cannot be read.
pub fn scheduler_config(
    checkpoint: Checkpoint,
    options: &RunnerOptions,
) -> Result<SchedulerConfig> {
    Ok(SchedulerConfig {
        max_num_seqs: options.max_num_seqs,
        max_num_batched_tokens: options.max_num_batched_tokens,
        num_speculative_tokens: options.num_speculative_tokens,
        drafting: DraftPolicy::Fixed,
        eos_token_ids: ModelConfig::load(&checkpoint.dir()?)?.eos_token_ids,
        enable_prefix_caching: false,
        ..SchedulerConfig::default()
    })
}

fn spawn<X: StepExecutor>(
    scheduler: SchedulerConfig,
    make_executor: impl FnOnce() -> Result<X> + Send + 'static,
) -> Result<(EngineHandle, EngineThread)> {
    Ok(Engine::spawn(EngineConfig { scheduler, ..EngineConfig::default() }, make_executor)?)
}

/// Loads a bundled checkpoint in the thread that calls it.
fn make_runner(
    checkpoint: Checkpoint,
    dtype: ComputeDtype,
    options: &RunnerOptions,
) -> impl FnOnce() -> Result<Runner> + Send + use<> {
    let options = options.clone();
    move || runner(checkpoint, dtype, &options)
}

/// Loads a bundled checkpoint.
///
/// # Errors
///
/// If the checkpoint or the runner refuses.
pub fn runner(
    checkpoint: Checkpoint,
    dtype: ComputeDtype,
    options: &RunnerOptions,
) -> Result<Runner> {
    let drafting = options.num_speculative_tokens > 0;
    let load = LoadOptions { dtype, drafting, ..LoadOptions::default() };
    Ok(Runner::new(models::load(&checkpoint.dir()?, load)?, options)?)
}

/// Parameters of a plain request.
#[must_use]
pub fn params(max_tokens: u32) -> SamplingParams {
    SamplingParams { max_tokens, ignore_eos: false, ..SamplingParams::default() }
}

/// Hands a request to the engine.
///
/// # Errors
///
/// If the engine refuses it.
pub fn submit(
    engine: &EngineHandle,
    prompt: &[TokenId],
    params: SamplingParams,
) -> Result<Events, engine::SubmitError> {
    submit_salted(engine, prompt, params, None)
}

/// As [`submit`], with a salt for the prefix cache.
///
/// # Errors
///
/// As [`submit`].
pub fn submit_salted(
    engine: &EngineHandle,
    prompt: &[TokenId],
    params: SamplingParams,
    cache_salt: Option<&[u8]>,
) -> Result<Events, engine::SubmitError> {
    let mut request = request(engine, prompt, params);
    request.cache_salt = cache_salt.map(<[u8]>::to_vec);
    let (sink, events) = channel(&request);
    engine.submit(request, Box::new(sink))?;
    Ok(events)
}

/// As [`submit`], with a time at which the request ends at the latest.
///
/// # Errors
///
/// As [`submit`].
pub fn submit_until(
    engine: &EngineHandle,
    prompt: &[TokenId],
    params: SamplingParams,
    deadline: Instant,
) -> Result<Events, engine::SubmitError> {
    let request = request(engine, prompt, params);
    let (sink, events) = channel(&request);
    engine.submit_all(request, vec![Box::new(sink)], Some(deadline))?;
    Ok(events)
}

/// As [`submit`], with `n` continuations of the prompt, each with its events.
///
/// # Errors
///
/// As [`submit`].
pub fn submit_n(
    engine: &EngineHandle,
    prompt: &[TokenId],
    params: SamplingParams,
    n: usize,
) -> Result<Vec<Events>, engine::SubmitError> {
    let mut request = request(engine, prompt, params);
    request.siblings = (1..n).map(|_| engine.next_request_id()).collect();
    let (mut sinks, mut events) = (Vec::<Box<dyn EventSink>>::new(), vec![]);
    for _ in 0..n {
        let (sink, of_sink) = channel(&request);
        sinks.push(Box::new(sink));
        events.push(of_sink);
    }
    engine.submit_all(request, sinks, None)?;
    Ok(events)
}

fn request(engine: &EngineHandle, prompt: &[TokenId], params: SamplingParams) -> Request {
    Request::new(engine.next_request_id(), prompt.to_vec(), params)
}

/// A step emits at least one token, so that no request has more events than tokens.
fn channel(request: &Request) -> (ChannelSink, Events) {
    engine::channel(request.params.max_tokens as usize)
}

/// Waits for the end of a request and checks its events and its counts against each other.
///
/// # Errors
///
/// If the engine stops before the request's end, or what it counts is not what it streamed.
pub fn collect(events: Events) -> Result<Generation> {
    let mut token_ids = vec![];
    let (mut accepted_per_step, mut drafts_per_step) = (vec![], vec![]);
    for event in events {
        match event {
            RequestEvent::Tokens(step) => {
                let n_accepted = step.n_accepted as usize;
                ensure!(step.tokens.len() == n_accepted + 1, "{step:?}");
                ensure!(step.tokens[..n_accepted] == step.drafts[..n_accepted], "{step:?}");
                token_ids.extend(step.tokens);
                if !step.drafts.is_empty() {
                    accepted_per_step.push(step.n_accepted);
                    drafts_per_step.push(step.drafts.to_vec());
                }
            }
            RequestEvent::Finished { reason: finish_reason, usage, spec_decode, .. } => {
                let n_accepted: u32 = accepted_per_step.iter().sum();
                let n_drafts: usize = drafts_per_step.iter().map(Vec::len).sum();
                ensure!(usage.completion_tokens as usize == token_ids.len(), "{usage:?}");
                ensure!(spec_decode.n_accepted_tokens == u64::from(n_accepted), "{spec_decode:?}");
                ensure!(spec_decode.n_draft_tokens == n_drafts as u64, "{spec_decode:?}");
                return Ok(Generation {
                    token_ids,
                    accepted_per_step,
                    drafts_per_step,
                    finish_reason,
                    usage,
                    spec_decode: *spec_decode,
                });
            }
            _ => {}
        }
    }
    None.context("the engine has stopped")
}

/// Runs requests at once; results are in the order of the requests.
///
/// # Errors
///
/// As [`submit`] and [`collect`].
pub fn generate<'a>(
    engine: &EngineHandle,
    requests: impl IntoIterator<Item = (&'a [TokenId], SamplingParams)>,
) -> Result<Vec<Generation>> {
    let running: Vec<Events> = requests
        .into_iter()
        .map(|(prompt, params)| submit(engine, prompt, params))
        .collect::<Result<_, _>>()?;
    running.into_iter().map(collect).collect()
}

/// Runs all cases of a checkpoint at once in an engine of their own.
///
/// # Errors
///
/// As [`start`] and [`generate`].
pub fn generate_cases(
    checkpoint: Checkpoint,
    dtype: ComputeDtype,
    options: &RunnerOptions,
) -> Result<Vec<Generation>> {
    let cases = checkpoint.cases()?;
    let (engine, _thread) = start(checkpoint, dtype, options)?;
    generate(&engine, cases.iter().map(|case| (&case.prompt_ids[..], params(case.max_tokens()))))
}

/// Mean tokens a verify step adds, over all of `done`.
#[must_use]
pub fn acceptance_length<'a>(done: impl IntoIterator<Item = &'a Generation>) -> f64 {
    let mut sum = SpecDecodeStats::default();
    done.into_iter().for_each(|found| sum.merge(&found.spec_decode));
    sum.acceptance_length().unwrap_or(1.0)
}

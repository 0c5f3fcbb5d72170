//! `tandem generate`: prompts through one engine at once, results in the order of the prompts.

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use engine::{EventSink, Events};
use engine_types::{
    BoxedStopTexts, FinishReason, IndexerCounts, IndexerStats, Request, RequestEvent,
    SamplingParams, SpecDecodeStats, TokenId, TokenLogprobs, TokensEvent, Usage,
};
use serde_json::{Value, json};
use settings::DraftingArg;
use tokenization::{StopRules, Tokenizer};

use crate::cli::{GenerateArgs, SamplingArgs};
use crate::loading::{self, LoadedEngine};
use crate::output;
use crate::prompts::{self, PromptLine};

/// What became of one continuation of a prompt.
#[derive(Debug, Default)]
struct Generation {
    prompt_ids: Vec<TokenId>,
    token_ids: Vec<TokenId>,
    logprobs: Vec<TokenLogprobs>,
    accepted_per_step: Vec<u32>,
    drafts_per_step: Vec<Vec<TokenId>>,
    end: Option<(FinishReason, Usage, SpecDecodeStats)>,
}

pub(crate) fn run(args: &GenerateArgs) -> Result<()> {
    ensure!(args.stop.iter().all(|text| !text.is_empty()), "--stop: a text is empty");
    let prompts = prompts::of_generate(args)?;
    let mut engine_args = args.engine.clone();
    // All prompts are known and wait here anyway: nothing is refused for the length of the queue.
    let n_requests = u32::try_from(prompts.len()).ok().and_then(|n| n.checked_mul(args.n));
    let n_requests = n_requests.context("too many prompts, or --n is too large")?;
    engine_args.max_queued_requests = engine_args.max_queued_requests.max(n_requests);
    let engine = loading::start_engine(&engine_args, DraftingArg::Fixed)?;
    let result = run_prompts(args, &engine, &prompts);
    engine.thread.drain();
    result
}

fn run_prompts(
    args: &GenerateArgs,
    engine: &LoadedEngine,
    prompts: &[(String, PromptLine)],
) -> Result<()> {
    let tokenizer = engine.model.tokenizer.as_deref();
    ensure!(
        args.stop.is_empty() || tokenizer.is_some(),
        "--stop: the checkpoint has no tokenizer.json; give --stop-token-ids"
    );
    let start = Instant::now();
    let mut running = Vec::with_capacity(prompts.len());
    for (place, prompt) in prompts {
        let ids = prompt.ids(tokenizer, engine.model.config.vocab_size);
        let submitted = ids.and_then(|ids| submit(args, engine, prompt, ids));
        running.push(submitted.with_context(|| place.clone())?);
    }
    let generations: Vec<Generation> = running
        .into_iter()
        .flat_map(|(ids, all)| all.into_iter().map(move |events| collect(ids.clone(), events)))
        .collect();
    let seconds = start.elapsed().as_secs_f64();
    // Only now does it hold what every prompt of the run took.
    let indexer = engine.handle.stats().indexer;
    let indexer_json = indexer_json(engine, &indexer);
    let mut n_tokens = 0;
    let mut stats = SpecDecodeStats::default();
    for (idx, generation) in generations.iter().enumerate() {
        let (reason, _, spec_decode) = generation.end.as_ref().context("the engine has stopped")?;
        if let FinishReason::Failed(message) = reason {
            bail!("a step failed: {message}");
        }
        n_tokens += generation.token_ids.len();
        stats.merge(spec_decode);
        let index = (args.n > 1).then(|| idx % args.n as usize);
        print(args, (index, generation), tokenizer, indexer_json.as_ref())?;
    }
    tracing::info!(
        requests = generations.len(),
        tokens = n_tokens,
        seconds,
        tokens_per_second = n_tokens as f64 / seconds,
        acceptance_length = stats.acceptance_length(),
        indexer_launches_per_propose = launches_per_propose(&indexer),
        "generated"
    );
    Ok(())
}

/// Submits a prompt; returns it with the events of each of its continuations.
fn submit(
    args: &GenerateArgs,
    engine: &LoadedEngine,
    line: &PromptLine,
    prompt: Vec<TokenId>,
) -> Result<(Vec<TokenId>, Vec<Events>)> {
    let handle = &engine.handle;
    let max_model_len = handle.limits().max_model_len;
    let n_prompt = u32::try_from(prompt.len()).unwrap_or(u32::MAX);
    let until_full = max_model_len.saturating_sub(n_prompt).max(1);
    let max_tokens = line.max_tokens.or(args.max_tokens).unwrap_or(until_full);
    let params = SamplingParams {
        max_tokens,
        ignore_eos: line.ignore_eos.unwrap_or(args.ignore_eos),
        stop_token_ids: line.stop_token_ids.clone().unwrap_or(args.stop_token_ids.clone()),
        num_speculative_tokens: line.num_speculative_tokens,
        logprobs: args.logprobs,
        ..sampling(&args.sampling)?
    };
    let detector = |tokenizer: &Arc<Tokenizer>| {
        BoxedStopTexts(Box::new(tokenizer.stop_text_detector(&args.stop)))
    };
    let request = Request {
        id: handle.next_request_id(),
        prompt: prompt.clone(),
        params,
        cache_salt: line.cache_salt.clone().or(args.cache_salt.clone()).map(String::into_bytes),
        priority: line.priority.unwrap_or(0),
        guide: None,
        stop_texts: engine.model.tokenizer.as_ref().filter(|_| !args.stop.is_empty()).map(detector),
        siblings: (1..args.n).map(|_| handle.next_request_id()).collect(),
    };
    let (mut sinks, mut events) = (Vec::<Box<dyn EventSink>>::new(), Vec::new());
    for _ in 0..args.n {
        // A step emits at least one token, so that no request has more events than tokens.
        let (sink, of_sink) = engine::channel(max_tokens.min(until_full) as usize);
        sinks.push(Box::new(sink));
        events.push(of_sink);
    }
    handle.submit_all(request, sinks, None)?;
    Ok((prompt, events))
}

/// How the flags have tokens chosen.
fn sampling(args: &SamplingArgs) -> Result<SamplingParams> {
    let &SamplingArgs { temperature, top_p, top_k, min_p, seed } = args;
    // The engine itself has no randomness.
    let seed = if temperature > 0.0 && seed.is_none() { Some(getrandom::u64()?) } else { seed };
    Ok(SamplingParams { temperature, top_p, top_k, min_p, seed, ..Default::default() })
}

fn collect(prompt_ids: Vec<TokenId>, events: Events) -> Generation {
    let mut generation = Generation { prompt_ids, ..Generation::default() };
    for event in events {
        match event {
            RequestEvent::Tokens(TokensEvent { tokens, n_accepted, drafts, logprobs, .. }) => {
                generation.token_ids.extend(tokens);
                generation.logprobs.extend(logprobs);
                if !drafts.is_empty() {
                    generation.accepted_per_step.push(n_accepted);
                    generation.drafts_per_step.push(drafts.to_vec());
                }
            }
            RequestEvent::Finished { reason, usage, spec_decode, .. } => {
                generation.end = Some((reason, usage, *spec_decode));
            }
            _ => {}
        }
    }
    generation
}

fn print(
    args: &GenerateArgs,
    (index, generation): (Option<usize>, &Generation),
    tokenizer: Option<&Tokenizer>,
    indexer: Option<&Value>,
) -> Result<()> {
    let text = tokenizer.map(|tokenizer| text(tokenizer, &args.stop, &generation.token_ids));
    if args.json {
        let mut object = to_json(generation, text, indexer);
        if args.engine.is_synthetic() {
            // The text means nothing, and nobody should take it for a measurement of the model.
            object["synthetic_acceptance"] = json!(true);
        }
        if args.logprobs.is_some() {
            object["logprobs"] = generation.logprobs.iter().map(logprobs_json).collect();
        }
        if let Some(index) = index {
            object["index"] = json!(index);
        }
        return output::json_line(&object);
    }
    let ids = || {
        let ids: Vec<String> = generation.token_ids.iter().map(ToString::to_string).collect();
        ids.join(",")
    };
    output::text(&format!("{}\n", text.unwrap_or_else(ids)))
}

/// The text of `ids` up to the first of the texts `stop`.
fn text(tokenizer: &Tokenizer, stop: &[String], ids: &[TokenId]) -> String {
    let rules = StopRules { texts: stop.to_vec(), ..StopRules::default() };
    let (mut output, mut text) = (tokenizer.output_text(&rules), String::new());
    ids.iter().for_each(|id| output.push(*id, &mut text));
    output.finish(&mut text);
    text
}

fn logprobs_json(entry: &TokenLogprobs) -> Value {
    let top = |(id, logprob): &(TokenId, f32)| json!({"token_id": id, "logprob": logprob});
    let top: Vec<Value> = entry.top.iter().map(top).collect();
    json!({"logprob": entry.logprob, "top": top})
}

fn to_json(generation: &Generation, text: Option<String>, indexer: Option<&Value>) -> Value {
    let end = generation.end.as_ref();
    let (usage, stats) = end.map_or_else(Default::default, |(_, usage, stats)| (*usage, *stats));
    let mut object = json!({
        "prompt_ids": generation.prompt_ids,
        "token_ids": generation.token_ids,
        "finish_reason": end.map(|(reason, ..)| finish_reason(reason)),
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
        },
        "spec_decode": {
            "num_draft_tokens": stats.n_draft_tokens,
            "num_accepted_tokens": stats.n_accepted_tokens,
            "accepted_per_step": generation.accepted_per_step,
            "drafts_per_step": generation.drafts_per_step,
            "acceptance_length": stats.acceptance_length(),
        },
    });
    if let Some(text) = text {
        object["text"] = json!(text);
    }
    if let Some(indexer) = indexer {
        object["indexer"] = indexer.clone();
    }
    object
}

/// What the indexers did in the run; `None` for a model without any.
fn indexer_json(engine: &LoadedEngine, stats: &IndexerStats) -> Option<Value> {
    engine.model.config.dsa.as_ref()?;
    let counts = |counts: &IndexerCounts| {
        json!({
            "launches": counts.n_launches,
            "rows": counts.n_rows,
            "scored_keys": counts.n_scored_keys,
        })
    };
    let num_speculative_tokens = engine.handle.request_rules().num_speculative_tokens as usize;
    let draft_steps = stats.draft_steps.iter().take(num_speculative_tokens);
    Some(json!({
        "index_share": engine.index_share,
        "target_prefill": counts(&stats.target_prefill),
        "target_verify": counts(&stats.target_verify),
        "draft_steps": draft_steps.map(counts).collect::<Vec<_>>(),
    }))
}

/// How often an indexer runs for one propose: 1 where draft steps share a selection.
fn launches_per_propose(stats: &IndexerStats) -> Option<f64> {
    let n_proposes = stats.draft_steps[0].n_launches;
    (n_proposes > 0).then(|| stats.draft().n_launches as f64 / n_proposes as f64)
}

/// The word that clients of other engines know for an end.
fn finish_reason(reason: &FinishReason) -> &'static str {
    match reason {
        FinishReason::Eos(_)
        | FinishReason::StopToken(_)
        | FinishReason::StopSequence(_)
        | FinishReason::StopText(_) => "stop",
        FinishReason::MaxTokens | FinishReason::ModelLength => "length",
        FinishReason::OutOfBlocks => "out_of_blocks",
        FinishReason::Aborted => "abort",
        FinishReason::DeadlineExceeded => "deadline_exceeded",
        _ => "error",
    }
}

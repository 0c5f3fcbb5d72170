//! Domain values to proto messages.

use engine::EngineHandle;
use engine_types::{
    FinishReason, IndexerCounts, IndexerStats, MAX_SPECULATIVE_TOKENS, SpecDecodeStats, TokenId,
    TokenLogprobs, Usage,
};
use grpc_api::control::v1 as control;
use grpc_api::inference::v1 as pb;

/// How an output ended, apart from failures.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct End {
    pub(crate) reason: pb::FinishReason,
    pub(crate) matched_token_id: Option<u32>,
    pub(crate) matched_stop_sequence: Option<u32>,
    pub(crate) matched_stop_text: Option<u32>,
}

/// The proto form of a finish reason; `Err` holds the text of a failure.
pub(crate) fn end(reason: FinishReason) -> Result<End, String> {
    let plain = |reason| Ok(End { reason, ..End::default() });
    match reason {
        FinishReason::Eos(id) => {
            Ok(End { reason: pb::FinishReason::Eos, matched_token_id: Some(id), ..End::default() })
        }
        FinishReason::StopToken(id) => Ok(End {
            reason: pb::FinishReason::StopToken,
            matched_token_id: Some(id),
            ..End::default()
        }),
        FinishReason::StopSequence(index) => Ok(End {
            reason: pb::FinishReason::StopSequence,
            matched_stop_sequence: u32::try_from(index).ok(),
            ..End::default()
        }),
        FinishReason::StopText(index) => Ok(End {
            reason: pb::FinishReason::StopText,
            matched_stop_text: u32::try_from(index).ok(),
            ..End::default()
        }),
        FinishReason::GrammarComplete => plain(pb::FinishReason::ConstraintComplete),
        FinishReason::MaxTokens => plain(pb::FinishReason::MaxTokens),
        FinishReason::ModelLength => plain(pb::FinishReason::ModelLength),
        FinishReason::OutOfBlocks => plain(pb::FinishReason::OutOfBlocks),
        FinishReason::Aborted => plain(pb::FinishReason::Aborted),
        FinishReason::Failed(message) => Err(message),
        other => Err(format!("{other:?}")),
    }
}

/// A finish reason as metrics and traces name it, in the words of OpenAI's API where it has one.
#[must_use]
pub fn reason_name(reason: &FinishReason) -> &'static str {
    match reason {
        FinishReason::MaxTokens | FinishReason::ModelLength | FinishReason::OutOfBlocks => "length",
        FinishReason::Aborted => "abort",
        FinishReason::DeadlineExceeded => "deadline",
        FinishReason::Failed(_) => "error",
        _ => "stop",
    }
}

pub(crate) fn usage(usage: Usage) -> pb::Usage {
    pb::Usage {
        prompt_tokens: usage.prompt_tokens,
        completion_tokens: usage.completion_tokens,
        cached_prompt_tokens: usage.cached_tokens,
    }
}

/// The log probabilities of `ids`, one entry for each.
pub(crate) fn logprobs(ids: &[TokenId], logprobs: &[TokenLogprobs]) -> Vec<pb::TokenLogprobs> {
    let top = |(token_id, logprob): &(TokenId, f32)| pb::TopLogprob {
        token_id: *token_id,
        logprob: *logprob,
    };
    let entry = |(id, of_token): (&TokenId, &TokenLogprobs)| pb::TokenLogprobs {
        token_id: *id,
        logprob: of_token.logprob,
        top: of_token.top.iter().map(top).collect(),
    };
    ids.iter().zip(logprobs).map(entry).collect()
}

/// Statistics up to the deepest position that was drafted.
pub(crate) fn speculation(stats: &SpecDecodeStats) -> pb::SpeculationStats {
    let drafted = &stats.drafted_per_position;
    let depth = (0..MAX_SPECULATIVE_TOKENS).rev().find(|i| drafted[*i] > 0).map_or(0, |i| i + 1);
    let n_bins = if depth == 0 { 0 } else { depth + 1 };
    pb::SpeculationStats {
        verify_steps: stats.n_verify_steps,
        draft_tokens: stats.n_draft_tokens,
        accepted_tokens: stats.n_accepted_tokens,
        drafted_per_position: drafted[..depth].to_vec(),
        accepted_per_position: stats.accepted_per_position[..depth].to_vec(),
        accepted_histogram: stats.histogram[..n_bins].to_vec(),
        acceptance_length: stats.acceptance_length(),
    }
}

/// What the indexers did, without draft steps that the server does not have.
fn indexer(stats: &IndexerStats, num_speculative_tokens: u32) -> control::IndexerStats {
    let counts = |counts: &IndexerCounts| control::IndexerCounts {
        launches: counts.n_launches,
        rows: counts.n_rows,
        scored_keys: counts.n_scored_keys,
    };
    let draft_steps = stats.draft_steps.iter().take(num_speculative_tokens as usize);
    control::IndexerStats {
        target_prefill: Some(counts(&stats.target_prefill)),
        target_verify: Some(counts(&stats.target_verify)),
        draft_steps: draft_steps.map(counts).collect(),
    }
}

/// Load and totals of an engine, the work of indexers among them where its model has any.
pub(crate) fn stats(engine: &EngineHandle, has_indexer: bool) -> control::GetStatsResponse {
    let stats = engine.stats();
    let scheduler = &stats.scheduler;
    // Requests that the engine thread has not looked at yet wait as well.
    let n_waiting = stats.n_unfinished.saturating_sub(scheduler.n_running);
    let num_speculative_tokens = engine.request_rules().num_speculative_tokens;
    control::GetStatsResponse {
        alive: stats.is_alive,
        running_requests: u32::try_from(scheduler.n_running).unwrap_or(u32::MAX),
        waiting_requests: u32::try_from(n_waiting).unwrap_or(u32::MAX),
        used_blocks: scheduler.blocks.n_used,
        total_blocks: engine.limits().num_blocks,
        steps: stats.n_steps,
        failed_steps: stats.n_failed_steps,
        finished_requests: scheduler.n_finished,
        prompt_tokens: scheduler.n_prompt_tokens,
        completion_tokens: scheduler.n_generated_tokens,
        preemptions: scheduler.n_preemptions,
        speculation: Some(speculation(&scheduler.spec_decode)),
        indexer: has_indexer.then(|| indexer(&stats.indexer, num_speculative_tokens)),
        cached_blocks: scheduler.blocks.n_cached,
        evicted_blocks: scheduler.blocks.n_evictions,
        prefix_queried_tokens: scheduler.n_prefix_queried_tokens,
        prefix_hit_tokens: scheduler.n_prefix_hit_tokens,
        preempted_requests: u32::try_from(scheduler.n_preempted).unwrap_or(u32::MAX),
        computed_tokens: scheduler.n_computed_tokens,
        shared_prompt_tokens: scheduler.n_shared_tokens,
        decode_steps: scheduler.n_decode_steps,
        prefill_steps: scheduler.n_prefill_steps,
        mixed_steps: scheduler.n_mixed_steps,
    }
}

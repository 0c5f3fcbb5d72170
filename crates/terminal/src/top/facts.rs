//! The figures as lines of text.

use crate::top::history::Rates;
use crate::top::sample::{Sample, passes, share};

/// A label and what is said under it.
pub(crate) type Fact = (&'static str, String);

pub(crate) fn title(sample: &Sample) -> String {
    let Sample { model, server, stats, .. } = sample;
    let state = if stats.alive { "" } else { " · the engine is dead" };
    let synthetic = if model.synthetic_acceptance { " · synthetic acceptance" } else { "" };
    let (name, architecture) = (&model.served_model_name, &model.architecture);
    let dtype = &model.dtype;
    format!("tandem {} · {name} · {architecture} {dtype}{synthetic}{state}", server.version)
}

pub(crate) fn requests(sample: &Sample) -> Fact {
    let Sample { server, stats, .. } = sample;
    let text = format!(
        "{} of {} running   {} waiting, {} of them preempted   {} ended",
        stats.running_requests,
        server.max_num_seqs,
        stats.waiting_requests,
        stats.preempted_requests,
        stats.finished_requests
    );
    ("requests", text)
}

pub(crate) fn blocks(sample: &Sample) -> Fact {
    let stats = &sample.stats;
    let text = format!(
        "{} used   {} cached   {} free   of {} blocks of {} tokens",
        stats.used_blocks,
        stats.cached_blocks,
        sample.free_blocks(),
        stats.total_blocks,
        sample.server.block_size
    );
    ("KV cache", text)
}

/// Tokens, a second where that is known.
pub(crate) fn tokens(sample: &Sample, rates: Option<Rates>) -> Fact {
    let stats = &sample.stats;
    let (prompt, generated) = (stats.prompt_tokens, stats.completion_tokens);
    let text = match rates {
        Some(rates) => format!(
            "{:.0}/s generated   {:.0}/s prompt   {generated} and {prompt} in all",
            rates.generated, rates.prompt
        ),
        None => format!("{generated} generated   {prompt} prompt"),
    };
    ("tokens", text)
}

pub(crate) fn steps(sample: &Sample) -> Fact {
    let stats = &sample.stats;
    let text = format!(
        "{} decode   {} prefill   {} mixed   {} failed   {} preemptions",
        stats.decode_steps,
        stats.prefill_steps,
        stats.mixed_steps,
        stats.failed_steps,
        stats.preemptions
    );
    ("steps", text)
}

pub(crate) fn prefixes(sample: &Sample) -> Fact {
    let Sample { server, stats, .. } = sample;
    if !server.prefix_caching {
        return ("prefixes", "not cached".to_owned());
    }
    let (hits, asked) = (stats.prefix_hit_tokens, stats.prefix_queried_tokens);
    let evicted = stats.evicted_blocks;
    let percent = 100.0 * share(hits, asked);
    let text = format!("{percent:.0} % of {asked} prompt tokens found   {evicted} blocks evicted");
    ("prefixes", text)
}

pub(crate) fn drafts(sample: &Sample, rates: Option<Rates>) -> Fact {
    let stats = sample.speculation();
    let Some(length) = stats.acceptance_length else {
        let why =
            if sample.model.num_speculative_tokens == 0 { "off" } else { "none verified yet" };
        return ("drafts", why.to_owned());
    };
    let now = rates.and_then(|rates| rates.acceptance_length);
    let now = now.map(|now| format!("   now {now:.2}")).unwrap_or_default();
    let (accepted, drafted) = (stats.accepted_tokens, stats.draft_tokens);
    let text = format!("acceptance length {length:.2}{now}   {accepted} of {drafted} accepted");
    ("drafts", text)
}

/// What the indexers did; nothing where attention is dense.
pub(crate) fn indexer(sample: &Sample) -> Vec<Fact> {
    let Some(stats) = &sample.stats.indexer else { return vec![] };
    let passes = passes(stats).into_iter().filter(|(_, counts)| counts.launches > 0);
    let line = |(name, counts): (String, grpc_api::control::v1::IndexerCounts)| {
        let name = name.replace('_', " ");
        format!("{name:<15} {:>10} {:>11} {:>14}", counts.launches, counts.rows, counts.scored_keys)
    };
    let head = format!("{:<15} {:>10} {:>11} {:>14}", "", "launches", "rows", "scored keys");
    let lines = std::iter::once(head).chain(passes.map(line));
    lines.enumerate().map(|(idx, line)| (if idx == 0 { "indexers" } else { "" }, line)).collect()
}

/// All figures of one sample, a line each.
#[must_use]
pub fn text(sample: &Sample) -> String {
    let mut facts =
        vec![requests(sample), blocks(sample), tokens(sample, None), drafts(sample, None)];
    for (place, share) in (1..).zip(sample.accepted_shares()) {
        facts.push(("", format!("position {place}: {:.0} % accepted", 100.0 * share)));
    }
    facts.extend([steps(sample), prefixes(sample)]);
    facts.extend(indexer(sample));
    let lines =
        facts.iter().map(|(label, text)| format!("{label:<10}{text}").trim_end().to_owned());
    let lines: Vec<String> = std::iter::once(title(sample)).chain(lines).collect();
    lines.join("\n") + "\n"
}

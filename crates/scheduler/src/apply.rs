//! What a step did.

use std::iter;

use engine_types::{
    FinishReason, OutcomeRow, PlanRow, RequestEvent, StepOutcome, StepPlan, StepTokens, TokenId,
    TokenLogprobs, TokenSource, TokensEvent,
};

use crate::commit::{Commit, EndRules, commit};
use crate::entry::{Entry, to_u32};
use crate::scheduler::{PlannedRow, Scheduler};

/// A row of a step and what became of it.
struct Answer<'a> {
    row: &'a PlanRow,
    run: &'a [TokenId],
    n_accepted: u32,
    proposals: &'a [TokenId],
    logprobs: &'a [TokenLogprobs],
    prompt_logprobs: &'a [TokenLogprobs],
    failure: Option<&'a str>,
}

impl Scheduler {
    /// Enters the outcome of the oldest step in flight into the requests' books and emits their
    /// events, in the order of the plan's rows. Rows of requests that ended meanwhile are ignored;
    /// of those that have lost their blocks since, only the tokens are entered.
    ///
    /// # Panics
    ///
    /// If `plan` is not that step, or `outcome` does not answer it: each row once, with tokens
    /// exactly if it samples, and as many drafts as were planned.
    pub fn apply(
        &mut self,
        plan: &StepPlan,
        outcome: &StepOutcome,
        events: &mut Vec<RequestEvent>,
    ) {
        let planned = self.take_planned(plan);
        let n_rows = plan.rows().len();
        assert_eq!(outcome.rows().len(), n_rows, "every planned row has one outcome row [INV-3]");
        // Most executors answer in the order of the plan, which spares a search for each row.
        let same_request =
            |(answer, row): (&OutcomeRow, &PlanRow)| answer.request_id == row.request_id;
        let is_in_order = outcome.rows().iter().zip(plan.rows()).all(same_request);
        if !is_in_order {
            self.join(outcome);
        }
        for (row_idx, (row, planned)) in plan.rows().iter().zip(&planned).enumerate() {
            let slot = planned.slot;
            if !self.entries.is_at(slot, row.request_id) {
                continue;
            }
            let row_idx =
                if is_in_order { Some(row_idx) } else { self.entries[slot].outcome_row.take() };
            let answer = &outcome.rows()[row_idx.expect("a planned row has an outcome row")];
            let answer = Answer {
                row,
                run: outcome.tokens(answer),
                n_accepted: answer.n_accepted,
                proposals: outcome.drafts(answer),
                logprobs: outcome.logprobs(answer),
                prompt_logprobs: outcome.prompt_logprobs(answer),
                failure: outcome.failure(answer),
            };
            if let Some(reason) = self.apply_row(*planned, plan, &answer, events) {
                self.publish();
                self.finish(slot, reason, events);
            } else if row.samples {
                self.release_held(slot);
            }
        }
        self.publish();
        self.spare_rows.push(planned);
    }

    /// Lets others find the blocks that have been completed since the last call.
    ///
    /// Where their keys belong in the prefix cache is far apart, so that each access waits for
    /// memory. It waits once for all of them, not for each in turn.
    fn publish(&mut self) {
        for slot in &self.unpublished {
            self.entries[*slot].hash_blocks(&mut self.pool);
        }
        for slot in &self.unpublished {
            self.entries[*slot].touch(&self.pool);
        }
        for slot in self.unpublished.drain(..) {
            self.entries[slot].publish(&mut self.pool);
        }
    }

    /// Notes at each request which outcome row is its own.
    fn join(&mut self, outcome: &StepOutcome) {
        for (row_idx, row) in outcome.rows().iter().enumerate() {
            if let Some(slot) = self.entries.slot(row.request_id) {
                let previous = self.entries[slot].outcome_row.replace(row_idx);
                assert!(previous.is_none(), "{}: two outcome rows [INV-3]", row.request_id);
            }
        }
    }

    /// Enters one row; returns why the request ends, if it does.
    fn apply_row(
        &mut self,
        planned: PlannedRow,
        plan: &StepPlan,
        answer: &Answer<'_>,
        events: &mut Vec<RequestEvent>,
    ) -> Option<FinishReason> {
        let entry = &mut self.entries[planned.slot];
        let Answer { row, run, .. } = *answer;
        entry.flight = entry.flight.filter(|flight| flight.step != plan.step_id);
        if let Some(message) = answer.failure {
            // The executor sees an empty mask, and the guide knows why it is empty.
            let of_guide = entry.guide.as_ref().and_then(|guide| guide.0.failure());
            return Some(FinishReason::Failed(of_guide.unwrap_or_else(|| message.to_owned())));
        }
        check_answer(answer, &entry.drafts[..row.n_draft as usize]);
        if !answer.prompt_logprobs.is_empty() {
            entry.hand_out_prompt_logprobs(row, answer.prompt_logprobs, events);
        }
        let has_kv = entry.epoch == planned.epoch;
        if !row.samples {
            if has_kv {
                self.enter_kv(planned, row, 0);
            }
            return None;
        }
        let rules = EndRules {
            params: &entry.params,
            eos_token_ids: &self.config.eos_token_ids,
            n_prompt: entry.n_prompt as usize,
            max_model_len: self.limits.max_model_len as usize,
        };
        let mut commit = if entry.n_tokens() + to_u32(run.len()) < entry.n_tokens_free {
            Commit { n_kept: run.len(), reason: None }
        } else {
            commit(&rules, entry.generated(), run)
        };
        if entry.is_followed() {
            commit = entry.follow(run, commit);
        }
        let kept = &run[..commit.n_kept];
        let n_accepted = answer.n_accepted.min(to_u32(kept.len() - 1));
        entry.tokens.extend_from_slice(kept);
        entry.last_token = kept[kept.len() - 1];
        if !row.prefill {
            entry.acceptance.record(row.n_draft, answer.n_accepted);
        }
        entry.verified.record_step(row.n_draft, n_accepted);
        self.verified.record_step(row.n_draft, n_accepted);
        self.totals.n_generated_tokens += kept.len() as u64;
        // Made in place: an event that is moved waits until its parts have settled in memory.
        events.extend(iter::once_with(|| {
            RequestEvent::Tokens(TokensEvent {
                request_id: entry.id,
                tokens: kept.into(),
                n_accepted,
                drafts: entry.drafts.first(row.n_draft),
                logprobs: first_of(answer.logprobs, kept.len()),
            })
        }));
        entry.drafts = if has_kv { answer.proposals.into() } else { StepTokens::default() };
        if has_kv {
            self.enter_kv(planned, row, n_accepted);
        }
        commit.reason
    }

    /// Enters the KV that a row wrote, of which `n_accepted` drafts stay.
    #[inline]
    fn enter_kv(&mut self, planned: PlannedRow, row: &PlanRow, n_accepted: u32) {
        let entry = &mut self.entries[planned.slot];
        let start = entry.n_computed;
        check_start(entry, row);
        entry.n_computed += row.n_query - row.n_draft + n_accepted;
        let n_pending = entry.n_tokens() - entry.n_computed;
        assert!(n_pending == 1 || !row.samples, "{}: one token without KV [INV-5]", entry.id);
        entry.settle(start, n_accepted);
        if self.pool.has_unpublished(&entry.table, entry.n_settled()) {
            self.unpublished.push(planned.slot);
        }
    }
}

/// The entries of the first `n` tokens, if there are any.
#[inline]
fn first_of(logprobs: &[TokenLogprobs], n: usize) -> Box<[TokenLogprobs]> {
    if logprobs.is_empty() { Box::default() } else { logprobs[..n].into() }
}

/// Checks that a row begins where its request's KV ends.
fn check_start(entry: &Entry, row: &PlanRow) {
    let is_continued = match row.source {
        TokenSource::Host => row.n_computed == entry.n_computed,
        TokenSource::InFlight { .. } => row.n_computed <= entry.n_computed,
    };
    assert!(is_continued, "{}: the row is the request's", entry.id);
}

/// Checks that an answer is one to its row, which verified `drafts`.
#[inline]
fn check_answer(answer: &Answer<'_>, drafts: &[TokenId]) {
    let Answer { row, run, n_accepted, proposals, .. } = *answer;
    let id = row.request_id;
    assert_eq!(row.samples, !run.is_empty(), "{id}: tokens exactly for a row that samples");
    assert!(n_accepted <= row.n_draft, "{id}: more drafts accepted than verified");
    let n_accepted = n_accepted as usize;
    let mut pairs = run.iter().zip(drafts).take(n_accepted);
    assert!(pairs.all(|(token, draft)| token == draft), "{id}: an accepted draft is a draft");
    assert_eq!(proposals.len(), row.n_propose as usize, "{id}: as many drafts as planned");
}

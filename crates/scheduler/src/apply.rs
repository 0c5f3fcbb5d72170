//! What a step did.

use engine_types::{
    FinishReason, OutcomeRow, PlanRow, RequestEvent, StepOutcome, StepPlan, TokensEvent,
};

use crate::commit::{EndRules, commit};
use crate::entries::Slot;
use crate::entry::to_u32;
use crate::scheduler::Scheduler;

impl Scheduler {
    /// Enters the outcome of the planned step into the requests' books and emits their events, in
    /// the order of the plan's rows. Rows of requests that ended meanwhile are ignored.
    ///
    /// # Panics
    ///
    /// If `plan` is not the step that runs, or `outcome` does not answer it: each row once, with
    /// tokens exactly if it samples, and no more drafts than were planned.
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
        for (row_idx, (row, slot)) in plan.rows().iter().zip(&planned).enumerate() {
            if !self.entries.is_at(*slot, row.request_id) {
                continue;
            }
            let row_idx =
                if is_in_order { Some(row_idx) } else { self.entries[*slot].outcome_row.take() };
            let answer = &outcome.rows()[row_idx.expect("a planned row has an outcome row")];
            check_answer(plan, row, outcome, answer);
            if let Some(reason) = self.apply_row(*slot, (plan, row), (outcome, answer), events) {
                self.finish(*slot, reason, events);
            }
        }
        self.planned = planned;
    }

    /// Notes at each request which row of the outcome is its.
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
        slot: Slot,
        (plan, row): (&StepPlan, &PlanRow),
        (outcome, answer): (&StepOutcome, &OutcomeRow),
        events: &mut Vec<RequestEvent>,
    ) -> Option<FinishReason> {
        let entry = &mut self.entries[slot];
        assert_eq!(entry.n_computed, row.n_computed, "{}: the row is the request's", entry.id);
        entry.n_computed += row.n_query - row.n_draft;
        if !row.samples {
            entry.settle(row.n_computed, 0);
            entry.publish(&mut self.pool);
            return None;
        }
        let run = outcome.tokens(answer);
        let rules = EndRules {
            params: &entry.params,
            eos_token_ids: &self.config.eos_token_ids,
            n_prompt: entry.n_prompt as usize,
            max_model_len: self.limits.max_model_len as usize,
        };
        let commit = commit(&rules, entry.generated(), run);
        let kept = &run[..commit.n_kept];
        let n_accepted = answer.n_accepted.min(to_u32(kept.len() - 1));
        entry.tokens.extend_from_slice(kept);
        entry.n_computed += n_accepted;
        assert_eq!(entry.n_pending(), 1, "{}: one token without KV [INV-5]", entry.id);
        entry.settle(row.n_computed, n_accepted);
        entry.publish(&mut self.pool);
        entry.set_drafts(outcome.drafts(answer));
        entry.spec_decode.record_step(row.n_draft as usize, n_accepted as usize);
        self.totals.spec_decode.record_step(row.n_draft as usize, n_accepted as usize);
        self.totals.n_generated_tokens += kept.len() as u64;
        events.push(RequestEvent::Tokens(TokensEvent {
            request_id: entry.id,
            tokens: kept.into(),
            n_accepted,
            drafts: plan.drafts(row).into(),
        }));
        commit.reason
    }
}

/// Checks that an answer is one to its row.
fn check_answer(plan: &StepPlan, row: &PlanRow, outcome: &StepOutcome, answer: &OutcomeRow) {
    let id = row.request_id;
    let run = outcome.tokens(answer);
    assert_eq!(row.samples, !run.is_empty(), "{id}: tokens exactly for a row that samples");
    assert!(answer.n_accepted <= row.n_draft, "{id}: more drafts accepted than verified");
    let n_accepted = answer.n_accepted as usize;
    assert_eq!(
        run[..n_accepted],
        plan.drafts(row)[..n_accepted],
        "{id}: an accepted draft is a draft"
    );
    let n_drafts = outcome.drafts(answer).len();
    assert!(n_drafts <= row.n_propose as usize, "{id}: more drafts than planned");
}

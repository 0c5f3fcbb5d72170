//! Rows that continue an output, and whose blocks they take.

use engine_types::{FinishReason, StepTokens};

use crate::entries::Slot;
use crate::entry::State;
use crate::flight::Frontier;
use crate::plan::Draft;
use crate::scheduler::Scheduler;

/// Whether a row's blocks are there.
enum Room {
    /// They are, for so many drafts to verify and to propose.
    For { n_draft: u32, n_propose: u32 },
    /// They may be, once the step in flight has said how many tokens there are.
    Later,
    /// They are not.
    No,
}

impl Scheduler {
    /// Plans the row of a request that lacks the KV of one token only; says whether this is one.
    pub(crate) fn plan_output(&mut self, draft: &mut Draft<'_>, slot: Slot) -> bool {
        let Some(frontier) = self.frontier(slot) else { return true };
        if frontier.n_pending() > 1 {
            return false;
        }
        // What a grammar allows behind tokens in flight is not known yet.
        if frontier.source.is_some() && self.entries[slot].guide.is_some() {
            return true;
        }
        if draft.budget == 0 {
            draft.unserved.get_or_insert(self.entries[slot].rank);
            return true;
        }
        loop {
            match self.reserve_output(slot, &frontier, draft.budget) {
                Room::For { n_draft, n_propose } => {
                    self.push_row(draft, slot, &frontier, 1, (n_draft, n_propose));
                    return true;
                }
                Room::No if self.running.len() == 1 => {
                    self.finish(slot, FinishReason::OutOfBlocks, draft.events);
                    return true;
                }
                Room::No if self.victim() != slot => self.preempt(self.victim()),
                // It keeps what it has until others end, or need it.
                Room::No | Room::Later => {
                    draft.lacks_blocks = true;
                    return true;
                }
            }
        }
    }

    /// Grows the table of an output row for as many drafts as there is room for.
    fn reserve_output(&mut self, slot: Slot, frontier: &Frontier, budget: u32) -> Room {
        let max_model_len = self.limits.max_model_len;
        let Frontier { n_tokens, n_tokens_max, source, .. } = *frontier;
        if n_tokens_max > max_model_len {
            return Room::Later;
        }
        let k = self.draft_length(slot);
        let entry = &mut self.entries[slot];
        let n_drafts = source.map_or_else(|| entry.n_allowed_drafts(), |flight| flight.n_propose);
        let n_draft = n_drafts.min(budget - 1).min(max_model_len - n_tokens_max);
        let n_propose = entry.n_propose(k, n_tokens, n_tokens_max + n_draft, max_model_len);
        let choices = [(n_draft, n_propose), (n_draft, n_propose.min(1)), (0, n_propose.min(1))];
        for (n_draft, n_propose) in choices {
            let n_written = n_tokens_max + n_draft + n_propose.saturating_sub(1);
            if self.pool.ensure_capacity(&mut entry.table, n_written) {
                return Room::For { n_draft, n_propose };
            }
        }
        // Nobody loses blocks to what may not come.
        if source.is_some() { Room::Later } else { Room::No }
    }

    /// The running request of the greatest rank that has no row in the plan that is being made.
    fn victim(&self) -> Slot {
        let has_row = |slot: &Slot| {
            self.entries[*slot].flight.is_some_and(|flight| flight.step == self.next_step)
        };
        self.running.iter().rev().find(|slot| !has_row(slot)).expect("the one that needs blocks")
    }

    /// Takes a request's blocks and lets it wait with its committed tokens only. What its row in
    /// flight emits is still committed, and it does not come back before.
    fn preempt(&mut self, slot: Slot) {
        self.running.remove(&self.entries, slot);
        let entry = &mut self.entries[slot];
        self.pool.release_table(&mut entry.table);
        self.free_tables.push(entry.table_slot);
        entry.state = State::Preempted;
        entry.epoch += 1;
        entry.n_computed = 0;
        if entry.flight.is_none() {
            entry.drafts = StepTokens::default();
        }
        self.waiting.insert(&self.entries, slot);
        self.n_preempted += 1;
        self.totals.n_preemptions += 1;
    }
}

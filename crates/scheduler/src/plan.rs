//! What the next step does.

use engine_types::{FinishReason, RequestEvent, RowSpec, RowTable, StepId, StepPlan};

use crate::entries::Slot;
use crate::entry::to_u32;
use crate::scheduler::Scheduler;

/// Where a prompt does not fit the budget, chunks are multiples of this or of the block size.
const CHUNK_ALIGNMENT: u32 = 64;

impl Scheduler {
    /// Plans the next step and says whether it has work.
    ///
    /// Outputs come first (decode and verify rows, oldest request first), then prompts into what
    /// is left of the token budget: partial ones, then new ones in order. `events` gets the end of
    /// a request that outgrew the pool.
    ///
    /// # Panics
    ///
    /// If the step before has neither been applied nor failed.
    pub fn plan(&mut self, plan: &mut StepPlan, events: &mut Vec<RequestEvent>) -> bool {
        assert!(self.in_flight.is_none(), "one step at a time");
        plan.clear();
        self.planned.clear();
        let mut budget = self.config.max_num_batched_tokens;
        self.plan_outputs(plan, &mut budget, events);
        let n_output_rows = self.planned.len();
        self.plan_partial_prompts(plan, &mut budget);
        self.plan_admissions(plan, &mut budget);
        if plan.is_empty() {
            assert!(self.entries.len() == 0, "unfinished requests and no work");
            return false;
        }
        let kind = match (n_output_rows, self.planned.len() - n_output_rows) {
            (_, 0) => &mut self.totals.n_decode_steps,
            (0, _) => &mut self.totals.n_prefill_steps,
            _ => &mut self.totals.n_mixed_steps,
        };
        *kind += 1;
        plan.step_id = self.next_step;
        self.in_flight = Some(self.next_step);
        self.next_step = StepId(self.next_step.0 + 1);
        true
    }

    /// Rows of requests that lack the KV of their last token only.
    fn plan_outputs(
        &mut self,
        plan: &mut StepPlan,
        budget: &mut u32,
        events: &mut Vec<RequestEvent>,
    ) {
        let mut idx = 0;
        while idx < self.running.len() && *budget > 0 {
            let slot = self.running[idx];
            if self.entries[slot].n_pending() > 1 {
                idx += 1;
                continue;
            }
            match self.reserve_output(slot, *budget) {
                Some((n_draft, n_propose)) => {
                    self.push_row(plan, slot, 1, (n_draft, n_propose));
                    *budget -= 1 + n_draft;
                    idx += 1;
                }
                None if self.running.len() == 1 => {
                    self.finish(slot, FinishReason::OutOfBlocks, events);
                }
                // The victim is this request or one behind it, so no planned row loses its blocks.
                None => self.preempt_newest(),
            }
        }
    }

    /// Grows the table of an output row and returns its drafts to verify and to propose; `None`
    /// if not even a plain decode has room.
    fn reserve_output(&mut self, slot: Slot, budget: u32) -> Option<(u32, u32)> {
        let max_model_len = self.limits.max_model_len;
        let entry = &mut self.entries[slot];
        let n_tokens = entry.n_tokens();
        let n_draft = to_u32(entry.drafts().len()).min(budget - 1).min(max_model_len - n_tokens);
        let n_propose = entry.n_propose(n_tokens + n_draft, max_model_len);
        let choices = [(n_draft, n_propose), (n_draft, n_propose.min(1)), (0, n_propose.min(1))];
        choices.into_iter().find(|(n_draft, n_propose)| {
            let n_written = n_tokens + n_draft + n_propose.saturating_sub(1);
            self.pool.ensure_capacity(&mut entry.table, n_written)
        })
    }

    /// Takes the blocks of the request admitted last and puts it in front of the queue with its
    /// committed tokens only.
    fn preempt_newest(&mut self) {
        let slot = self.running.pop().expect("somebody runs");
        let entry = &mut self.entries[slot];
        self.pool.release_table(&mut entry.table);
        self.free_tables.push(entry.table_slot);
        entry.n_computed = 0;
        entry.set_drafts(&[]);
        entry.is_running = false;
        entry.is_preempted = true;
        self.waiting.push_front(slot);
        self.totals.n_preemptions += 1;
    }

    /// Next chunks of prompts that are partly computed.
    fn plan_partial_prompts(&mut self, plan: &mut StepPlan, budget: &mut u32) {
        for idx in 0..self.running.len() {
            let slot = self.running[idx];
            if self.entries[slot].n_pending() > 1 && !self.plan_chunk(plan, slot, budget) {
                return;
            }
        }
    }

    /// First chunks of waiting requests; one that has no room keeps those behind it waiting.
    fn plan_admissions(&mut self, plan: &mut StepPlan, budget: &mut u32) {
        while let Some(&slot) = self.waiting.front() {
            let is_full = self.running.len() >= self.config.max_num_seqs as usize;
            if is_full || *budget == 0 {
                return;
            }
            let entry = &mut self.entries[slot];
            self.pool.match_prefix(&mut entry.keys, &entry.tokens, &mut self.prefix);
            let n_hit = self.prefix.n_blocks() * self.limits.block_size;
            let n_pending = entry.n_tokens() - n_hit;
            if self.chunk_len(plan, n_pending, *budget) == 0 || !self.admit(slot, n_hit) {
                return;
            }
            self.waiting.pop_front();
            self.running.push(slot);
            let has_chunk = self.plan_chunk(plan, slot, budget);
            assert!(has_chunk, "an admitted request has a chunk");
        }
    }

    /// Gives a waiting request the blocks of all its tokens, so that a prompt never stops half way
    /// for want of blocks: those of the first `n_hit` tokens from the prefix cache, which has just
    /// been asked for them.
    fn admit(&mut self, slot: Slot, n_hit: u32) -> bool {
        let n_tokens = self.entries[slot].n_tokens();
        let is_preempted = self.entries[slot].is_preempted;
        if is_preempted {
            // Without this room it would soon be preempted again.
            let n_new = self.pool.blocks_for(n_tokens) - self.prefix.n_blocks();
            let n_blocks = n_new + self.prefix.n_idle();
            if n_blocks + self.n_growth_blocks() > self.pool.n_available() {
                return false;
            }
        }
        let entry = &mut self.entries[slot];
        if !self.pool.admit(&mut entry.table, &self.prefix, n_tokens) {
            return false;
        }
        let table_slot = self.free_tables.pop().expect("fewer run than may");
        entry.start_at(n_hit, table_slot);
        if !is_preempted && self.config.enable_prefix_caching {
            entry.n_cached = n_hit;
            self.totals.n_prefix_queried_tokens += u64::from(n_tokens);
            self.totals.n_prefix_hit_tokens += u64::from(n_hit);
        }
        true
    }

    /// Blocks that the running requests may take in the next step.
    fn n_growth_blocks(&self) -> u32 {
        let running = self.running.iter().map(|slot| &self.entries[*slot]);
        let growth = running.map(|entry| {
            // This step may commit k + 1 tokens; the next verifies k and writes k - 1 behind.
            let n_more = 1 + 2 * entry.k + entry.k.saturating_sub(1);
            let n_written = (entry.n_tokens() + n_more).min(self.limits.max_model_len);
            self.pool.blocks_for(n_written).saturating_sub(entry.table.n_blocks())
        });
        growth.sum()
    }

    /// Plans as much of a running request's prompt as the budget has room for; false if nothing.
    fn plan_chunk(&mut self, plan: &mut StepPlan, slot: Slot, budget: &mut u32) -> bool {
        let entry = &self.entries[slot];
        let n_query = self.chunk_len(plan, entry.n_pending(), *budget);
        if n_query == 0 {
            return false;
        }
        let is_final = n_query == entry.n_pending();
        let n_propose = if is_final { self.reserve_proposals(slot) } else { 0 };
        self.push_row(plan, slot, n_query, (0, n_propose));
        *budget -= n_query;
        true
    }

    /// Grows the table behind a whole prompt for the drafts after it, and returns their number.
    fn reserve_proposals(&mut self, slot: Slot) -> u32 {
        let entry = &mut self.entries[slot];
        let n_tokens = entry.n_tokens();
        let n_propose = entry.n_propose(n_tokens, self.limits.max_model_len);
        let n_written = n_tokens + n_propose.saturating_sub(1);
        if self.pool.ensure_capacity(&mut entry.table, n_written) {
            n_propose
        } else {
            n_propose.min(1)
        }
    }

    /// Tokens of the next chunk of a prompt of which `n_pending` are left.
    fn chunk_len(&self, plan: &StepPlan, n_pending: u32, budget: u32) -> u32 {
        if n_pending <= budget {
            return n_pending;
        }
        let alignment = self.limits.block_size.max(CHUNK_ALIGNMENT);
        match budget / alignment * alignment {
            0 if plan.is_empty() => budget,
            aligned => aligned,
        }
    }

    /// Appends the row of a request that queries `n_known` committed tokens and `n_draft` drafts.
    fn push_row(
        &mut self,
        plan: &mut StepPlan,
        slot: Slot,
        n_known: u32,
        (n_draft, n_propose): (u32, u32),
    ) {
        let n_lookahead_max = self.limits.n_lookahead_max as usize;
        let entry = &mut self.entries[slot];
        let start = entry.n_computed as usize;
        let end = start + n_known as usize;
        let samples = end == entry.tokens.len();
        let drafting = entry.k > 0;
        let n_lookahead = if drafting { n_lookahead_max.min(entry.tokens.len() - end) } else { 0 };
        let n_computed = entry.n_computed;
        let prefill = n_known > 1;
        let spec = RowSpec { n_computed, n_draft, samples, prefill, drafting, n_propose };
        // Drafts stand behind the committed tokens only while the row is copied.
        let n_tokens = entry.tokens.len();
        let drafts = n_draft as usize;
        for draft_idx in 0..drafts {
            let draft = entry.drafts()[draft_idx];
            entry.tokens.push(draft);
        }
        let queried = &entry.tokens[start..end + drafts];
        let lookahead = if samples { &[] } else { &entry.tokens[end..end + n_lookahead] };
        let mut table = RowTable { slot: entry.table_slot, n_blocks: entry.n_told };
        if entry.n_told < entry.table.n_blocks() {
            let new = &entry.table.blocks()[entry.n_told as usize..];
            table = plan.update_table(entry.table_slot, entry.n_told, new);
            entry.n_told = table.n_blocks;
        }
        plan.push_row(entry.id, spec, queried, lookahead, table);
        entry.tokens.truncate(n_tokens);
        self.planned.push(slot);
    }
}

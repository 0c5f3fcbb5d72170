//! Rows that read prompts, and which requests start.

use engine_types::{FinishReason, RequestEvent};
use kv_block_manager::Fork;

use crate::entries::Slot;
use crate::entry::State;
use crate::flight::Frontier;
use crate::plan::Draft;
use crate::scheduler::Scheduler;

impl Scheduler {
    /// Plans the next chunk of a prompt that is partly computed, if this is one.
    pub(crate) fn plan_partial_prompt(&mut self, draft: &mut Draft<'_>, slot: Slot) {
        let Some(frontier) = self.frontier(slot).filter(|frontier| frontier.n_pending() > 1) else {
            return;
        };
        if !self.plan_chunk(draft, slot, &frontier) {
            draft.unserved.get_or_insert(self.entries[slot].rank);
        }
    }

    /// First chunks of waiting requests; one that has no room keeps those behind it waiting.
    pub(crate) fn plan_admissions(&mut self, draft: &mut Draft<'_>) {
        while let Some(slot) = self.waiting.front() {
            let is_full = self.running.len() >= self.config.max_num_seqs as usize;
            // The tokens in flight belong to what is computed anew.
            if is_full || draft.budget == 0 || self.entries[slot].flight.is_some() {
                return;
            }
            if self.pool.blocks_for(self.entries[slot].n_tokens()) > self.limits.num_blocks {
                self.finish(slot, FinishReason::OutOfBlocks, draft.events);
                continue;
            }
            let n_shared = self.n_shared(slot);
            let n_hit = if n_shared == 0 { self.match_prefix(slot) } else { n_shared };
            let n_pending = self.entries[slot].n_tokens() - n_hit;
            if self.chunk_len(draft, n_pending) == 0 {
                return;
            }
            let has_room =
                if n_shared > 0 { self.fork(draft, slot, n_shared) } else { self.admit(slot) };
            if !has_room {
                return;
            }
            self.start(draft, slot, n_hit, n_shared > 0);
            let frontier = Frontier::of(&self.entries[slot]);
            let has_chunk = self.plan_chunk(draft, slot, &frontier);
            assert!(has_chunk, "an admitted request has a chunk");
        }
    }

    /// Asks the prefix cache for a waiting request's tokens and returns how many it has.
    fn match_prefix(&mut self, slot: Slot) -> u32 {
        let entry = &mut self.entries[slot];
        if entry.lacks_prompt_logprobs() {
            self.prefix.clear();
            return 0;
        }
        self.pool.match_prefix(&mut entry.keys, &entry.tokens, &mut self.prefix);
        self.prefix.n_blocks() * self.limits.block_size
    }

    /// How many tokens of a waiting request have their KV in the request that held it back. At
    /// least one stays to be queried, and so do those on which the draft layers' KV depends.
    fn n_shared(&self, slot: Slot) -> u32 {
        let entry = &self.entries[slot];
        let Some((source, id)) = entry.source else { return 0 };
        let is_there = self.entries.is_at(source, id) && self.entries[source].is_running();
        if !is_there || entry.state != State::Waiting {
            return 0;
        }
        let n_behind = entry.keys.n_lookahead().max(1);
        let n_shared = entry.n_prompt.saturating_sub(n_behind);
        if self.entries[source].n_settled() < n_shared { 0 } else { n_shared }
    }

    /// Gives a waiting request the KV of its first `n_shared` tokens, in the blocks of the request
    /// that held it back, and room for the others.
    fn fork(&mut self, draft: &mut Draft<'_>, slot: Slot, n_shared: u32) -> bool {
        let mut table = std::mem::take(&mut self.entries[slot].table);
        let (source, _) = self.entries[slot].source.expect("somebody shares");
        let n_tokens = self.entries[slot].n_tokens();
        let fork = self.pool.fork(&mut table, &self.entries[source].table, n_shared, n_tokens);
        self.entries[slot].table = table;
        match fork {
            Fork::NoRoom => false,
            Fork::Done { copy } => {
                if let Some(copy) = copy {
                    draft.plan.push_copy(copy);
                }
                true
            }
        }
    }

    /// Gives a waiting request the blocks of all its tokens, so that a prompt never stops half way
    /// for want of blocks: the first ones from the prefix cache, which has just been asked.
    fn admit(&mut self, slot: Slot) -> bool {
        let entry = &self.entries[slot];
        let n_tokens = entry.n_tokens();
        if entry.state == State::Preempted {
            // Without this room it would soon be preempted again.
            let n_new = self.pool.blocks_for(n_tokens) - self.prefix.n_blocks();
            let n_blocks = n_new + self.prefix.n_idle();
            if n_blocks + self.n_growth_blocks() > self.pool.n_available() {
                return false;
            }
        }
        self.pool.admit(&mut self.entries[slot].table, &self.prefix, n_tokens)
    }

    /// Lets a request run that has got blocks and the KV of its first `n_hit` tokens.
    fn start(&mut self, draft: &mut Draft<'_>, slot: Slot, n_hit: u32, is_fork: bool) {
        let table_slot = self.free_tables.pop().expect("fewer run than may");
        self.waiting.remove(&self.entries, slot);
        let entry = &mut self.entries[slot];
        let was_preempted = entry.state == State::Preempted;
        entry.start_at(n_hit, table_slot);
        if was_preempted {
            self.n_preempted -= 1;
        } else {
            entry.n_cached = n_hit;
            draft.events.push(RequestEvent::Started { request_id: entry.id });
            if is_fork {
                self.totals.n_shared_tokens += u64::from(n_hit);
            } else if self.config.enable_prefix_caching {
                self.totals.n_prefix_queried_tokens += u64::from(entry.n_prompt);
                self.totals.n_prefix_hit_tokens += u64::from(n_hit);
            }
        }
        self.running.insert(&self.entries, slot);
    }

    /// Blocks that the running requests may take in the next step.
    fn n_growth_blocks(&self) -> u32 {
        let growth = self.running.iter().map(|slot| {
            let entry = &self.entries[slot];
            // This step may commit k + 1 tokens; the next verifies k and writes k - 1 behind.
            let n_more = 1 + 2 * entry.k + entry.k.saturating_sub(1);
            let n_tokens = Frontier::of(entry).n_tokens_max;
            let n_written = (n_tokens + n_more).min(self.limits.max_model_len);
            self.pool.blocks_for(n_written).saturating_sub(entry.table.n_blocks())
        });
        growth.sum()
    }

    /// Plans as much of a running request's prompt as there is budget for; false if nothing.
    fn plan_chunk(&mut self, draft: &mut Draft<'_>, slot: Slot, frontier: &Frontier) -> bool {
        let n_pending = frontier.n_pending();
        let n_query = self.chunk_len(draft, n_pending);
        if n_query == 0 {
            return false;
        }
        let n_propose = if n_query == n_pending { self.reserve_proposals(slot) } else { 0 };
        self.push_row(draft, slot, frontier, n_query, (0, n_propose));
        true
    }

    /// Grows the table behind a whole prompt for the drafts after it, and returns their number.
    fn reserve_proposals(&mut self, slot: Slot) -> u32 {
        let k = self.draft_length(slot);
        let entry = &mut self.entries[slot];
        let n_tokens = entry.n_tokens();
        let n_propose = entry.n_propose(k, n_tokens, n_tokens, self.limits.max_model_len);
        let n_written = n_tokens + n_propose.saturating_sub(1);
        if self.pool.ensure_capacity(&mut entry.table, n_written) {
            n_propose
        } else {
            n_propose.min(1)
        }
    }

    /// Tokens of the next chunk of a prompt of which `n_pending` are left.
    fn chunk_len(&self, draft: &Draft<'_>, n_pending: u32) -> u32 {
        let wanted = match self.config.long_prefill_token_threshold {
            0 => n_pending,
            threshold => n_pending.min(threshold),
        };
        if wanted <= draft.budget {
            return wanted;
        }
        let alignment = self.limits.block_size.max(self.config.chunk_alignment);
        match draft.budget / alignment * alignment {
            0 if draft.plan.is_empty() => draft.budget,
            aligned => aligned,
        }
    }
}

//! What the next step does.

use std::slice::from_ref;
use std::sync::Arc;

use engine_types::{OutputMode, RequestEvent, RowSpec, RowTable, SamplerSetup, StepId, StepPlan};

use crate::entries::Slot;
use crate::flight::{Flight, Frontier};
use crate::queue::Rank;
use crate::scheduler::{PlannedRow, PlannedStep, Scheduler};

/// A plan that is being made.
pub(crate) struct Draft<'a> {
    pub(crate) plan: &'a mut StepPlan,
    pub(crate) events: &'a mut Vec<RequestEvent>,
    /// Tokens that it may still query.
    pub(crate) budget: u32,
    pub(crate) rows: Vec<PlannedRow>,
    /// The first running request for whose row the budget was too small.
    pub(crate) unserved: Option<Rank>,
    /// Whether a running request has no row for want of blocks.
    pub(crate) lacks_blocks: bool,
    n_prefill_rows: usize,
}

impl Scheduler {
    /// Plans the next step and says whether there is one to launch.
    ///
    /// Outputs come first (decode and verify rows), then prompts into what is left of the token
    /// budget: partial ones, then new ones; each kind in the order of the ranks. Where the budget
    /// ended before every running request had a row, the next plan begins with the first that had
    /// none and goes round. `events` gets the end of a request that outgrew the pool.
    ///
    /// In deferred mode there may be nothing to launch although requests are unfinished: they wait
    /// for the step in flight.
    ///
    /// # Panics
    ///
    /// If a step is in flight; in deferred mode, if two are.
    pub fn plan(&mut self, plan: &mut StepPlan, events: &mut Vec<RequestEvent>) -> bool {
        let n_in_flight_max = match self.config.output_mode {
            OutputMode::Immediate => 0,
            OutputMode::Deferred => 1,
        };
        assert!(self.in_flight.len() <= n_in_flight_max, "the step before is collected first");
        plan.clear();
        plan.step_id = self.next_step;
        let budget = self.config.max_num_batched_tokens;
        let mut rows = self.spare_rows.pop().unwrap_or_default();
        rows.clear();
        let (unserved, lacks_blocks, n_prefill_rows) = (None, false, 0);
        let mut draft =
            Draft { plan, events, budget, rows, unserved, lacks_blocks, n_prefill_rows };
        self.plan_running(&mut draft);
        if draft.unserved.is_none() && !draft.lacks_blocks {
            self.plan_admissions(&mut draft);
        }
        self.first = draft.unserved;
        let Draft { plan, rows, n_prefill_rows, .. } = draft;
        if plan.is_empty() {
            self.spare_rows.push(rows);
            let is_waiting = self.in_flight.is_empty() && !self.is_idle();
            assert!(!is_waiting, "unfinished requests and no work");
            return false;
        }
        let kind = match (n_prefill_rows, rows.len() - n_prefill_rows) {
            (0, _) => &mut self.totals.n_decode_steps,
            (_, 0) => &mut self.totals.n_prefill_steps,
            _ => &mut self.totals.n_mixed_steps,
        };
        *kind += 1;
        self.in_flight.push_back(PlannedStep { id: self.next_step, rows });
        self.next_step = StepId(self.next_step.0 + 1);
        true
    }

    /// Rows of the requests that hold blocks.
    fn plan_running(&mut self, draft: &mut Draft<'_>) {
        // Requests end and lose their blocks on the way.
        let mut order = std::mem::take(&mut self.order);
        order.clear();
        order.extend(self.running.iter());
        if let Some(rank) = self.first {
            let n_before = self.running.n_before(&self.entries, rank);
            order.rotate_left(n_before);
            for slot in &order {
                if !self.plan_output(draft, *slot) {
                    self.plan_partial_prompt(draft, *slot);
                }
            }
        } else {
            order.retain(|slot| !self.plan_output(draft, *slot));
            for slot in &order {
                self.plan_partial_prompt(draft, *slot);
            }
        }
        self.order = order;
    }

    /// Where the next row of a request that runs begins; `None` where it has lost its blocks or
    /// ended, or surely ends in the step in flight.
    pub(crate) fn frontier(&self, slot: Slot) -> Option<Frontier> {
        let entry = self.entries.get(slot).filter(|entry| entry.is_running())?;
        let frontier = Frontier::of(entry);
        let is_last = frontier.source.is_some() && entry.surely_ends(frontier.n_tokens);
        (!is_last).then_some(frontier)
    }

    /// How many drafts the policy lets a request make now.
    pub(crate) fn draft_length(&self, slot: Slot) -> u32 {
        let entry = &self.entries[slot];
        let n_running = u32::try_from(self.running.len()).expect("at most max_num_seqs");
        self.config.drafting.draft_length(entry.k, &entry.acceptance, n_running)
    }

    /// Appends the row of a request that queries `n_known` tokens whose KV it lacks, in flight or
    /// committed, and `n_draft` drafts.
    pub(crate) fn push_row(
        &mut self,
        draft: &mut Draft<'_>,
        slot: Slot,
        frontier: &Frontier,
        n_known: u32,
        (n_draft, n_propose): (u32, u32),
    ) {
        let entry = &mut self.entries[slot];
        let plan = &mut *draft.plan;
        let mut table = RowTable { slot: entry.table_slot, n_blocks: entry.n_told };
        if let Some(sampler) = entry.sampler.as_ref().filter(|_| entry.n_told == 0) {
            plan.push_sampler(SamplerSetup {
                slot: entry.table_slot,
                sampler: Arc::clone(sampler),
                tokens: entry.tokens.clone(),
            });
        }
        if entry.n_told < entry.table.n_blocks() {
            let new = &entry.table.blocks()[entry.n_told as usize..];
            table = plan.update_table(entry.table_slot, entry.n_told, new);
            entry.n_told = table.n_blocks;
        }
        let end = frontier.n_computed + n_known;
        let spec = RowSpec {
            n_computed: frontier.n_computed,
            n_draft,
            samples: end == frontier.n_tokens,
            prefill: frontier.n_computed < entry.n_prefill,
            drafting: entry.k > 0,
            n_propose,
            has_sampler: entry.sampler.is_some(),
        };
        if let Some(flight) = frontier.source {
            plan.push_deferred_row(entry.id, spec, flight.row, table);
        } else {
            let n_lookahead = if spec.drafting { self.limits.n_lookahead_max } else { 0 };
            let n_lookahead = n_lookahead.min(entry.n_tokens() - end) as usize;
            let (start, end) = (frontier.n_computed as usize, end as usize);
            let is_last = start + 1 == entry.tokens.len();
            let known =
                if is_last { from_ref(&entry.last_token) } else { &entry.tokens[start..end] };
            let queried = (known, &entry.drafts[..n_draft as usize]);
            let lookahead = &entry.tokens[end..end + n_lookahead];
            plan.push_row_of(entry.id, spec, queried, lookahead, table);
            if spec.samples && entry.guide.is_some() {
                self.masks.clear();
                let n_words = self.limits.vocab_size.div_ceil(u32::BITS) as usize;
                entry.fill_masks(n_draft, n_words, &mut self.masks);
                plan.mask_last_row(&self.masks);
            }
        }
        let row = u32::try_from(draft.rows.len()).expect("rows are counted in u32");
        let samples = spec.samples;
        entry.flight =
            Some(Flight { step: self.next_step, row, n_known, n_draft, samples, n_propose });
        draft.rows.push(PlannedRow { slot, epoch: entry.epoch });
        draft.n_prefill_rows += usize::from(spec.prefill);
        draft.budget -= n_known + n_draft;
        self.totals.n_computed_tokens += u64::from(n_known);
    }
}

//! The scheduler's state and its commands.

use std::collections::VecDeque;

use engine_types::{
    ExecutorLimits, FinishReason, Request, RequestEvent, RequestId, StepId, StepPlan,
};
use kv_block_manager::{BlockPool, PrefixMatch};

use crate::commit::looks_at_tokens;
use crate::config::SchedulerConfig;
use crate::entries::{Entries, Slot};
use crate::entry::{Entry, State};
use crate::error::{ConfigError, SubmitError};
use crate::queue::{Rank, RankedQueue};
use crate::sampling::{sampler, sibling_seed};
use crate::stats::SchedulerStats;
use crate::submit::RequestRules;
use crate::verify_counts::VerifyCounts;

/// Decides what each step does and keeps the requests' books.
///
/// The owner calls [`plan`](Self::plan), launches the plan, and enters its outcome with
/// [`apply`](Self::apply) or [`fail_step`](Self::fail_step); in deferred mode the next plan may be
/// made and launched in between. [`submit`](Self::submit), [`abort`](Self::abort) and
/// [`expire`](Self::expire) may come at any time.
#[derive(Debug)]
pub struct Scheduler {
    pub(crate) config: SchedulerConfig,
    pub(crate) limits: ExecutorLimits,
    pub(crate) pool: BlockPool,
    /// What the prefix cache has of the request at the head of the queue; a reused buffer.
    pub(crate) prefix: PrefixMatch,
    pub(crate) entries: Entries,
    pub(crate) waiting: RankedQueue,
    pub(crate) running: RankedQueue,
    /// Requests that wait for the prompt of another one.
    n_held: usize,
    /// Requests among `waiting` that have lost their blocks.
    pub(crate) n_preempted: usize,
    /// Requests submitted so far.
    n_submitted: u64,
    /// Block tables of the executor that no running request has.
    pub(crate) free_tables: Vec<u32>,
    /// Where the next plan begins to go round, if the last one did not come to the end.
    pub(crate) first: Option<Rank>,
    /// The steps that were planned and have no outcome, oldest first.
    pub(crate) in_flight: VecDeque<PlannedStep>,
    pub(crate) next_step: StepId,
    pub(crate) totals: SchedulerStats,
    /// Of all requests; `totals` does not have it.
    pub(crate) verified: VerifyCounts,
    /// Reused buffers.
    pub(crate) spare_rows: Vec<Vec<PlannedRow>>,
    pub(crate) order: Vec<Slot>,
    /// Requests with blocks to publish, while an outcome is applied.
    pub(crate) unpublished: Vec<Slot>,
    pub(crate) masks: Vec<u32>,
}

/// A step that was planned.
#[derive(Debug)]
pub(crate) struct PlannedStep {
    pub(crate) id: StepId,
    pub(crate) rows: Vec<PlannedRow>,
}

/// Whose row it is, and whether its KV is still there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlannedRow {
    pub(crate) slot: Slot,
    pub(crate) epoch: u32,
}

impl Scheduler {
    /// A scheduler without requests, for an executor with `limits`.
    ///
    /// # Errors
    ///
    /// If the configuration contradicts itself or the executor; the error names the field.
    pub fn new(config: SchedulerConfig, limits: ExecutorLimits) -> Result<Self, ConfigError> {
        let config = config.validated(&limits)?;
        let new_pool = if config.enable_prefix_caching {
            BlockPool::with_prefix_cache
        } else {
            BlockPool::new
        };
        Ok(Self {
            pool: new_pool(limits.num_blocks, limits.block_size),
            prefix: PrefixMatch::default(),
            limits,
            entries: Entries::default(),
            waiting: RankedQueue::default(),
            running: RankedQueue::default(),
            n_held: 0,
            n_preempted: 0,
            n_submitted: 0,
            free_tables: (0..config.max_num_seqs).rev().collect(),
            first: None,
            in_flight: VecDeque::new(),
            next_step: StepId::default(),
            totals: SchedulerStats::default(),
            verified: VerifyCounts::default(),
            spare_rows: vec![],
            order: vec![],
            unpublished: vec![],
            masks: vec![],
            config,
        })
    }

    /// What each request must keep to.
    #[must_use]
    pub fn request_rules(&self) -> RequestRules {
        RequestRules {
            limits: self.limits,
            num_speculative_tokens: self.config.num_speculative_tokens,
        }
    }

    /// Queues a request and its siblings, each of which is a request of its own.
    ///
    /// # Errors
    ///
    /// If it can never be served, an id is in use, or the queue has no room for all of them.
    /// Nothing is kept of it.
    pub fn submit(&mut self, request: Request) -> Result<(), SubmitError> {
        self.request_rules().check(&request)?;
        let mut ids = std::iter::once(&request.id).chain(&request.siblings);
        if let Some(id) = ids.find(|id| self.entries.slot(**id).is_some()) {
            return Err(SubmitError::DuplicateId(*id));
        }
        let limit =
            u64::from(self.config.max_num_seqs) + u64::from(self.config.max_queued_requests);
        let n_new = 1 + request.siblings.len() as u64;
        if self.entries.len() as u64 + n_new > limit {
            return Err(SubmitError::QueueFull { limit });
        }
        let seed = request.params.seed.unwrap_or(request.id.0);
        let sibling = |(idx, id): (usize, &RequestId)| {
            let mut sibling = Request { id: *id, ..request.clone() };
            sibling.params.seed = Some(sibling_seed(seed, idx + 1));
            // The first one's say it all.
            sibling.params.prompt_logprobs = None;
            sibling
        };
        let requests: Vec<Request> = request.siblings.iter().enumerate().map(sibling).collect();
        let first = self.insert(request, State::Waiting);
        self.waiting.insert(&self.entries, first);
        for request in requests {
            let sibling = self.insert(request, State::Held(first));
            self.entries[first].held.push(sibling);
            self.n_held += 1;
        }
        Ok(())
    }

    fn insert(&mut self, request: Request, state: State) -> Slot {
        let policy = self.config.policy;
        let rank = Rank::new(policy, self.next_step.0, request.priority, self.n_submitted);
        self.n_submitted += 1;
        self.totals.n_prompt_tokens += request.prompt.len() as u64;
        let k = self.config.num_speculative_tokens;
        let sampler = sampler(&request, &self.config.eos_token_ids);
        let mut entry = Entry::new(request, rank, k, &self.limits);
        entry.sampler = sampler;
        if !looks_at_tokens(&entry.params, &self.config.eos_token_ids) {
            entry.n_tokens_free = entry.n_tokens_max;
        }
        entry.state = state;
        self.entries.insert(entry)
    }

    /// Lets the requests wait for their turn that were held until the prompt in `slot` is computed
    /// or given up.
    pub(crate) fn release_held(&mut self, slot: Slot) {
        if self.n_held == 0 {
            return;
        }
        let entry = &mut self.entries[slot];
        let source = Some((slot, entry.id));
        for sibling in std::mem::take(&mut entry.held) {
            let entry = &mut self.entries[sibling];
            (entry.state, entry.source) = (State::Waiting, source);
            self.n_held -= 1;
            self.waiting.insert(&self.entries, sibling);
        }
    }

    /// Ends a request, whatever its state, and says whether it was unfinished. Rows of it that are
    /// in flight are ignored later.
    pub fn abort(&mut self, id: RequestId, events: &mut Vec<RequestEvent>) -> bool {
        self.end(id, FinishReason::Aborted, events)
    }

    /// The same for a request whose time is over.
    pub fn expire(&mut self, id: RequestId, events: &mut Vec<RequestEvent>) -> bool {
        self.end(id, FinishReason::DeadlineExceeded, events)
    }

    /// Whether a request is unfinished and has never run.
    #[must_use]
    pub fn has_not_started(&self, id: RequestId) -> bool {
        let state = self.entries.slot(id).map(|slot| self.entries[slot].state);
        matches!(state, Some(State::Waiting | State::Held(_)))
    }

    fn end(&mut self, id: RequestId, why: FinishReason, events: &mut Vec<RequestEvent>) -> bool {
        let Some(slot) = self.entries.slot(id) else { return false };
        self.finish(slot, why, events);
        true
    }

    /// Ends all requests of the oldest step in flight, which failed; the others go on.
    ///
    /// # Panics
    ///
    /// If `plan` is not that step.
    pub fn fail_step(&mut self, plan: &StepPlan, message: &str, events: &mut Vec<RequestEvent>) {
        let planned = self.take_planned(plan);
        for (row, planned) in plan.rows().iter().zip(&planned) {
            if self.entries.is_at(planned.slot, row.request_id) {
                self.finish(planned.slot, FinishReason::Failed(message.to_owned()), events);
            }
        }
        self.spare_rows.push(planned);
    }

    /// A snapshot of the counts.
    #[must_use]
    pub fn stats(&self) -> SchedulerStats {
        SchedulerStats {
            n_running: self.running.len(),
            n_waiting: self.waiting.len() + self.n_held,
            n_preempted: self.n_preempted,
            blocks: self.pool.stats(),
            spec_decode: self.verified.stats(),
            ..self.totals
        }
    }

    /// Whether no request is left.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.entries.len() == 0
    }

    /// How many steps were planned and have no outcome.
    #[must_use]
    pub fn n_in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Takes a request out and emits its last event.
    pub(crate) fn finish(
        &mut self,
        slot: Slot,
        reason: FinishReason,
        events: &mut Vec<RequestEvent>,
    ) {
        self.release_held(slot);
        match self.entries[slot].state {
            State::Running => {
                self.running.remove(&self.entries, slot);
                self.free_tables.push(self.entries[slot].table_slot);
            }
            State::Waiting => self.waiting.remove(&self.entries, slot),
            State::Preempted => {
                self.waiting.remove(&self.entries, slot);
                self.n_preempted -= 1;
            }
            State::Held(by) => {
                self.entries[by].held.retain(|held| *held != slot);
                self.n_held -= 1;
            }
        }
        let mut entry = self.entries.remove(slot);
        self.pool.release_table(&mut entry.table);
        self.totals.n_finished += 1;
        events.push(entry.finished(reason));
    }

    /// The rows of the oldest step in flight; it is not any more.
    pub(crate) fn take_planned(&mut self, plan: &StepPlan) -> Vec<PlannedRow> {
        let step = self.in_flight.pop_front().expect("a step is in flight");
        assert_eq!(step.id, plan.step_id, "the plan is the oldest step in flight");
        assert_eq!(step.rows.len(), plan.rows().len(), "the plan is as it was made");
        step.rows
    }

    /// Checks the books as a whole. O(requests and blocks); for tests.
    ///
    /// # Panics
    ///
    /// If a request is lost or doubled, a block has not exactly its holders, or a table or a count
    /// does not fit a request's state.
    pub fn check_invariants(&self) {
        self.pool.check_invariants(self.entries.iter().map(|entry| &entry.table));
        let n_listed = self.running.len() + self.waiting.len() + self.n_held;
        assert_eq!(self.entries.len(), n_listed, "each request is listed once");
        let n_tables = self.running.len() + self.free_tables.len();
        assert_eq!(n_tables, self.config.max_num_seqs as usize, "who runs has a table");
        for queue in [&self.running, &self.waiting] {
            assert!(queue.iter().map(|slot| self.entries[slot].rank).is_sorted(), "ranks");
        }
        let steps: Vec<StepId> = self.in_flight.iter().map(|step| step.id).collect();
        for slot in self.running.iter() {
            let entry = &self.entries[slot];
            assert!(entry.is_running() && entry.n_computed < entry.n_tokens(), "{}", entry.id);
            let n_blocks = self.pool.blocks_for(entry.n_computed);
            assert!(entry.table.n_blocks() >= n_blocks, "{} has KV outside blocks", entry.id);
            assert!(entry.n_settled() <= entry.n_computed, "{} shares what it lacks", entry.id);
        }
        let mut n_preempted = 0;
        for slot in self.waiting.iter() {
            let entry = &self.entries[slot];
            n_preempted += usize::from(entry.state == State::Preempted);
            assert!(matches!(entry.state, State::Waiting | State::Preempted), "{}", entry.id);
            assert!(entry.n_computed == 0, "{} waits with KV", entry.id);
            assert!(entry.drafts.is_empty() || entry.flight.is_some(), "{} has drafts", entry.id);
            assert!(entry.table.blocks().is_empty(), "{} waits with blocks", entry.id);
        }
        assert_eq!(n_preempted, self.n_preempted);
        for entry in self.entries.iter() {
            let is_known = entry.flight.is_none_or(|flight| steps.contains(&flight.step));
            assert!(is_known, "{} is in flight", entry.id);
            assert_eq!(entry.tokens.last(), Some(&entry.last_token), "{}", entry.id);
            let holds = |slot: &Slot| self.entries[*slot].state;
            assert!(entry.held.iter().map(holds).all(|state| matches!(state, State::Held(_))));
        }
    }
}

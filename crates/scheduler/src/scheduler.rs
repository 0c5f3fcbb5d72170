//! The scheduler's state and its commands.

use std::collections::VecDeque;

use engine_types::{
    ExecutorLimits, FinishReason, Request, RequestEvent, RequestId, StepId, StepPlan,
};
use kv_block_manager::{BlockPool, PrefixMatch};

use crate::config::SchedulerConfig;
use crate::entries::{Entries, Slot};
use crate::entry::Entry;
use crate::error::{ConfigError, SubmitError};
use crate::stats::SchedulerStats;
use crate::submit::RequestRules;

/// Decides what each step does and keeps the requests' books.
///
/// The owner alternates [`plan`](Self::plan) and [`apply`](Self::apply) (or
/// [`fail_step`](Self::fail_step)); [`submit`](Self::submit) and [`abort`](Self::abort) may come
/// at any time, also in between.
#[derive(Debug)]
pub struct Scheduler {
    pub(crate) config: SchedulerConfig,
    pub(crate) limits: ExecutorLimits,
    pub(crate) pool: BlockPool,
    /// What the prefix cache has of the request at the head of the queue; a reused buffer.
    pub(crate) prefix: PrefixMatch,
    pub(crate) entries: Entries,
    /// In order of submission, preempted requests in front.
    pub(crate) waiting: VecDeque<Slot>,
    /// In order of admission: the last one is the newest.
    pub(crate) running: Vec<Slot>,
    /// Block tables of the executor that no running request has.
    pub(crate) free_tables: Vec<u32>,
    /// The slots of the plan's rows while a step runs.
    pub(crate) planned: Vec<Slot>,
    pub(crate) in_flight: Option<StepId>,
    pub(crate) next_step: StepId,
    pub(crate) totals: SchedulerStats,
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
            waiting: VecDeque::new(),
            running: vec![],
            free_tables: (0..config.max_num_seqs).rev().collect(),
            planned: vec![],
            in_flight: None,
            next_step: StepId::default(),
            totals: SchedulerStats::default(),
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

    /// Queues a request.
    ///
    /// # Errors
    ///
    /// If it can never be served, its id is in use, or the queue is full. Nothing is kept of it.
    pub fn submit(&mut self, request: Request) -> Result<(), SubmitError> {
        self.request_rules().check(&request)?;
        if self.entries.slot(request.id).is_some() {
            return Err(SubmitError::DuplicateId(request.id));
        }
        let limit =
            u64::from(self.config.max_num_seqs) + u64::from(self.config.max_queued_requests);
        if self.entries.len() as u64 >= limit {
            return Err(SubmitError::QueueFull { limit });
        }
        self.totals.n_prompt_tokens += request.prompt.len() as u64;
        let entry = Entry::new(request, self.config.num_speculative_tokens, &self.limits);
        let slot = self.entries.insert(entry);
        self.waiting.push_back(slot);
        Ok(())
    }

    /// Ends a request, whatever its state, and says whether it was unfinished. The row of a step
    /// that runs meanwhile is ignored later.
    pub fn abort(&mut self, id: RequestId, events: &mut Vec<RequestEvent>) -> bool {
        let Some(slot) = self.entries.slot(id) else { return false };
        self.finish(slot, FinishReason::Aborted, events);
        true
    }

    /// Ends all requests of a step that failed; the others go on.
    ///
    /// # Panics
    ///
    /// If `plan` is not the step that runs.
    pub fn fail_step(&mut self, plan: &StepPlan, message: &str, events: &mut Vec<RequestEvent>) {
        let planned = self.take_planned(plan);
        for (row, slot) in plan.rows().iter().zip(&planned) {
            if self.entries.is_at(*slot, row.request_id) {
                self.finish(*slot, FinishReason::Failed(message.to_owned()), events);
            }
        }
        self.planned = planned;
    }

    /// A snapshot of the counts.
    #[must_use]
    pub fn stats(&self) -> SchedulerStats {
        SchedulerStats {
            n_running: self.running.len(),
            n_waiting: self.waiting.len(),
            blocks: self.pool.stats(),
            ..self.totals
        }
    }

    /// Whether no request is left.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.entries.len() == 0
    }

    /// Checks the books as a whole. O(requests and blocks); for tests.
    ///
    /// # Panics
    ///
    /// If a request is lost or doubled, a block has not exactly its holders, or a table or a count
    /// does not fit a request's state.
    pub fn check_invariants(&self) {
        self.pool.check_invariants(self.entries.iter().map(|entry| &entry.table));
        assert_eq!(self.entries.len(), self.running.len() + self.waiting.len());
        let n_tables = self.running.len() + self.free_tables.len();
        assert_eq!(n_tables, self.config.max_num_seqs as usize, "each running request has a table");
        for slot in &self.running {
            let entry = &self.entries[*slot];
            assert!(entry.is_running && entry.n_pending() >= 1, "{} [INV-5]", entry.id);
            let n_blocks = self.pool.blocks_for(entry.n_computed);
            assert!(entry.table.n_blocks() >= n_blocks, "{} has KV outside blocks", entry.id);
            assert!(entry.n_settled() <= entry.n_computed, "{} shares what it lacks", entry.id);
        }
        let mut queue = self.waiting.iter().map(|slot| self.entries[*slot].is_preempted);
        let is_in_order = queue.by_ref().all(|preempted| preempted) || !queue.any(|p| p);
        assert!(is_in_order, "preempted requests wait in front");
        for slot in &self.waiting {
            let entry = &self.entries[*slot];
            assert!(!entry.is_running && entry.n_computed == 0 && entry.drafts().is_empty());
            assert!(entry.table.blocks().is_empty(), "{} waits with blocks", entry.id);
        }
    }

    /// Takes a request out and emits its last event.
    pub(crate) fn finish(
        &mut self,
        slot: Slot,
        reason: FinishReason,
        events: &mut Vec<RequestEvent>,
    ) {
        let mut entry = self.entries.remove(slot);
        if entry.is_running {
            let idx = self.running.iter().position(|other| *other == slot);
            self.running.remove(idx.expect("a running request is listed"));
            self.free_tables.push(entry.table_slot);
        } else {
            let idx = self.waiting.iter().position(|other| *other == slot);
            self.waiting.remove(idx.expect("a waiting request is listed"));
        }
        self.pool.release_table(&mut entry.table);
        self.totals.n_finished += 1;
        events.push(entry.finished(reason));
    }

    /// The slots of the rows of the step that runs; it does not any more.
    pub(crate) fn take_planned(&mut self, plan: &StepPlan) -> Vec<Slot> {
        assert_eq!(self.in_flight.take(), Some(plan.step_id), "the plan is the step that runs");
        assert_eq!(self.planned.len(), plan.rows().len(), "the plan is as it was made");
        std::mem::take(&mut self.planned)
    }
}

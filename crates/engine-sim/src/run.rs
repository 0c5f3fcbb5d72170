//! Runs a seed's workload and checks it after every event.

use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};

use engine_types::{
    BlockId, BlockTables, ExecutorError, FinishReason, MAX_STEPS_IN_FLIGHT, OutputMode, Request,
    RequestEvent, RequestId, StepExecutor, StepOutcome, StepPlan,
};
use scheduler::{Scheduler, SchedulingPolicy, SubmitError};

use crate::executor::HashExecutor;
use crate::kv_mirror::KvMirror;
use crate::ledger::Ledger;
use crate::model::Voice;
use crate::oracle::{SerialDrafter, serial};
use crate::rng::Rng;
use crate::rules::Rules;
use crate::summary::Summary;
use crate::trace::Trace;
use crate::workload::{Action, Moment, Workload};

/// No workload needs nearly as many steps; more of them are a live-lock.
const MAX_STEPS: u64 = 20_000;

/// Runs the workloads of all `seeds`.
///
/// # Panics
///
/// As [`run_seed`].
#[must_use]
pub fn run_seeds(seeds: Range<u64>) -> Summary {
    let mut sum = Summary::default();
    for seed in seeds {
        sum += run_seed(seed);
    }
    sum
}

/// Runs the workload of one seed.
///
/// # Panics
///
/// If anything differs from the oracle or an invariant is broken; the text says how to replay it.
#[must_use]
pub fn run_seed(seed: u64) -> Summary {
    catch_unwind(AssertUnwindSafe(|| Run::new(seed).finish())).unwrap_or_else(|panic| {
        let message = message(&*panic);
        panic!("seed {seed} failed: {message}\nreplay it with: cargo xtask sim --seed {seed}")
    })
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()))
        .unwrap_or_else(|| "no message".to_owned())
}

/// A command that ends a request.
type End = fn(&mut Scheduler, RequestId, &mut Vec<RequestEvent>) -> bool;

/// A workload on its way.
struct Run {
    workload: Workload,
    scheduler: Scheduler,
    executor: HashExecutor,
    rng: Rng,
    /// The steps in flight, the oldest first.
    flights: VecDeque<StepPlan>,
    max_flights: usize,
    tables: BlockTables,
    events: Vec<RequestEvent>,
    ledger: Ledger,
    trace: Trace,
    mirror: Option<KvMirror>,
    /// The salt of each request.
    salts: HashMap<RequestId, Option<Vec<u8>>>,
    /// The salt of the request that wrote each block last.
    block_salts: HashMap<BlockId, Option<Vec<u8>>>,
    n_obeyed: usize,
    n_deferred_steps: u64,
    n_failed_steps: u64,
    n_copies: u64,
}

impl Run {
    fn new(seed: u64) -> Self {
        let workload = Workload::new(seed);
        let executor =
            HashExecutor::new(workload.limits, seed, workload.drafter, workload.failure_percents);
        let mut scheduler = Scheduler::new(workload.config.clone(), executor.limits())
            .expect("workloads are valid");
        Self {
            trace: Trace::new(Rules::new(&workload.config, &workload.limits)),
            mirror: workload.has_mirror.then(|| KvMirror::new(&mut scheduler)),
            max_flights: match workload.config.output_mode {
                OutputMode::Immediate => 1,
                OutputMode::Deferred => MAX_STEPS_IN_FLIGHT,
            },
            workload,
            scheduler,
            executor,
            rng: Rng::new(!seed),
            flights: VecDeque::new(),
            tables: BlockTables::default(),
            events: vec![],
            ledger: Ledger::default(),
            salts: HashMap::new(),
            block_salts: HashMap::new(),
            n_obeyed: 0,
            n_deferred_steps: 0,
            n_failed_steps: 0,
            n_copies: 0,
        }
    }

    fn finish(mut self) -> Summary {
        let mut time = 0;
        while self.n_obeyed < self.workload.commands.len()
            || !self.scheduler.is_idle()
            || !self.flights.is_empty()
        {
            assert!(time < MAX_STEPS, "a live-lock");
            self.obey((time, Moment::Before));
            if self.rng.chance(self.workload.early_percent) {
                self.collect(time);
            }
            if !self.launch(time) || self.flights.len() == self.max_flights {
                self.collect(time);
            }
            time += 1;
        }
        assert_eq!(self.ledger.n_unfinished(), 0, "every request finishes");
        let stats = self.scheduler.stats();
        assert_eq!(stats.blocks.n_used, 0, "no block is left behind");
        Summary {
            n_seeds: 1,
            n_requests: self.ledger.len() as u64,
            n_tokens: self.ledger.n_tokens,
            n_accepted_tokens: stats.spec_decode.n_accepted_tokens,
            n_cached_tokens: stats.n_prefix_hit_tokens,
            n_shared_tokens: stats.n_shared_tokens,
            n_copies: self.n_copies,
            n_evictions: stats.blocks.n_evictions,
            n_preemptions: stats.n_preemptions,
            n_preemptions_in_flight: self.trace.n_preemptions_in_flight,
            n_steps: self.trace.n_steps,
            n_deferred_steps: self.n_deferred_steps,
            n_failed_steps: self.n_failed_steps,
            max_starved: self.trace.max_starved,
        }
    }

    /// Does what is due.
    fn obey(&mut self, now: (u64, Moment)) {
        while let Some(command) = self.workload.commands.get(self.n_obeyed) {
            if command.due > now {
                return;
            }
            self.n_obeyed += 1;
            match command.action {
                Action::Submit(idx) => self.submit(idx),
                Action::Abort(id) => self.end(id, FinishReason::Aborted, Scheduler::abort),
                Action::ClearCache => self.clear_cache(),
                Action::Expire(id) => {
                    self.end(id, FinishReason::DeadlineExceeded, Scheduler::expire);
                }
            }
            self.check();
        }
    }

    fn clear_cache(&mut self) {
        self.scheduler.clear_prefix_cache();
        assert_eq!(self.scheduler.stats().blocks.n_cached, 0, "nothing is cached any more");
    }

    fn submit(&mut self, idx: usize) {
        let limits = self.workload.limits;
        let request = self.workload.requests[idx].clone();
        let config = &self.workload.config;
        let n_running = config.max_num_seqs.min(limits.max_num_seqs);
        let max_unfinished = (n_running + config.max_queued_requests) as usize;
        let pool_tokens = limits.num_blocks as usize * limits.block_size as usize;
        let ids: Vec<_> = std::iter::once(request.id).chain(request.siblings.clone()).collect();
        let is_full = self.ledger.n_unfinished() + ids.len() > max_unfinished;
        let n_prompt = request.prompt.len();
        match self.scheduler.submit(request.clone()) {
            Ok(()) => {
                assert!(!is_full && n_prompt < limits.max_model_len as usize);
                assert!(n_prompt < pool_tokens);
                ids.into_iter().for_each(|id| self.accept(id, idx));
            }
            Err(SubmitError::QueueFull { .. }) => assert!(is_full),
            Err(SubmitError::PromptTooLong { .. }) => {
                assert!(n_prompt >= limits.max_model_len as usize);
            }
            Err(SubmitError::NeverFits { .. }) => assert!(n_prompt >= pool_tokens),
            Err(SubmitError::DuplicateId(id)) => {
                let n_times = ids.iter().filter(|other| **other == id).count();
                assert!(n_times > 1 || self.ledger.is_unfinished(id));
            }
            Err(error) => panic!("{error}"),
        }
    }

    fn accept(&mut self, id: RequestId, idx: usize) {
        let Workload { limits, config, drafter, requests, .. } = &self.workload;
        let own = Request { id, ..requests[idx].clone() };
        let request = &requests[idx];
        let expected = serial(&own, limits, &config.eos_token_ids);
        // With more draft layers, drafts depend on earlier rejections as well.
        let drafter =
            (limits.n_lookahead_max == 1).then(|| SerialDrafter::new(*drafter, Voice::of(id)));
        let due = match config.policy {
            SchedulingPolicy::Fcfs => 0,
            SchedulingPolicy::Priority { aging_steps } => {
                self.trace.n_steps as i64 + i64::from(request.priority) * i64::from(aging_steps)
            }
        };
        let rank = (due, self.ledger.len() as u64);
        let n_lookahead = match request.params.num_speculative_tokens {
            Some(0) => 0,
            None if config.num_speculative_tokens == 0 => 0,
            _ => limits.n_lookahead_max,
        };
        self.trace.submit(id, request, rank, n_lookahead);
        self.salts.insert(id, request.cache_salt.clone());
        self.ledger.accept(id, request, expected, drafter);
    }

    /// Ends a request from outside, whatever its state.
    fn end(&mut self, id: RequestId, reason: FinishReason, end: End) {
        let was_unfinished = self.ledger.is_unfinished(id);
        assert_eq!(end(&mut self.scheduler, id, &mut self.events), was_unfinished);
        let again = end(&mut self.scheduler, id, &mut self.events);
        assert!(!again, "a second end does nothing");
        let reasons: Vec<_> = self.events.iter().map(end_reason).collect();
        assert_eq!(reasons, vec![Some((id, &reason)); usize::from(was_unfinished)]);
        self.read_events();
    }

    fn read_events(&mut self) {
        for event in self.events.drain(..) {
            if let Some((id, _)) = end_reason(&event) {
                self.trace.end(id);
            }
            self.ledger.read(event);
        }
    }

    /// Plans a step and launches it, if there is anything to do now.
    fn launch(&mut self, time: u64) -> bool {
        let mut plan = StepPlan::default();
        let before = self.scheduler.stats();
        let has_work = self.scheduler.plan(&mut plan, &mut self.events);
        for event in &self.events {
            if let Some((_, reason)) = end_reason(event) {
                assert_eq!(*reason, FinishReason::OutOfBlocks, "what a plan ends outgrew the pool");
            }
        }
        self.read_events();
        let n_preempted = self.scheduler.stats().n_preemptions - before.n_preemptions;
        if !has_work {
            assert!(plan.is_empty());
            assert!(self.scheduler.is_idle() || !self.flights.is_empty(), "work is left");
            self.trace.wait(n_preempted);
            self.check();
            return false;
        }
        self.check_plan(&plan, n_preempted);
        self.n_deferred_steps += u64::from(!self.flights.is_empty());
        self.flights.push_back(plan.clone());
        self.check();
        self.obey((time, Moment::Planned));
        self.executor.launch(&plan);
        self.obey((time, Moment::Launched));
        true
    }

    /// Checks the plan against the scheduler's own configuration, whose blocks each row reads, and
    /// whether it continues what was before.
    fn check_plan(&mut self, plan: &StepPlan, n_preempted: u64) {
        let blocks = self.scheduler.stats().blocks;
        let n_available = blocks.n_free + blocks.n_cached;
        let started = self.trace.plan(plan, self.flights.back(), n_preempted, n_available);
        self.tables.update(plan);
        self.check_copies(plan, &started);
        for row in plan.rows() {
            if let Some((_, is_shared)) = started.iter().find(|(id, _)| *id == row.request_id) {
                self.ledger.start(row.request_id, row.n_computed, *is_shared);
            }
            self.ledger.check_row(plan, row);
            let salt = &self.salts[&row.request_id];
            let n_whole = (row.n_computed / self.workload.limits.block_size) as usize;
            let (read, written) = self.tables.blocks(row.table).split_at(n_whole);
            let is_own = read.iter().all(|block| self.block_salts[block] == *salt);
            assert!(is_own, "{}: blocks of another salt", row.request_id);
            self.block_salts.extend(written.iter().map(|block| (*block, salt.clone())));
        }
    }

    /// Checks that blocks are copied to where the own tokens of those begin who share a part of
    /// one, and nowhere else.
    fn check_copies(&mut self, plan: &StepPlan, started: &[(RequestId, bool)]) {
        let block_size = self.workload.limits.block_size;
        let mut copied_to: Vec<_> = plan.copies().iter().map(|copy| copy.to).collect();
        self.n_copies += copied_to.len() as u64;
        for row in plan.rows() {
            let shares = started.contains(&(row.request_id, true));
            if shares && !row.n_computed.is_multiple_of(block_size) {
                let block = self.tables.blocks(row.table)[(row.n_computed / block_size) as usize];
                let at = copied_to.iter().position(|to| *to == block);
                copied_to.swap_remove(at.expect("a block that is shared in part is copied"));
            }
        }
        assert!(copied_to.is_empty(), "nothing else is copied");
    }

    /// Collects the oldest step in flight, if there is one, and applies it.
    fn collect(&mut self, time: u64) {
        if self.flights.is_empty() {
            return;
        }
        let mut outcome = StepOutcome::default();
        let result = self.executor.collect(&mut outcome);
        self.obey((time, Moment::Collected));
        let plan = self.flights.pop_front().expect("a step is in flight");
        match result {
            Ok(()) => {
                self.scheduler.apply(&plan, &outcome, &mut self.events);
                self.trace.apply(&plan, &outcome, &self.events);
            }
            Err(ExecutorError::Step(message)) => {
                self.scheduler.fail_step(&plan, &message, &mut self.events);
                self.n_failed_steps += 1;
                let failed = FinishReason::Failed(message);
                let is_failed = |event| end_reason(event).is_some_and(|(_, why)| *why == failed);
                assert!(self.events.iter().all(is_failed), "a failed step fails its requests");
                self.trace.fail(&plan, &self.events);
            }
            Err(error) => panic!("{error}"),
        }
        self.read_events();
        self.check();
    }

    fn check(&mut self) {
        self.scheduler.check_invariants();
        let stats = self.scheduler.stats();
        self.trace.check(&stats);
        if let Some(mirror) = &mut self.mirror {
            mirror.check(&mut self.scheduler);
        }
        assert_eq!(stats.n_running + stats.n_waiting, self.ledger.n_unfinished());
        assert_eq!(stats.n_generated_tokens, self.ledger.n_tokens);
        assert_eq!(stats.n_prompt_tokens, self.ledger.n_prompt_tokens);
        assert_eq!(stats.spec_decode, self.ledger.spec_decode);
        assert_eq!(stats.n_finished, self.ledger.n_finished as u64);
        let blocks = stats.blocks;
        assert_eq!(blocks.n_free + blocks.n_cached + blocks.n_used, blocks.n_total);
        let is_caching = self.workload.config.enable_prefix_caching;
        assert!(is_caching || blocks.n_cached == 0);
        let n_queried = if is_caching { self.ledger.n_started_prompt_tokens } else { 0 };
        assert_eq!(stats.n_prefix_queried_tokens, n_queried);
        assert_eq!(stats.n_prefix_hit_tokens, self.ledger.n_cached_tokens);
        assert_eq!(stats.n_shared_tokens, self.ledger.n_shared_tokens);
        assert_eq!(self.scheduler.n_in_flight(), self.flights.len());
    }
}

/// Whose end an event is, and why.
fn end_reason(event: &RequestEvent) -> Option<(RequestId, &FinishReason)> {
    match event {
        RequestEvent::Finished { request_id, reason, .. } => Some((*request_id, reason)),
        _ => None,
    }
}

//! A scheduler with a scripted executor: the token at position `p` is `100 + p`.

use std::collections::VecDeque;

use engine_types::{
    BlockTables, ExecutorError, ExecutorLimits, FinishReason, OutputMode, Request, RequestEvent,
    RequestId, SamplingParams, StepOutcome, StepPlan, StepQueue, TokenId, TokenSource,
};

use crate::{DraftPolicy, Scheduler, SchedulerConfig, SchedulerStats};

pub(super) fn limits(block_size: u32, num_blocks: u32) -> ExecutorLimits {
    ExecutorLimits {
        block_size,
        num_blocks,
        max_model_len: 64,
        max_num_seqs: 4,
        max_num_batched_tokens: 64,
        max_num_speculative_tokens: 8,
        n_lookahead_max: 1,
        vocab_size: 1000,
    }
}

/// Without prefix caching, so that what is planned depends on lengths alone.
pub(super) fn config(k: u32) -> SchedulerConfig {
    SchedulerConfig {
        num_speculative_tokens: k,
        drafting: DraftPolicy::Fixed,
        eos_token_ids: vec![2],
        enable_prefix_caching: false,
        ..Default::default()
    }
}

/// [`config`] with prefix caching.
pub(super) fn caching(k: u32) -> SchedulerConfig {
    SchedulerConfig { enable_prefix_caching: true, ..config(k) }
}

/// [`config`] with deferred output.
pub(super) fn deferred(k: u32) -> SchedulerConfig {
    SchedulerConfig { output_mode: OutputMode::Deferred, ..config(k) }
}

pub(super) fn params(max_tokens: u32) -> SamplingParams {
    SamplingParams { max_tokens, ignore_eos: false, ..SamplingParams::default() }
}

pub(super) fn request(id: u64, n_prompt: u32, max_tokens: u32) -> Request {
    let prompt = (100..100 + n_prompt).collect();
    Request {
        id: RequestId(id),
        prompt,
        params: params(max_tokens),
        cache_salt: None,
        priority: 0,
        guide: None,
        stop_texts: None,
        siblings: vec![],
    }
}

/// The engine without its threads.
pub(super) struct Rig {
    pub(super) scheduler: Scheduler,
    /// The plan that was made last.
    pub(super) plan: StepPlan,
    pub(super) events: Vec<RequestEvent>,
    /// Accepted drafts of a verify row, at most.
    pub(super) n_right: u32,
    /// Whether outcome rows come in the opposite order.
    pub(super) is_reversed: bool,
    limits: ExecutorLimits,
    n_in_flight_max: usize,
    in_flight: VecDeque<StepPlan>,
    queue: StepQueue,
    tables: BlockTables,
}

impl Rig {
    pub(super) fn new(config: SchedulerConfig, limits: ExecutorLimits) -> Self {
        let n_in_flight_max = match config.output_mode {
            OutputMode::Immediate => 1,
            OutputMode::Deferred => 2,
        };
        Self {
            scheduler: Scheduler::new(config, limits).unwrap(),
            plan: StepPlan::default(),
            events: vec![],
            n_right: 8,
            is_reversed: false,
            limits,
            n_in_flight_max,
            in_flight: VecDeque::new(),
            queue: StepQueue::default(),
            tables: BlockTables::default(),
        }
    }

    pub(super) fn submit(&mut self, id: u64, n_prompt: u32, max_tokens: u32) {
        self.scheduler.submit(request(id, n_prompt, max_tokens)).unwrap();
    }

    pub(super) fn submit_prompt(&mut self, id: u64, prompt: &[TokenId], max_tokens: u32) {
        let request = Request { prompt: prompt.to_vec(), ..request(id, 1, max_tokens) };
        self.scheduler.submit(request).unwrap();
    }

    /// Plans a step and launches it; false if there is none to launch.
    pub(super) fn plan(&mut self) -> bool {
        let has_work = self.scheduler.plan(&mut self.plan, &mut self.events);
        self.scheduler.check_invariants();
        if has_work {
            self.tables.update(&self.plan);
            for row in self.plan.rows() {
                let slot = self.scheduler.entries.slot(row.request_id).unwrap();
                let blocks = self.scheduler.entries[slot].table.blocks();
                assert_eq!(self.tables.blocks(row.table), blocks, "{row:?}");
            }
            self.queue.launch(&self.plan);
            self.in_flight.push_back(self.plan.clone());
        }
        has_work
    }

    /// Answers the oldest step in flight: drafts are right up to `n_right` a row.
    pub(super) fn apply(&mut self) {
        let (n_right, is_reversed, max_model_len) =
            (self.n_right, self.is_reversed, self.limits.max_model_len);
        self.collect(|plan, outcome| {
            let rows = plan.rows().iter();
            let rows = if is_reversed { rows.rev().collect() } else { rows.collect::<Vec<_>>() };
            for row in rows {
                let n_written = row.n_computed + row.n_query + row.n_propose.saturating_sub(1);
                assert!(n_written <= max_model_len, "{row:?} writes outside the model");
                let next = 100 + row.n_computed + row.n_query - row.n_draft;
                let right = (next..).zip(plan.drafts(row)).take_while(|(at, draft)| at == *draft);
                let n_accepted = right.take(n_right as usize).count() as u32;
                let run: Vec<_> = (next..=next + n_accepted).collect();
                let run = if row.samples { run } else { vec![] };
                let after = next + n_accepted + 1;
                // Beyond the right ones, drafts are wrong.
                let draft = |n| if n < n_right { after + n } else { 1 };
                let drafts: Vec<TokenId> = (0..row.n_propose).map(draft).collect();
                outcome.push_row(row.request_id, &run, n_accepted, &drafts);
            }
            Ok(())
        });
    }

    /// Lets the oldest step in flight fail.
    pub(super) fn fail(&mut self) {
        self.collect(|_, _| Err(ExecutorError::Step("broken".to_owned())));
    }

    /// Runs the oldest step in flight and enters what became of it.
    pub(super) fn collect(
        &mut self,
        run: impl FnOnce(&StepPlan, &mut StepOutcome) -> Result<(), ExecutorError>,
    ) {
        let plan = self.in_flight.pop_front().unwrap();
        let mut outcome = StepOutcome::default();
        match self.queue.collect(&mut outcome, run) {
            Ok(()) => self.scheduler.apply(&plan, &outcome, &mut self.events),
            Err(_) => self.scheduler.fail_step(&plan, "broken", &mut self.events),
        }
        self.scheduler.check_invariants();
    }

    /// Plans a step, after the oldest one has been applied if no more may be in flight.
    pub(super) fn plan_next(&mut self) -> bool {
        if self.in_flight.len() == self.n_in_flight_max {
            self.apply();
        }
        self.plan()
    }

    /// One round of the engine's loop; false once nothing is left to do.
    pub(super) fn step(&mut self) -> bool {
        let has_work = self.plan_next();
        let is_due = !has_work || self.in_flight.len() == self.n_in_flight_max;
        if is_due && !self.in_flight.is_empty() {
            self.apply();
            return true;
        }
        has_work
    }

    pub(super) fn drain(&mut self) {
        for _ in 0..1000 {
            if !self.step() {
                return;
            }
        }
        panic!("a live-lock");
    }

    /// Per planned row: request, first position, queried tokens and drafts among them.
    pub(super) fn rows(&self) -> Vec<(u64, u32, u32, u32)> {
        let rows = self.plan.rows().iter();
        rows.map(|row| (row.request_id.0, row.n_computed, row.n_query, row.n_draft)).collect()
    }

    /// Per planned row, which row of the step before it continues.
    pub(super) fn sources(&self) -> Vec<Option<u32>> {
        let source = |source| match source {
            TokenSource::Host => None,
            TokenSource::InFlight { row } => Some(row),
        };
        self.plan.rows().iter().map(|row| source(row.source)).collect()
    }

    pub(super) fn tokens(&self, id: u64) -> Vec<TokenId> {
        let runs = self.events.iter().filter_map(|event| match event {
            RequestEvent::Tokens(event) if event.request_id.0 == id => Some(event.tokens),
            _ => None,
        });
        runs.flatten().collect()
    }

    /// Why a request ended; it must have ended at most once.
    pub(super) fn reason(&self, id: u64) -> Option<FinishReason> {
        let mut reasons = self.events.iter().filter_map(|event| match event {
            RequestEvent::Finished { request_id, reason, .. } if request_id.0 == id => {
                Some(reason.clone())
            }
            _ => None,
        });
        let reason = reasons.next();
        assert_eq!(reasons.next(), None, "one last event");
        reason
    }

    /// The prompt tokens of a finished request that came from the prefix cache.
    pub(super) fn cached_tokens(&self, id: u64) -> Option<u32> {
        self.events.iter().find_map(|event| match event {
            RequestEvent::Finished { request_id, usage, .. } if request_id.0 == id => {
                Some(usage.cached_tokens)
            }
            _ => None,
        })
    }

    pub(super) fn stats(&self) -> SchedulerStats {
        self.scheduler.stats()
    }
}

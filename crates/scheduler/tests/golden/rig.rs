//! A scheduler in either output mode around a scripted executor.

use std::collections::VecDeque;

use engine_types::{
    ExecutorLimits, FinishReason, OutputMode, PlanRow, Request, RequestEvent, RequestId,
    SamplingParams, StepPlan, TokenId, TokenSource, TokensEvent, Usage,
};
use scheduler::{DraftPolicy, Scheduler, SchedulerConfig, SchedulerStats, SubmitError};

use crate::model::Model;

pub(crate) const BOTH: [OutputMode; 2] = [OutputMode::Immediate, OutputMode::Deferred];
pub(crate) const EOS: TokenId = 2;

/// The reference's default fixture, for drafts with one draft layer.
pub(crate) fn limits(block_size: u32, num_blocks: u32) -> ExecutorLimits {
    ExecutorLimits {
        block_size,
        num_blocks,
        max_model_len: 64,
        max_num_seqs: 4,
        max_num_batched_tokens: 64,
        max_num_speculative_tokens: 8,
        n_lookahead_max: 1,
        vocab_size: 10_000,
    }
}

/// `k` drafts a step and no prefix cache.
pub(crate) fn config(output_mode: OutputMode, k: u32) -> SchedulerConfig {
    SchedulerConfig {
        output_mode,
        num_speculative_tokens: k,
        drafting: DraftPolicy::Fixed,
        eos_token_ids: vec![EOS],
        enable_prefix_caching: false,
        ..SchedulerConfig::default()
    }
}

pub(crate) fn params(max_tokens: u32) -> SamplingParams {
    SamplingParams { max_tokens, ignore_eos: false, ..SamplingParams::default() }
}

pub(crate) fn request(id: u64, prompt: &[TokenId], params: SamplingParams) -> Request {
    Request::new(RequestId(id), prompt.to_vec(), params)
}

/// The tokens of the default text at positions `range`.
pub(crate) fn text(range: std::ops::Range<u32>) -> Vec<TokenId> {
    range.map(|position| 1000 + position).collect()
}

/// The engine without threads.
pub(crate) struct Rig {
    pub(crate) scheduler: Scheduler,
    model: Model,
    n_in_flight_max: usize,
    n_plans: u32,
    in_flight: VecDeque<StepPlan>,
    /// The plan that was launched last.
    pub(crate) plan: StepPlan,
    pub(crate) events: Vec<RequestEvent>,
}

impl Rig {
    pub(crate) fn new(config: SchedulerConfig, limits: ExecutorLimits) -> Self {
        let n_in_flight_max = match config.output_mode {
            OutputMode::Immediate => 1,
            OutputMode::Deferred => 2,
        };
        Self {
            scheduler: Scheduler::new(config, limits).expect("a valid configuration"),
            model: Model::new(&limits),
            n_in_flight_max,
            n_plans: 0,
            in_flight: VecDeque::new(),
            plan: StepPlan::default(),
            events: vec![],
        }
    }

    /// Lets exactly the first `n_right` drafts of each step be right.
    pub(crate) fn with_right_drafts(mut self, n_right: u32) -> Self {
        self.model.n_right = n_right;
        self
    }

    /// Submits a request for the default text.
    pub(crate) fn submit(&mut self, id: u64, n_prompt: u32, max_tokens: u32) {
        self.submit_with(id, &text(0..n_prompt), &[], params(max_tokens));
    }

    /// Submits a request whose output will be `output` and, behind it, the default text.
    pub(crate) fn submit_with(
        &mut self,
        id: u64,
        prompt: &[TokenId],
        output: &[TokenId],
        params: SamplingParams,
    ) {
        let submitted = self.submit_request(request(id, prompt, params), output);
        submitted.expect("the request can be served");
    }

    /// Submits a request, which may be refused; its siblings say the same.
    pub(crate) fn submit_request(
        &mut self,
        request: Request,
        output: &[TokenId],
    ) -> Result<(), SubmitError> {
        self.scheduler.submit(request.clone())?;
        self.model.learn(&request, output);
        Ok(())
    }

    /// Plans a step and launches it; false if there is none to launch.
    pub(crate) fn plan(&mut self) -> bool {
        self.n_plans += 1;
        assert!(self.n_plans < 10_000, "a live-lock");
        let has_work = self.scheduler.plan(&mut self.plan, &mut self.events);
        self.scheduler.check_invariants();
        for row in self.plan.rows() {
            if let TokenSource::InFlight { row: source } = row.source {
                let before = self.in_flight.back().expect("a step is in flight");
                assert_eq!(before.rows()[source as usize].request_id, row.request_id);
            }
        }
        if has_work {
            self.model.launch(&self.plan);
            self.in_flight.push_back(self.plan.clone());
        }
        has_work
    }

    /// Waits for the oldest step and applies it; returns its rows as they ran, with their tokens.
    pub(crate) fn collect(&mut self) -> &[(PlanRow, Vec<TokenId>)] {
        let plan = self.in_flight.pop_front().expect("a step was launched");
        let outcome = self.model.collect().expect("the step succeeds");
        self.scheduler.apply(&plan, &outcome, &mut self.events);
        self.scheduler.check_invariants();
        &self.model.ran
    }

    /// Lets the oldest step fail.
    pub(crate) fn fail(&mut self) {
        let plan = self.in_flight.pop_front().expect("a step was launched");
        let message = self.model.fail(&plan).to_string();
        self.scheduler.fail_step(&plan, &message, &mut self.events);
        self.scheduler.check_invariants();
    }

    /// One round of the engine's loop: plans a step and, where as many as may be are in flight or
    /// nothing can be planned, waits for the oldest. False once nothing is left to do.
    pub(crate) fn step(&mut self) -> bool {
        let has_work = self.plan();
        if !self.in_flight.is_empty() && (!has_work || self.is_full()) {
            self.collect();
            return true;
        }
        has_work
    }

    /// Whether as many steps as may be are in flight.
    pub(crate) fn is_full(&self) -> bool {
        self.in_flight.len() == self.n_in_flight_max
    }

    pub(crate) fn drain(&mut self) {
        while self.step() {}
    }

    /// Of the last plan, per row: request, first position (the least that it can be), queried
    /// tokens and drafts among them.
    pub(crate) fn rows(&self) -> Vec<(u64, u32, u32, u32)> {
        let rows = self.plan.rows().iter();
        rows.map(|row| (row.request_id.0, row.n_computed, row.n_query, row.n_draft)).collect()
    }

    /// Of the last plan, how many tokens each row queries.
    pub(crate) fn widths(&self) -> Vec<u32> {
        self.plan.rows().iter().map(|row| row.n_query).collect()
    }

    pub(crate) fn deltas(&self, id: u64) -> Vec<TokensEvent> {
        let of_request = |event: &RequestEvent| match event {
            RequestEvent::Tokens(event) if event.request_id.0 == id => Some(event.clone()),
            _ => None,
        };
        self.events.iter().filter_map(of_request).collect()
    }

    /// What was streamed.
    pub(crate) fn tokens(&self, id: u64) -> Vec<TokenId> {
        self.deltas(id).into_iter().flat_map(|event| event.tokens).collect()
    }

    /// The last event of a request, if it has ended; it must be one, with the counts of the stream.
    pub(crate) fn end(&self, id: u64) -> Option<(FinishReason, Usage)> {
        let of_request = |event: &RequestEvent| match event {
            RequestEvent::Finished { request_id, reason, usage, .. } if request_id.0 == id => {
                Some((reason.clone(), *usage))
            }
            _ => None,
        };
        let mut ends = self.events.iter().filter_map(of_request);
        let end = ends.next();
        assert_eq!(ends.next(), None, "one last event");
        if let Some((_, usage)) = &end {
            assert_eq!(usage.completion_tokens as usize, self.tokens(id).len());
        }
        end
    }

    pub(crate) fn reason(&self, id: u64) -> Option<FinishReason> {
        self.end(id).map(|(reason, _)| reason)
    }

    pub(crate) fn stats(&self) -> SchedulerStats {
        self.scheduler.stats()
    }

    /// Requests that run and that wait.
    pub(crate) fn counts(&self) -> (usize, usize) {
        let stats = self.stats();
        (stats.n_running, stats.n_waiting)
    }
}

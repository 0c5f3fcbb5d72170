//! A scheduler in either output mode around a scripted executor.
//!
//! Each request has a text, by default the token `1000 + p` at position `p`. The executor continues
//! it, drafts its first `n_right` tokens right and the others wrong, and checks that what it is
//! fed is the text: a token that was made up, lost or doubled shows at once. Each slot of its KV
//! holds a hash of all tokens up to its position, so that a row that reads a slot which was not
//! written, or for another text, shows as well.

use std::collections::{HashMap, HashSet, VecDeque};

use engine_types::{
    BlockTables, ExecutorError, ExecutorLimits, FinishReason, OutputMode, PlanRow, Request,
    RequestEvent, RequestId, SamplingParams, StepExecutor, StepOutcome, StepPlan, StepQueue,
    TokenId, TokensEvent, Usage,
};
use scheduler::{Scheduler, SchedulerConfig, SchedulerStats, SubmitError};

pub(crate) const BOTH: [OutputMode; 2] = [OutputMode::Immediate, OutputMode::Deferred];
pub(crate) const EOS: TokenId = 2;
/// A draft that no text has.
const WRONG: TokenId = 9_999;

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
        eos_token_ids: vec![EOS],
        enable_prefix_caching: false,
        ..SchedulerConfig::default()
    }
}

pub(crate) fn params(max_tokens: u32) -> SamplingParams {
    SamplingParams { max_tokens, ignore_eos: false, ..SamplingParams::default() }
}

/// A request without siblings.
pub(crate) fn request(id: u64, prompt: &[TokenId], params: SamplingParams) -> Request {
    let (id, prompt) = (RequestId(id), prompt.to_vec());
    Request {
        id,
        prompt,
        params,
        cache_salt: None,
        priority: 0,
        guide: None,
        stop_texts: None,
        siblings: vec![],
    }
}

/// The tokens of the default text at positions `range`.
pub(crate) fn text(range: std::ops::Range<u32>) -> Vec<TokenId> {
    range.map(|position| 1000 + position).collect()
}

/// What a request says, from its prompt on.
struct Text {
    tokens: Vec<TokenId>,
    /// What the hashes of its KV begin with: requests of different salts share nothing.
    root: u64,
}

/// The hash of a text behind `hash`, followed by `token`.
fn chained(hash: u64, token: TokenId) -> u64 {
    let mixed = (hash ^ u64::from(token)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed ^ (mixed >> 29)) | 1
}

/// The executor: a language model that knows every text.
struct Model {
    limits: ExecutorLimits,
    queue: StepQueue,
    tables: BlockTables,
    texts: HashMap<RequestId, Text>,
    /// By slot; 0 where nothing was written.
    kv: Vec<u64>,
    n_right: u32,
    fails_next: bool,
    /// Requests of a step that failed. Chunks of them that were in flight behind it find no KV.
    failed: HashSet<RequestId>,
    /// The rows of the last step that ran, with their tokens.
    ran: Vec<(PlanRow, Vec<TokenId>)>,
}

impl Model {
    fn token(&self, id: RequestId, position: u32) -> TokenId {
        let tokens = &self.texts[&id].tokens;
        tokens.get(position as usize).copied().unwrap_or(1000 + position)
    }

    /// Reads the KV in front of a row and writes that of its tokens.
    fn attend(&mut self, row: &PlanRow, tokens: &[TokenId]) {
        let block_size = self.limits.block_size as usize;
        let (id, blocks) = (row.request_id, self.tables.blocks(row.table));
        let n_written = row.n_computed + row.n_query + row.n_propose.saturating_sub(1);
        assert!(blocks.len() * block_size >= n_written as usize, "{id}: KV has a place");
        let slot = |position: u32| {
            let position = position as usize;
            blocks[position / block_size].0 as usize * block_size + position % block_size
        };
        let mut hash = self.texts[&id].root;
        for position in 0..row.n_computed {
            hash = chained(hash, self.token(id, position));
            let is_right = self.kv[slot(position)] == hash || self.failed.contains(&id);
            assert!(is_right, "{id}: KV of position {position}");
        }
        for position in row.n_computed..n_written {
            let idx = (position - row.n_computed) as usize;
            // Behind the tokens the drafter writes what is no KV of the text.
            hash = tokens.get(idx).map_or(0, |token| chained(hash, *token));
            self.kv[slot(position)] = if self.fails_next { 0 } else { hash };
        }
    }

    fn answer(&mut self, plan: &StepPlan, outcome: &mut StepOutcome) {
        let block_size = self.limits.block_size as usize;
        for copy in plan.copies() {
            let [from, to] = [copy.from, copy.to].map(|block| block.0 as usize * block_size);
            self.kv.copy_within(from..from + block_size, to);
        }
        self.tables.update(plan);
        self.ran = plan.rows().iter().map(|row| (*row, plan.tokens(row).to_vec())).collect();
        let mut rows: Vec<&PlanRow> = plan.rows().iter().collect();
        // Rows are joined by request, so that their order says nothing.
        if plan.step_id.0 % 2 == 1 {
            rows.reverse();
        }
        for row in rows {
            let (id, n_known) = (row.request_id, row.n_query - row.n_draft);
            let known = plan.tokens(row)[..n_known as usize].iter().chain(plan.lookahead(row));
            for (position, token) in (row.n_computed..).zip(known) {
                assert_eq!(*token, self.token(id, position), "{id} at {position}");
            }
            self.attend(row, plan.tokens(row));

            let next = row.n_computed + n_known;
            let is_right =
                |(position, draft): &(u32, &TokenId)| **draft == self.token(id, *position);
            let drafts = (next..).zip(plan.drafts(row));
            let n_accepted = drafts.take_while(is_right).count() as u32;
            let run = (next..=next + n_accepted).map(|position| self.token(id, position));
            let run: Vec<TokenId> = if row.samples { run.collect() } else { vec![] };
            let proposal = |n| match n < self.n_right {
                true => self.token(id, next + n_accepted + 1 + n),
                false => WRONG,
            };
            let proposals: Vec<TokenId> = (0..row.n_propose).map(proposal).collect();
            outcome.push_row(id, &run, n_accepted, &proposals);
        }
    }
}

impl StepExecutor for Model {
    fn limits(&self) -> ExecutorLimits {
        self.limits
    }

    fn launch(&mut self, plan: &StepPlan) {
        self.queue.launch(plan);
    }

    fn collect(&mut self, outcome: &mut StepOutcome) -> Result<(), ExecutorError> {
        let mut queue = std::mem::take(&mut self.queue);
        let result = queue.collect(outcome, |plan, outcome| {
            self.answer(plan, outcome);
            match std::mem::take(&mut self.fails_next) {
                true => Err(ExecutorError::Step("as the test asked".to_owned())),
                false => Ok(()),
            }
        });
        self.queue = queue;
        result
    }
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
            model: Model {
                limits,
                queue: StepQueue::default(),
                tables: BlockTables::default(),
                texts: HashMap::new(),
                kv: vec![0; (limits.num_blocks * limits.block_size) as usize],
                n_right: 8,
                fails_next: false,
                failed: HashSet::new(),
                ran: vec![],
            },
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
        let root = request
            .cache_salt
            .iter()
            .flatten()
            .fold(1, |hash, byte| chained(hash, TokenId::from(*byte)));
        let ids = std::iter::once(request.id).chain(request.siblings.iter().copied());
        let texts: Vec<(RequestId, Text)> =
            ids.map(|id| (id, Text { tokens: [&request.prompt, output].concat(), root })).collect();
        self.scheduler.submit(request)?;
        self.model.texts.extend(texts);
        Ok(())
    }

    /// Plans a step and launches it; false if there is none to launch.
    pub(crate) fn plan(&mut self) -> bool {
        self.n_plans += 1;
        assert!(self.n_plans < 10_000, "a live-lock");
        let has_work = self.scheduler.plan(&mut self.plan, &mut self.events);
        self.scheduler.check_invariants();
        if has_work {
            self.model.launch(&self.plan);
            self.in_flight.push_back(self.plan.clone());
        }
        has_work
    }

    /// Waits for the oldest step and applies it; returns its rows as they ran, with their tokens.
    pub(crate) fn collect(&mut self) -> &[(PlanRow, Vec<TokenId>)] {
        let plan = self.in_flight.pop_front().expect("a step was launched");
        let mut outcome = StepOutcome::default();
        self.model.collect(&mut outcome).expect("the model does not fail");
        self.scheduler.apply(&plan, &outcome, &mut self.events);
        self.scheduler.check_invariants();
        &self.model.ran
    }

    /// Lets the oldest step fail.
    pub(crate) fn fail(&mut self) {
        let plan = self.in_flight.pop_front().expect("a step was launched");
        self.model.fails_next = true;
        self.model.failed.extend(plan.rows().iter().map(|row| row.request_id));
        let failed = self.model.collect(&mut StepOutcome::default());
        let message = failed.expect_err("the model fails").to_string();
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

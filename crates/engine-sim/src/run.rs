//! Runs a seed's workload and checks it after every step.

use std::any::Any;
use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};

use engine_types::{
    BlockId, BlockTables, ExecutorError, RequestEvent, RequestId, StepExecutor, StepOutcome,
    StepPlan,
};
use scheduler::{Scheduler, SubmitError};

use crate::checks::Ledger;
use crate::executor::HashExecutor;
use crate::model::Drafter;
use crate::oracle::{SerialDrafter, serial};
use crate::workload::Workload;

/// No workload needs nearly as many steps; more of them are a live-lock.
const MAX_STEPS: u64 = 20_000;

/// What a simulation did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Seeds run.
    pub n_seeds: u64,
    /// Requests accepted.
    pub n_requests: u64,
    /// Tokens generated.
    pub n_tokens: u64,
    /// Drafts accepted.
    pub n_accepted_tokens: u64,
    /// Prompt tokens that the prefix cache served.
    pub n_cached_tokens: u64,
    /// Blocks that the prefix cache gave up for their room.
    pub n_evictions: u64,
    /// Preemptions.
    pub n_preemptions: u64,
    /// Steps executed.
    pub n_steps: u64,
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} seeds, {} requests, {} tokens ({} accepted drafts), {} prompt tokens cached, \
             {} evictions, {} preemptions, {} steps: all equal to the serial oracle",
            self.n_seeds,
            self.n_requests,
            self.n_tokens,
            self.n_accepted_tokens,
            self.n_cached_tokens,
            self.n_evictions,
            self.n_preemptions,
            self.n_steps
        )
    }
}

/// Runs the workloads of all `seeds`.
///
/// # Panics
///
/// As [`run_seed`].
#[must_use]
pub fn run_seeds(seeds: Range<u64>) -> Summary {
    let mut sum = Summary::default();
    for seed in seeds {
        let summary = run_seed(seed);
        sum.n_seeds += summary.n_seeds;
        sum.n_requests += summary.n_requests;
        sum.n_tokens += summary.n_tokens;
        sum.n_accepted_tokens += summary.n_accepted_tokens;
        sum.n_cached_tokens += summary.n_cached_tokens;
        sum.n_evictions += summary.n_evictions;
        sum.n_preemptions += summary.n_preemptions;
        sum.n_steps += summary.n_steps;
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

/// A workload on its way.
struct Run {
    workload: Workload,
    scheduler: Scheduler,
    executor: HashExecutor,
    plan: StepPlan,
    tables: BlockTables,
    outcome: StepOutcome,
    events: Vec<RequestEvent>,
    ledger: Ledger,
    /// The requests in the order of their first rows.
    first_rows: Vec<RequestId>,
    submitted: Vec<RequestId>,
    /// The salt of the request that wrote each block last.
    salts: HashMap<BlockId, Option<Vec<u8>>>,
    n_steps: u64,
}

impl Run {
    fn new(seed: u64) -> Self {
        let workload = Workload::new(seed);
        let executor = HashExecutor::new(
            workload.limits,
            seed,
            workload.draft_accuracy_percent,
            workload.failure_percent,
        );
        let scheduler = Scheduler::new(workload.config.clone(), executor.limits())
            .expect("workloads are valid");
        Self {
            workload,
            scheduler,
            executor,
            plan: StepPlan::default(),
            tables: BlockTables::default(),
            outcome: StepOutcome::default(),
            events: vec![],
            ledger: Ledger::default(),
            first_rows: vec![],
            submitted: vec![],
            salts: HashMap::new(),
            n_steps: 0,
        }
    }

    fn finish(mut self) -> Summary {
        let last_arrival = self.workload.arrivals.iter().map(|a| a.step).max().unwrap_or(0);
        let mut time = 0;
        while time <= last_arrival || !self.scheduler.is_idle() {
            assert!(time < MAX_STEPS, "a live-lock");
            self.submit(time);
            self.abort(time, false);
            self.step(time);
            self.ledger.read(&mut self.events);
            self.check();
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
            n_evictions: stats.blocks.n_evictions,
            n_preemptions: stats.n_preemptions,
            n_steps: self.n_steps,
        }
    }

    fn submit(&mut self, time: u64) {
        let limits = self.executor.limits();
        let config = &self.workload.config;
        let n_running = config.max_num_seqs.min(limits.max_num_seqs);
        let max_unfinished = (n_running + config.max_queued_requests) as usize;
        let pool_tokens = limits.num_blocks as usize * limits.block_size as usize;
        for arrival in self.workload.arrivals.iter().filter(|arrival| arrival.step == time) {
            let request = &arrival.request;
            let n_prompt = request.prompt.len();
            let is_full = self.ledger.n_unfinished() >= max_unfinished;
            match self.scheduler.submit(request.clone()) {
                Ok(()) => {
                    assert!(!is_full && n_prompt < limits.max_model_len as usize);
                    assert!(n_prompt < pool_tokens);
                    let expected = serial(request, &limits, &config.eos_token_ids);
                    // With more draft layers, drafts depend on earlier rejections as well.
                    let drafter = (limits.n_lookahead_max == 1).then(|| {
                        SerialDrafter::new(Drafter {
                            accuracy_percent: self.workload.draft_accuracy_percent,
                            vocab_size: limits.vocab_size,
                        })
                    });
                    self.ledger.accept(request, expected, drafter);
                    self.submitted.push(request.id);
                }
                Err(SubmitError::QueueFull { .. }) => assert!(is_full),
                Err(SubmitError::PromptTooLong { .. }) => {
                    assert!(n_prompt >= limits.max_model_len as usize);
                }
                Err(SubmitError::NeverFits { .. }) => assert!(n_prompt >= pool_tokens),
                Err(error) => panic!("{error}"),
            }
        }
    }

    fn abort(&mut self, time: u64, while_running: bool) {
        let due = Some((time, while_running));
        for arrival in self.workload.arrivals.iter().filter(|arrival| arrival.abort == due) {
            let id = arrival.request.id;
            let was_unfinished = self.ledger.is_unfinished(id);
            assert_eq!(self.scheduler.abort(id, &mut self.events), was_unfinished);
            assert!(!self.scheduler.abort(id, &mut self.events), "a second abort does nothing");
            self.ledger.read(&mut self.events);
            assert!(!self.ledger.is_unfinished(id));
        }
    }

    fn step(&mut self, time: u64) {
        let has_work = self.scheduler.plan(&mut self.plan, &mut self.events);
        self.ledger.read(&mut self.events);
        self.scheduler.check_invariants();
        if !has_work {
            assert!(self.plan.is_empty());
            self.abort(time, true);
            return;
        }
        self.check_plan();
        self.n_steps += 1;
        let result = self.executor.execute(&self.plan, &mut self.outcome);
        self.abort(time, true);
        match result {
            Ok(()) => self.scheduler.apply(&self.plan, &self.outcome, &mut self.events),
            Err(ExecutorError::Step(message)) => {
                self.scheduler.fail_step(&self.plan, &message, &mut self.events);
            }
            Err(error) => panic!("{error}"),
        }
    }

    /// Checks the plan against the scheduler's own configuration, whose blocks each row reads, and
    /// who got a row first.
    fn check_plan(&mut self) {
        self.tables.update(&self.plan);
        let config = &self.workload.config;
        assert!(self.plan.rows().len() <= config.max_num_seqs as usize);
        assert!(self.plan.n_queried() <= config.max_num_batched_tokens as usize);
        for row in self.plan.rows() {
            self.ledger.note_row(row.request_id, row.n_computed);
            let mut arrivals = self.workload.arrivals.iter().map(|arrival| &arrival.request);
            let request = arrivals.find(|request| request.id == row.request_id);
            let salt = &request.expect("a row of a request").cache_salt;
            let n_whole = (row.n_computed / self.workload.limits.block_size) as usize;
            let (read, written) = self.tables.blocks(row.table).split_at(n_whole);
            let is_own = read.iter().all(|block| self.salts[block] == *salt);
            assert!(is_own, "{}: blocks of another salt", row.request_id);
            self.salts.extend(written.iter().map(|block| (*block, salt.clone())));
            if !self.first_rows.contains(&row.request_id) {
                self.first_rows.push(row.request_id);
            }
        }
    }

    fn check(&mut self) {
        self.scheduler.check_invariants();
        let stats = self.scheduler.stats();
        assert_eq!(stats.n_running + stats.n_waiting, self.ledger.n_unfinished());
        assert_eq!(stats.n_generated_tokens, self.ledger.n_tokens);
        assert_eq!(stats.n_prompt_tokens, self.ledger.n_prompt_tokens);
        assert_eq!(stats.spec_decode, self.ledger.spec_decode);
        let blocks = stats.blocks;
        assert_eq!(blocks.n_free + blocks.n_cached + blocks.n_used, blocks.n_total);
        let is_caching = self.workload.config.enable_prefix_caching;
        assert!(is_caching || blocks.n_cached == 0);
        let n_queried = if is_caching { self.ledger.n_started_prompt_tokens } else { 0 };
        assert_eq!(stats.n_prefix_queried_tokens, n_queried);
        assert_eq!(stats.n_prefix_hit_tokens, self.ledger.n_cached_tokens);
        let n_finished = self.ledger.len() - self.ledger.n_unfinished();
        assert_eq!(stats.n_finished, n_finished as u64);
        let n_planned = stats.n_decode_steps + stats.n_prefill_steps + stats.n_mixed_steps;
        assert_eq!(n_planned, self.n_steps);
        let mut in_order = self.submitted.iter();
        let is_fair = self.first_rows.iter().all(|id| in_order.any(|other| other == id));
        assert!(is_fair, "requests start in the order of submission");
    }
}

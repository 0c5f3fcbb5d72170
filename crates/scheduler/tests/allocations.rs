//! Once warm, a step allocates nothing \[INV-8]: `plan` and `apply` over full batches in both
//! output modes, with and without drafts, with the prefix cache hashing blocks as they fill, block
//! tables growing, and events. (The cache's own events, where somebody wants them, own what they
//! tell.)

use std::collections::VecDeque;

use allocation_counter::measure;
use engine_types::{
    ExecutorLimits, OutputMode, Request, RequestEvent, RequestId, SamplingParams, StepOutcome,
    StepPlan, StepQueue,
};
use scheduler::{DraftPolicy, Scheduler, SchedulerConfig};

const K: u32 = 3;
const N_REQUESTS: u32 = 64;

fn scheduler(output_mode: OutputMode, k: u32, enable_prefix_caching: bool) -> Scheduler {
    let limits = ExecutorLimits {
        block_size: 4,
        num_blocks: N_REQUESTS * 140,
        max_model_len: 512,
        max_num_seqs: N_REQUESTS,
        max_num_batched_tokens: 8192,
        max_num_speculative_tokens: K,
        n_lookahead_max: 1,
        vocab_size: 10_000,
    };
    let config = SchedulerConfig {
        max_num_seqs: N_REQUESTS,
        output_mode,
        num_speculative_tokens: k,
        drafting: DraftPolicy::Fixed,
        enable_prefix_caching,
        ..SchedulerConfig::default()
    };
    Scheduler::new(config, limits).expect("a valid configuration")
}

/// A request with a prompt that no other one has. They end at different places in a block.
fn request(id: u32, n_prompt: u32) -> Request {
    let params =
        SamplingParams { max_tokens: 80 + id % 20, ignore_eos: true, ..SamplingParams::default() };
    Request {
        id: RequestId(u64::from(id)),
        prompt: vec![id; n_prompt as usize],
        params,
        cache_salt: None,
        priority: 0,
        guide: None,
        stop_texts: None,
        siblings: vec![],
    }
}

/// Answers each row with its first `n_accepted` drafts and one token, and drafts again.
fn answer(plan: &StepPlan, outcome: &mut StepOutcome, n_accepted: u32) {
    for row in plan.rows() {
        let n_accepted = n_accepted.min(row.n_draft);
        let run = if row.samples { &[7, 7, 7, 9][(3 - n_accepted) as usize..] } else { &[] };
        let drafts = &[7, 7, 7][..row.n_propose as usize];
        outcome.push_row(row.request_id, run, n_accepted, drafts);
    }
}

struct Engine {
    scheduler: Scheduler,
    plan: StepPlan,
    queue: StepQueue,
    in_flight: VecDeque<StepPlan>,
    n_in_flight_max: usize,
    outcome: StepOutcome,
    events: Vec<RequestEvent>,
}

impl Engine {
    fn new(output_mode: OutputMode, k: u32, enable_prefix_caching: bool) -> Self {
        Self {
            scheduler: scheduler(output_mode, k, enable_prefix_caching),
            plan: StepPlan::default(),
            queue: StepQueue::default(),
            in_flight: VecDeque::new(),
            n_in_flight_max: if output_mode == OutputMode::Deferred { 2 } else { 1 },
            outcome: StepOutcome::default(),
            events: vec![],
        }
    }

    /// Plans a step and enters the oldest one in flight where that is due. Returns how often both
    /// allocated, and how many requests ended.
    fn step(&mut self, n_accepted: u32) -> (u64, u64) {
        self.events.clear();
        let mut has_work = false;
        let planned = measure(|| has_work = self.scheduler.plan(&mut self.plan, &mut self.events));
        if has_work {
            self.queue.launch(&self.plan);
            self.in_flight.push_back(self.plan.clone());
        }
        let mut n_applied = 0;
        if self.in_flight.len() == self.n_in_flight_max || !has_work {
            let plan = self.in_flight.pop_front().expect("a step is in flight");
            let run = |plan: &StepPlan, outcome: &mut StepOutcome| {
                answer(plan, outcome, n_accepted);
                Ok(())
            };
            self.queue.collect(&mut self.outcome, run).expect("the script does not fail");
            let apply = || self.scheduler.apply(&plan, &self.outcome, &mut self.events);
            n_applied = measure(apply).count_total;
        }
        let is_end = |event: &RequestEvent| matches!(event, RequestEvent::Finished { .. });
        let n_ends = self.events.iter().filter(|event| is_end(event)).count();
        (planned.count_total + n_applied, n_ends as u64)
    }
}

#[test]
fn a_warm_step_allocates_nothing() {
    for output_mode in [OutputMode::Immediate, OutputMode::Deferred] {
        for (k, enable_prefix_caching) in [(0, false), (0, true), (K, false), (K, true)] {
            let mut engine = Engine::new(output_mode, k, enable_prefix_caching);
            // Longer requests and a full step first: the buffers of the batch itself grow to their
            // size.
            for (round, n_prompt) in [(0, 400), (1, 100), (2, 100)] {
                for id in 0..N_REQUESTS {
                    let id = id + round * N_REQUESTS;
                    engine.scheduler.submit(request(id, n_prompt)).expect("it can be served");
                }
                let mut n_steps = 0;
                while !engine.scheduler.is_idle() {
                    let (n_allocations, n_ends) = engine.step(n_steps % 4);
                    // The end of a request hands its counts out in a box.
                    if round == 2 {
                        let place = format!("{output_mode:?}, k = {k}, {enable_prefix_caching}");
                        assert_eq!(n_allocations, n_ends, "step {n_steps}, {place}");
                    }
                    n_steps += 1;
                }
                assert!(n_steps > 30, "{n_steps}");
            }
            assert_eq!(engine.scheduler.stats().n_preemptions, 0);
        }
    }
}

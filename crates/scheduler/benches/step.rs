//! What a step costs the control plane: `plan` and `apply` with full batches of verify rows.
//!
//! The question is how much of a step's time the host spends between two launches, at a context
//! of about 1,000 tokens, 3 drafts a request of which 2 are accepted, and blocks of 16 tokens; and
//! how much of it the prefix cache takes, which hashes each block as it fills.

use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group, criterion_main};
use engine_types::{
    ExecutorLimits, Request, RequestEvent, RequestId, SamplingParams, StepOutcome, StepPlan,
};
use scheduler::{Scheduler, SchedulerConfig};

const K: u32 = 3;
const N_PROMPT: usize = 900;
const N_STEPS: u32 = 60;

struct Bench {
    scheduler: Scheduler,
    plan: StepPlan,
    outcome: StepOutcome,
    events: Vec<RequestEvent>,
}

impl Bench {
    /// All requests prefilled, with drafts to verify.
    fn new(n_requests: u32, enable_prefix_caching: bool) -> Self {
        let limits = ExecutorLimits {
            block_size: 16,
            num_blocks: n_requests * 100,
            max_model_len: 4096,
            max_num_seqs: n_requests,
            max_num_batched_tokens: n_requests * 1024,
            max_num_speculative_tokens: K,
            n_lookahead_max: 1,
            vocab_size: 10_000,
        };
        let config = SchedulerConfig {
            max_num_seqs: n_requests,
            max_num_batched_tokens: n_requests * 1024,
            num_speculative_tokens: K,
            enable_prefix_caching,
            ..SchedulerConfig::default()
        };
        let scheduler = Scheduler::new(config, limits).expect("a valid configuration");
        let mut bench = Self {
            scheduler,
            plan: StepPlan::default(),
            outcome: StepOutcome::default(),
            events: Vec::new(),
        };
        for id in 0..n_requests {
            let params = SamplingParams {
                max_tokens: 3000,
                ignore_eos: true,
                stop_token_ids: vec![],
                stop_sequences: vec![],
                num_speculative_tokens: None,
            };
            // Different from the first token on, so that nothing is shared.
            let request = Request {
                id: RequestId(u64::from(id)),
                prompt: vec![id; N_PROMPT],
                params,
                cache_salt: None,
                priority: 0,
                siblings: vec![],
            };
            bench.scheduler.submit(request).expect("room in the queue");
        }
        bench.step();
        bench
    }

    /// One step; returns what `plan` and `apply` took.
    fn step(&mut self) -> [Duration; 2] {
        self.events.clear();
        let start = Instant::now();
        self.scheduler.plan(&mut self.plan, &mut self.events);
        let plan = start.elapsed();
        self.outcome.clear();
        for row in self.plan.rows() {
            let run = [7, 7, 9];
            let n_accepted = row.n_draft.min(2);
            let run = &run[2 - n_accepted as usize..];
            self.outcome.push_row(row.request_id, run, n_accepted, &[7, 7, 7]);
        }
        let start = Instant::now();
        self.scheduler.apply(&self.plan, &self.outcome, &mut self.events);
        [plan, start.elapsed()]
    }
}

fn step(criterion: &mut Criterion) {
    for (n_requests, is_caching) in [(256, false), (256, true), (1024, false), (1024, true)] {
        let cache = if is_caching { "prefix cache" } else { "no prefix cache" };
        for (part_idx, part) in ["plan", "apply"].into_iter().enumerate() {
            let name = format!("{part}/{n_requests} requests, {cache}");
            criterion.bench_function(&name, |bencher| {
                bencher.iter_custom(|n_iterations| {
                    let mut total = Duration::ZERO;
                    let mut bench = Bench::new(n_requests, is_caching);
                    for iteration in 0..n_iterations {
                        if iteration > 0 && iteration % u64::from(N_STEPS) == 0 {
                            bench = Bench::new(n_requests, is_caching);
                        }
                        total += bench.step()[part_idx];
                    }
                    total
                });
            });
        }
    }
}

criterion_group!(benches, step);
criterion_main!(benches);

//! What a step costs the control plane: `plan` and `apply` with full batches of verify rows.
//!
//! The question is how much of a step's time the host spends between two launches, by the number
//! of running requests and their context, and how much of it the prefix cache takes, which hashes
//! each block as it fills. Every request has one draft of three accepted in each step. Prompts
//! differ from the first token on, and their lengths are spread over a block of 16 tokens, so that
//! each step fills the same number of blocks. `docs/perf/scheduler_vllm.py` measures the same.

use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group, criterion_main};
use engine_types::{
    ExecutorLimits, OutputMode, Request, RequestEvent, RequestId, SamplingParams, StepOutcome,
    StepPlan,
};
use scheduler::{DraftPolicy, Scheduler, SchedulerConfig};

const K: u32 = 3;
const BLOCK_SIZE: u32 = 16;
/// With two tokens a step the context grows by 256 until it starts anew.
const N_STEPS: u32 = 128;
/// A request fills a block in this many steps.
const N_WARM_STEPS: u32 = 8;
const N_GROWTH: u32 = 2 * (N_STEPS + N_WARM_STEPS) + BLOCK_SIZE + 2 * K;

#[derive(Clone, Copy)]
struct Shape {
    n_requests: u32,
    context: u32,
    is_caching: bool,
    output_mode: OutputMode,
}

struct Bench {
    scheduler: Scheduler,
    plan: StepPlan,
    /// The step in flight, in deferred mode.
    launched: Option<StepPlan>,
    output_mode: OutputMode,
    outcome: StepOutcome,
    events: Vec<RequestEvent>,
    n_steps: u32,
}

impl Bench {
    /// All requests prefilled, with drafts to verify.
    fn new(shape: Shape) -> Self {
        let Shape { n_requests, context, is_caching, output_mode } = shape;
        let max_num_batched_tokens = n_requests * (context + BLOCK_SIZE);
        let limits = ExecutorLimits {
            block_size: BLOCK_SIZE,
            num_blocks: n_requests * (context + N_GROWTH).div_ceil(BLOCK_SIZE),
            max_model_len: context + 2048,
            max_num_seqs: n_requests,
            max_num_batched_tokens,
            max_num_speculative_tokens: K,
            n_lookahead_max: 1,
            vocab_size: 10_000,
        };
        let config = SchedulerConfig {
            max_num_seqs: n_requests,
            max_num_batched_tokens,
            num_speculative_tokens: K,
            enable_prefix_caching: is_caching,
            output_mode,
            drafting: DraftPolicy::Fixed,
            ..SchedulerConfig::default()
        };
        let mut bench = Self {
            scheduler: Scheduler::new(config, limits).expect("a valid configuration"),
            plan: StepPlan::default(),
            launched: None,
            output_mode,
            outcome: StepOutcome::default(),
            events: Vec::new(),
            n_steps: 0,
        };
        for id in 0..n_requests {
            let params =
                SamplingParams { max_tokens: 2000, ignore_eos: true, ..SamplingParams::default() };
            let request = Request {
                id: RequestId(u64::from(id)),
                prompt: vec![id; (context + id % BLOCK_SIZE) as usize],
                params,
                cache_salt: None,
                priority: 0,
                guide: None,
                stop_texts: None,
                siblings: vec![],
            };
            bench.scheduler.submit(request).expect("room in the queue");
        }
        for _ in 0..N_WARM_STEPS {
            bench.step();
        }
        bench.n_steps = 0;
        bench
    }

    /// One step; returns what `plan` and `apply` took. In deferred mode a step is planned before
    /// the outcome of the one before it is applied.
    fn step(&mut self) -> [Duration; 2] {
        self.events.clear();
        let start = Instant::now();
        self.scheduler.plan(&mut self.plan, &mut self.events);
        let plan = start.elapsed();
        if self.output_mode == OutputMode::Deferred {
            let Some(launched) = &mut self.launched else {
                self.launched = Some(std::mem::take(&mut self.plan));
                return [plan, Duration::ZERO];
            };
            std::mem::swap(launched, &mut self.plan);
        }
        self.outcome.clear();
        for row in self.plan.rows() {
            let n_accepted = row.n_draft.min(1);
            let run = if n_accepted == 1 { &[7, 9][..] } else { &[7] };
            self.outcome.push_row(row.request_id, run, n_accepted, &[7, 7, 7]);
        }
        let start = Instant::now();
        self.scheduler.apply(&self.plan, &self.outcome, &mut self.events);
        self.n_steps += 1;
        [plan, start.elapsed()]
    }
}

/// Measures what `part` takes of a step's times. What counts of a sample is its median step: the
/// machine's other programs interrupt some steps for longer than many of them take.
fn measure(
    criterion: &mut Criterion,
    name: &str,
    shape: Shape,
    part: fn([Duration; 2]) -> Duration,
) {
    let Shape { n_requests, context, is_caching, output_mode } = shape;
    let cache = if is_caching { "prefix cache" } else { "no prefix cache" };
    let name = format!("{name}/{n_requests} requests, context {context}, {cache}, {output_mode:?}");
    let (mut bench, mut times) = (None, vec![]);
    criterion.bench_function(&name, |bencher| {
        bencher.iter_custom(|n_iterations| {
            times.clear();
            for _ in 0..n_iterations {
                if bench.as_ref().is_none_or(|bench: &Bench| bench.n_steps == N_STEPS) {
                    bench = None;
                }
                times.push(part(bench.get_or_insert_with(|| Bench::new(shape)).step()));
            }
            times.sort_unstable();
            times[times.len() / 2].mul_f64(n_iterations as f64)
        });
    });
}

fn step(criterion: &mut Criterion) {
    for output_mode in [OutputMode::Immediate, OutputMode::Deferred] {
        for context in [1000, 10_000] {
            for n_requests in [16, 256, 1024, 4096] {
                for is_caching in [false, true] {
                    let shape = Shape { n_requests, context, is_caching, output_mode };
                    measure(criterion, "step", shape, |[plan, apply]| plan + apply);
                }
            }
        }
    }
}

/// How a step is divided.
fn parts(criterion: &mut Criterion) {
    for output_mode in [OutputMode::Immediate, OutputMode::Deferred] {
        for is_caching in [false, true] {
            let shape = Shape { n_requests: 1024, context: 1000, is_caching, output_mode };
            measure(criterion, "plan", shape, |[plan, _]| plan);
            measure(criterion, "apply", shape, |[_, apply]| apply);
        }
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_secs(1))
        .measurement_time(Duration::from_secs(2));
    targets = step, parts
}
criterion_main!(benches);

//! Random commands, steps, failures and ends in any order.
//!
//! Whatever happens, each request ends once, with what its text says up to its first end, or a
//! beginning of that where something else ended it. `PROPTEST_CASES` is the number of runs and
//! `PROPTEST_RNG_SEED` their seed.

use std::collections::HashMap;

use engine_types::{
    ExecutorLimits, FinishReason, OutputMode, Request, RequestEvent, RequestId, SamplingParams,
    TokenId,
};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{Config, RngSeed, TestRunner};
use scheduler::{DraftPolicy, SchedulerConfig, SchedulingPolicy};

use crate::rig::{EOS, Rig, config, limits, params, request};

/// A stop id of every request.
const STOP: TokenId = 7;

/// A command or a step. Numbers are taken modulo what there is to choose from.
#[derive(Clone, Debug)]
enum Op {
    Submit(Ask),
    Plan,
    Collect,
    Fail,
    Abort(usize),
    Expire(usize),
    ClearCache,
}

/// A request whose prompt begins with `n_like` tokens of an earlier one's text.
#[derive(Clone, Debug)]
struct Ask {
    like: usize,
    n_like: usize,
    tail: Vec<TokenId>,
    output: Vec<TokenId>,
    max_tokens: u32,
    k: Option<u32>,
    salt: Option<u8>,
    priority: i32,
    n_siblings: u64,
    stop_sequences: Vec<Vec<TokenId>>,
}

/// Sizes at which something happens in every run.
#[derive(Clone, Debug)]
struct Setup {
    limits: ExecutorLimits,
    config: SchedulerConfig,
    n_right: u32,
}

fn asks() -> impl Strategy<Value = Ask> {
    let text = (any::<usize>(), 0..12_usize, vec(0..6_u32, 1..9), vec(0..9_u32, 0..12));
    let how = (1..16_u32, proptest::option::of(0..9_u32), proptest::option::of(0..2_u8));
    let who = (-2..3_i32, prop_oneof![4 => Just(0), 1 => 1..3_u64]);
    (text, how, who, vec(vec(0..9_u32, 1..4), 0..2)).prop_map(
        |((like, n_like, tail, output), (max_tokens, k, salt), (priority, n_siblings), stops)| {
            Ask {
                like,
                n_like,
                tail,
                output,
                max_tokens,
                k,
                salt,
                priority,
                n_siblings,
                stop_sequences: stops,
            }
        },
    )
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let op = prop_oneof![
        4 => asks().prop_map(Op::Submit),
        12 => Just(Op::Plan),
        12 => Just(Op::Collect),
        1 => Just(Op::Fail),
        1 => any::<usize>().prop_map(Op::Abort),
        1 => any::<usize>().prop_map(Op::Expire),
        1 => Just(Op::ClearCache),
    ];
    vec(op, 1..120)
}

fn setups() -> impl Strategy<Value = Setup> {
    let pool = (1..6_u32, 4..20_u32, 12..48_u32);
    let batch = (1..6_u32, 6..40_u32, 1..8_u32, 0..12_u32);
    let drafts = (0..9_u32, 0..9_u32, 1..3_u32);
    let policies = (any::<bool>(), proptest::option::of(1..9_u32));
    let modes = (any::<bool>(), any::<bool>(), policies);
    (pool, batch, drafts, modes).prop_map(|(pool, batch, (k, n_right, n_lookahead_max), modes)| {
        let (is_deferred, enable_prefix_caching, (is_adaptive, aging_steps)) = modes;
        let (max_num_seqs, max_num_batched_tokens, chunk_alignment, threshold) = batch;
        let mode = if is_deferred { OutputMode::Deferred } else { OutputMode::Immediate };
        let policy = aging_steps.map_or(SchedulingPolicy::Fcfs, |aging_steps| {
            SchedulingPolicy::Priority { aging_steps }
        });
        Setup {
            limits: ExecutorLimits {
                max_model_len: pool.2,
                max_num_seqs,
                max_num_batched_tokens,
                n_lookahead_max,
                ..limits(pool.0, pool.1)
            },
            config: SchedulerConfig {
                policy,
                drafting: if is_adaptive { DraftPolicy::default() } else { DraftPolicy::Fixed },
                chunk_alignment,
                enable_prefix_caching,
                long_prefill_token_threshold: if threshold < pool.0 { 0 } else { threshold },
                max_queued_requests: 6,
                ..config(mode, k)
            },
            n_right,
        }
    })
}

/// The requests that were accepted, by id.
struct Machine {
    rig: Rig,
    setup: Setup,
    requests: Vec<(Request, Vec<TokenId>)>,
}

impl Machine {
    fn new(setup: Setup) -> Self {
        let rig = Rig::new(setup.config.clone(), setup.limits).with_right_drafts(setup.n_right);
        Self { rig, setup, requests: vec![] }
    }

    fn run(&mut self, op: &Op) {
        let is_in_flight = self.rig.scheduler.n_in_flight() > 0;
        match op {
            Op::Submit(ask) => self.submit(ask),
            Op::Plan if !self.rig.is_full() => drop(self.rig.plan()),
            Op::Collect if is_in_flight => drop(self.rig.collect()),
            Op::Fail if is_in_flight => self.rig.fail(),
            Op::Abort(who) => self.end(*who, |rig, id| rig.scheduler.abort(id, &mut rig.events)),
            Op::Expire(who) => self.end(*who, |rig, id| rig.scheduler.expire(id, &mut rig.events)),
            Op::ClearCache => self.rig.scheduler.clear_prefix_cache(),
            Op::Plan | Op::Collect | Op::Fail => {}
        }
        self.rig.scheduler.check_invariants();
    }

    fn end(&mut self, who: usize, end: impl FnOnce(&mut Rig, RequestId) -> bool) {
        if self.requests.is_empty() {
            return;
        }
        let id = self.requests[who % self.requests.len()].0.id;
        let was_unfinished = self.rig.end(id.0).is_none();
        assert_eq!(end(&mut self.rig, id), was_unfinished);
    }

    fn submit(&mut self, ask: &Ask) {
        let n_before = self.requests.len() as u64;
        let like = self.requests.get(ask.like % self.requests.len().max(1));
        let like = like.map_or(vec![], |(request, output)| [&request.prompt[..], output].concat());
        let prompt = [&like[..like.len().min(ask.n_like)], &ask.tail].concat();
        let max_k = self.setup.config.num_speculative_tokens;
        let params = SamplingParams {
            stop_token_ids: vec![STOP],
            stop_sequences: ask.stop_sequences.clone(),
            num_speculative_tokens: ask.k.filter(|k| *k <= max_k),
            ..params(ask.max_tokens)
        };
        let request = Request {
            cache_salt: ask.salt.map(|salt| vec![salt]),
            priority: ask.priority,
            siblings: (1..=ask.n_siblings).map(|n| RequestId(n_before + n)).collect(),
            ..request(n_before, &prompt, params)
        };
        if self.rig.submit_request(request.clone(), &ask.output).is_ok() {
            for n in 0..=ask.n_siblings {
                let request = Request { id: RequestId(n_before + n), ..request.clone() };
                self.requests.push((request, ask.output.clone()));
            }
        }
    }

    /// What a request is to stream and how it ends, if nothing else ends it.
    fn expected(&self, request: &Request, output: &[TokenId]) -> (Vec<TokenId>, FinishReason) {
        let n_prompt = request.prompt.len();
        let mut tokens = vec![];
        loop {
            let position = n_prompt + tokens.len();
            let token = output.get(tokens.len()).copied().unwrap_or(1000 + position as u32);
            tokens.push(token);
            let is_stop = |stop: &Vec<TokenId>| tokens.ends_with(stop);
            let reason = if token == EOS {
                FinishReason::Eos(EOS)
            } else if token == STOP {
                FinishReason::StopToken(STOP)
            } else if let Some(idx) = request.params.stop_sequences.iter().position(is_stop) {
                FinishReason::StopSequence(idx)
            } else if tokens.len() == request.params.max_tokens as usize {
                FinishReason::MaxTokens
            } else if position + 1 == self.setup.limits.max_model_len as usize {
                FinishReason::ModelLength
            } else {
                continue;
            };
            return (tokens, reason);
        }
    }

    /// Runs everything to its end and checks what became of it.
    fn finish(&mut self) {
        while self.rig.is_full() {
            self.rig.collect();
        }
        self.rig.drain();
        let mut n_last: HashMap<RequestId, usize> = HashMap::new();
        for (idx, event) in self.rig.events.iter().enumerate() {
            let id = event.request_id();
            assert!(!n_last.contains_key(&id), "{id}: an event behind the last one");
            if let RequestEvent::Finished { .. } = event {
                n_last.insert(id, idx);
            }
        }
        let pool_tokens = self.setup.limits.num_blocks * self.setup.limits.block_size;
        let mut n_streamed = 0;
        for (request, output) in &self.requests {
            let id = request.id;
            let (found, reason) = (self.rig.tokens(id.0), self.rig.reason(id.0));
            let reason = reason.unwrap_or_else(|| panic!("{id} has not ended"));
            let (expected, end) = self.expected(request, output);
            n_streamed += found.len();
            match reason {
                FinishReason::Aborted
                | FinishReason::DeadlineExceeded
                | FinishReason::Failed(_) => {
                    assert!(found.len() < expected.len(), "{id} had ended: {reason:?}");
                    assert_eq!(found, expected[..found.len()], "{id}");
                }
                FinishReason::OutOfBlocks => {
                    assert_eq!(found, expected[..found.len()], "{id}");
                    let n_tokens = request.prompt.len() + found.len();
                    assert!(n_tokens > pool_tokens as usize, "{id} had room: {n_tokens} tokens");
                }
                _ => assert_eq!((found, reason), (expected, end), "{id}"),
            }
        }
        let stats = self.rig.stats();
        assert_eq!(stats.n_finished as usize, self.requests.len());
        assert_eq!(stats.n_generated_tokens as usize, n_streamed);
        let blocks = stats.blocks;
        assert_eq!((blocks.n_used, blocks.n_free + blocks.n_cached), (0, blocks.n_total));
        assert!(self.rig.scheduler.is_idle());
    }
}

fn fixed_seed() -> Config {
    let default = Config { failure_persistence: None, ..Config::default() };
    match default.rng_seed {
        RngSeed::Random => Config { rng_seed: RngSeed::Fixed(1), ..default },
        RngSeed::Fixed(_) => default,
    }
}

proptest! {
    #![proptest_config(fixed_seed())]

    #[test]
    fn each_request_ends_once_with_its_text(setup in setups(), ops in ops()) {
        let mut machine = Machine::new(setup);
        ops.iter().for_each(|op| machine.run(op));
        machine.finish();
    }
}

/// Otherwise the property above could hold of runs in which nothing happens.
#[test]
fn the_random_runs_preempt_share_and_find() {
    let mut runner = TestRunner::new(fixed_seed());
    let mut counts = [0; 6];
    for _ in 0..200 {
        let (setup, ops) =
            (setups(), ops()).new_tree(&mut runner).expect("none is rejected").current();
        let mut machine = Machine::new(setup);
        ops.iter().for_each(|op| machine.run(op));
        machine.finish();
        let stats = machine.rig.stats();
        let is_out = |event: &&RequestEvent| {
            let RequestEvent::Finished { reason, .. } = event else { return false };
            *reason == FinishReason::OutOfBlocks
        };
        let n_out_of_blocks = machine.rig.events.iter().filter(is_out).count() as u64;
        let found = [
            stats.n_preemptions,
            stats.n_prefix_hit_tokens,
            stats.n_shared_tokens,
            stats.spec_decode.n_accepted_tokens,
            stats.blocks.n_evictions,
            n_out_of_blocks,
        ];
        counts.iter_mut().zip(found).for_each(|(sum, n)| *sum += n);
    }
    assert!(counts.iter().all(|count| *count > 20), "{counts:?}");
}

//! Workloads of a seed.

use engine_types::{
    BoxedGuide, BoxedStopTexts, ExecutorLimits, OutputMode, Request, RequestId, SamplingParams,
    TokenId,
};
use scheduler::{DraftPolicy, SchedulerConfig, SchedulingPolicy};

use crate::guide::{HashGrammar, Words};
use crate::model::{Drafter, Voice};
use crate::prompts::{Texts, longest, token};
use crate::rng::Rng;

/// When within a step something comes from outside; in the order in which a step has them. Where a
/// step lacks one, what is due comes at the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Moment {
    /// Before it is planned, with none or one in flight.
    Before,
    /// After it is planned and before it is launched.
    Planned,
    /// After it is launched, with one or two in flight.
    Launched,
    /// After a step is collected and before its outcome is applied.
    Collected,
}

/// What comes from outside.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Action {
    /// The request of this index.
    Submit(usize),
    Abort(RequestId),
    Expire(RequestId),
    ClearCache,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Command {
    pub(crate) due: (u64, Moment),
    pub(crate) action: Action,
}

/// All that a seed decides.
#[derive(Clone, Debug)]
pub(crate) struct Workload {
    pub(crate) config: SchedulerConfig,
    pub(crate) limits: ExecutorLimits,
    pub(crate) requests: Vec<Request>,
    /// In the order in which they are due.
    pub(crate) commands: Vec<Command>,
    pub(crate) drafter: Drafter,
    /// How often a step fails, and how often a row alone.
    pub(crate) failure_percents: (u32, u32),
    pub(crate) has_mirror: bool,
    /// How often a step in flight is collected before the next one is planned.
    pub(crate) early_percent: u32,
}

impl Workload {
    pub(crate) fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let limits = limits(&mut rng);
        let config = config(&mut rng, &limits);
        let drafter = Drafter {
            accuracy_percent: rng.pick(&[0, 30, 60, 90, 100]),
            vocab_size: limits.vocab_size,
        };
        let texts = Texts::new(&mut rng, limits, drafter);
        let mut requests = vec![];
        let mut commands = vec![];
        for idx in 0..rng.between(1, 24) {
            let request = request(&mut rng, idx, &config, &texts, &limits);
            add_commands(&mut rng, requests.len(), &request, &mut commands);
            requests.push(request);
        }
        for _ in 0..rng.pick(&[0, 0, 1, 3]) {
            let due = (u64::from(rng.between(0, 60)), moment(&mut rng));
            commands.push(Command { due, action: Action::ClearCache });
        }
        commands.sort_by_key(|command| command.due);
        Self {
            config,
            limits,
            requests,
            commands,
            drafter,
            failure_percents: rng.pick(&[(0, 0), (0, 0), (0, 1), (1, 0), (5, 1)]),
            has_mirror: rng.chance(50),
            early_percent: rng.pick(&[0, 0, 10, 50]),
        }
    }
}

fn limits(rng: &mut Rng) -> ExecutorLimits {
    ExecutorLimits {
        block_size: rng.pick(&[1, 2, 3, 4, 4, 8, 16, 64]),
        num_blocks: if rng.chance(50) { rng.between(4, 12) } else { rng.between(12, 96) },
        max_model_len: rng.between(8, 200),
        max_num_seqs: rng.between(1, 12),
        max_num_batched_tokens: rng.pick(&[1, 5, 16, 64, 70, 130, 200, 512]),
        max_num_speculative_tokens: rng.between(0, 8),
        n_lookahead_max: rng.between(1, 3),
        vocab_size: rng.between(3, 60),
    }
}

fn config(rng: &mut Rng, limits: &ExecutorLimits) -> SchedulerConfig {
    let output_mode = rng.pick(&[OutputMode::Immediate, OutputMode::Deferred]);
    let aging_steps = rng.pick(&[1, 10, 1000]);
    SchedulerConfig {
        max_num_seqs: rng.between(1, 12),
        max_num_batched_tokens: 256,
        max_queued_requests: rng.between(0, 16),
        policy: rng.pick(&[SchedulingPolicy::Fcfs, SchedulingPolicy::Priority { aging_steps }]),
        long_prefill_token_threshold: if rng.chance(30) {
            rng.between(limits.block_size, 100.max(limits.block_size))
        } else {
            0
        },
        chunk_alignment: rng.pick(&[1, 4, 64, 64]),
        output_mode,
        num_speculative_tokens: rng.between(0, limits.max_num_speculative_tokens),
        drafting: if rng.chance(50) { DraftPolicy::Fixed } else { DraftPolicy::default() },
        eos_token_ids: (0..rng.between(0, 2)).map(|_| token(rng, limits)).collect(),
        enable_prefix_caching: rng.chance(75),
    }
}

fn request(
    rng: &mut Rng,
    idx: u32,
    config: &SchedulerConfig,
    texts: &Texts,
    limits: &ExecutorLimits,
) -> Request {
    // A few prompts are too long for the model or the pool.
    let longest = longest(limits);
    let n_prompt = match rng.between(0, 9) {
        0 => rng.between(1, longest + 2),
        1..=4 if texts.n_short > 2 => rng.between(1, longest / 2),
        _ => rng.between(1, texts.n_short),
    };
    let n_stop_ids = if rng.chance(20) { rng.between(1, 2) } else { 0 };
    let k = config.num_speculative_tokens;
    let max_tokens = rng.between(1, 60);
    let params = SamplingParams {
        max_tokens,
        min_tokens: if rng.chance(20) { rng.between(0, max_tokens) } else { 0 },
        ignore_eos: rng.chance(40),
        stop_token_ids: (0..n_stop_ids).map(|_| token(rng, limits)).collect(),
        stop_sequences: if rng.chance(30) { words(rng, limits) } else { vec![] },
        num_speculative_tokens: rng.chance(30).then(|| rng.between(0, k)),
        ..SamplingParams::default()
    };
    let id = |n| RequestId(u64::from(Voice::N * idx + n));
    let n_siblings = if rng.chance(25) { rng.between(1, 4) } else { 0 };
    let mut siblings: Vec<_> = (1..=n_siblings).map(id).collect();
    if rng.chance(2) {
        siblings.push(id(rng.between(0, 1)));
    }
    Request {
        id: id(0),
        prompt: texts.prompt(rng, n_prompt),
        params,
        cache_salt: rng.chance(25).then(|| vec![1; rng.pick(&[1, 2])]),
        priority: [-3, 0, 0, 1, 7][rng.between(0, 4) as usize],
        guide: rng
            .chance(12)
            .then(|| BoxedGuide(Box::new(HashGrammar::new(rng.next_u64(), limits.vocab_size)))),
        stop_texts: rng.chance(12).then(|| {
            let words = words(rng, limits);
            BoxedStopTexts(Box::new(Words { words, seen: vec![] }))
        }),
        siblings,
    }
}

/// One or two short sequences.
fn words(rng: &mut Rng, limits: &ExecutorLimits) -> Vec<Vec<TokenId>> {
    let n_words = rng.between(1, 2);
    let mut word = || (0..rng.between(1, 3)).map(|_| token(rng, limits)).collect();
    (0..n_words).map(|_| word()).collect()
}

/// When a request comes, and whether somebody ends it or its siblings.
fn add_commands(rng: &mut Rng, idx: usize, request: &Request, commands: &mut Vec<Command>) {
    let step = u64::from(rng.between(0, 40));
    commands.push(Command { due: (step, moment(rng)), action: Action::Submit(idx) });
    for id in std::iter::once(&request.id).chain(&request.siblings) {
        if rng.chance(15) {
            let due = (step + u64::from(rng.between(0, 30)), moment(rng));
            let action = if rng.chance(50) { Action::Abort(*id) } else { Action::Expire(*id) };
            commands.push(Command { due, action });
        }
    }
}

fn moment(rng: &mut Rng) -> Moment {
    rng.pick(&[Moment::Before, Moment::Planned, Moment::Launched, Moment::Collected])
}

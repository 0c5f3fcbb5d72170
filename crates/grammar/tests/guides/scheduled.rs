//! Guides under a scheduler, around a scripted executor that drafts rightly and wrongly.

use std::collections::VecDeque;

use engine_types::{
    BoxedGuide, ExecutorLimits, FinishReason, Guide, OutputMode, PlanRow, Request, RequestEvent,
    RequestId, SamplingParams, StepOutcome, StepPlan, StepQueue, TokenId,
};
use grammar::Constraint;
use scheduler::{DraftPolicy, Scheduler, SchedulerConfig};
use serde_json::Value;

use crate::{EOS, Random, allows, guide, ids, json, lark, regex, tokenizer};

const PROMPT: [TokenId; 3] = [0, 100, 101];

/// What the target likes best at each position of the output, and what is drafted there. The next
/// best of what a mask forbids are the ids behind it.
#[derive(Clone, Default)]
struct Script {
    likes: Vec<TokenId>,
    drafts: Vec<TokenId>,
}

impl Script {
    /// A target that likes anything.
    fn random(seed: u64, n_tokens: usize) -> Self {
        let mut random = Random(seed);
        let mut some = || (0..n_tokens + 8).map(|_| random.below(4096) as TokenId).collect();
        Self { likes: some(), drafts: some() }
    }

    /// The token at `position` of the output, where `mask` says what may be chosen.
    fn choice(&self, position: usize, mask: &[u32]) -> TokenId {
        let n_ids = tokenizer().n_ids();
        let like = self.likes[position];
        let mut order = (0..n_ids).map(|idx| (like + idx) % n_ids);
        order.find(|id| allows(mask, *id)).expect("a token that may be chosen")
    }
}

struct Ran {
    tokens: Vec<TokenId>,
    reason: FinishReason,
    n_accepted: u32,
    n_steps: u32,
}

fn answer(script: &Script, plan: &StepPlan, row: &PlanRow, outcome: &mut StepOutcome) {
    if !row.samples {
        return outcome.push_row(row.request_id, &[], 0, &[]);
    }
    let start = (row.n_computed + row.n_query - row.n_draft) as usize - PROMPT.len();
    let (masks, drafts) = (plan.masks(row), plan.drafts(row));
    let n_words = masks.len() / (drafts.len() + 1);
    assert_eq!(n_words, tokenizer().n_ids() as usize / 32);
    if masks.chunks_exact(n_words).any(|mask| mask.iter().all(|word| *word == 0)) {
        return outcome.push_failed_row(row.request_id, "no token may be chosen".to_owned());
    }
    let choices: Vec<TokenId> = masks
        .chunks_exact(n_words)
        .enumerate()
        .map(|(idx, mask)| script.choice(start + idx, mask))
        .collect();
    let n_accepted = drafts.iter().zip(&choices).take_while(|(draft, like)| draft == like).count();
    let next = start + n_accepted + 1;
    let proposals = &script.drafts[next..next + row.n_propose as usize];
    outcome.push_row(row.request_id, &choices[..=n_accepted], n_accepted as u32, proposals);
}

fn run(constraint: &Constraint, script: &Script, max_tokens: u32, mode: (OutputMode, u32)) -> Ran {
    run_guided(guide(constraint), script, max_tokens, mode)
}

fn run_guided(
    guide: Box<dyn Guide>,
    script: &Script,
    max_tokens: u32,
    (output_mode, k): (OutputMode, u32),
) -> Ran {
    let limits = ExecutorLimits {
        block_size: 4,
        num_blocks: 64,
        max_model_len: 200,
        max_num_seqs: 2,
        max_num_batched_tokens: 64,
        max_num_speculative_tokens: 4,
        n_lookahead_max: 1,
        vocab_size: tokenizer().n_ids(),
    };
    let config = SchedulerConfig {
        output_mode,
        num_speculative_tokens: k,
        drafting: DraftPolicy::Fixed,
        eos_token_ids: vec![EOS],
        ..SchedulerConfig::default()
    };
    let params = SamplingParams { max_tokens, ..SamplingParams::default() };
    let mut request = Request::new(RequestId(1), PROMPT.to_vec(), params);
    request.guide = Some(BoxedGuide(guide));
    let mut scheduler = Scheduler::new(config, limits).expect("a valid configuration");
    scheduler.submit(request).expect("the request can be served");

    let n_in_flight_max = if output_mode == OutputMode::Immediate { 1 } else { 2 };
    let (mut queue, mut in_flight) = (StepQueue::default(), VecDeque::new());
    let (mut plan, mut outcome, mut events) = (StepPlan::default(), StepOutcome::default(), vec![]);
    let mut n_steps = 0;
    loop {
        let has_work = scheduler.plan(&mut plan, &mut events);
        if has_work {
            n_steps += 1;
            queue.launch(&plan);
            in_flight.push_back(plan.clone());
        }
        if in_flight.is_empty() {
            break;
        }
        if !has_work || in_flight.len() == n_in_flight_max {
            let answered = queue.collect(&mut outcome, |plan, outcome| {
                for row in plan.rows() {
                    answer(script, plan, row, outcome);
                }
                Ok(())
            });
            answered.expect("the step succeeds");
            let collected = in_flight.pop_front().expect("a step in flight");
            scheduler.apply(&collected, &outcome, &mut events);
            scheduler.check_invariants();
        }
    }
    told(&events, n_steps)
}

fn told(events: &[RequestEvent], n_steps: u32) -> Ran {
    let mut ran = Ran { tokens: vec![], reason: FinishReason::Aborted, n_accepted: 0, n_steps };
    for event in events {
        match event {
            RequestEvent::Tokens(event) => {
                ran.tokens.extend_from_slice(&event.tokens);
                ran.n_accepted += event.n_accepted;
            }
            RequestEvent::Finished { reason, .. } => ran.reason = reason.clone(),
            _ => {}
        }
    }
    ran
}

/// Runs without drafts, then in all modes with drafts of which some are right: the same tokens.
fn check(constraint: &Constraint, seed: u64, max_tokens: u32) -> Ran {
    let mut script = Script::random(seed, max_tokens as usize);
    let plain = run(constraint, &script, max_tokens, (OutputMode::Immediate, 0));
    let mut walked = guide(constraint);
    for token in &plain.tokens {
        assert!(walked.accept(*token), "{token} is allowed");
    }
    let is_end = matches!(plain.reason, FinishReason::GrammarComplete | FinishReason::Eos(_));
    assert_eq!(is_end, walked.is_complete());
    assert!(is_end || plain.reason == FinishReason::MaxTokens, "{:?}", plain.reason);
    // Every third draft stays what it was, which is nearly always wrong or forbidden.
    for (idx, token) in plain.tokens.iter().enumerate() {
        if idx % 3 != 2 {
            script.drafts[idx] = *token;
        }
    }
    for mode in [OutputMode::Immediate, OutputMode::Deferred] {
        for k in [0, 3] {
            let ran = run(constraint, &script, max_tokens, (mode, k));
            assert_eq!(ran.tokens, plain.tokens, "{mode:?}, k = {k}");
            assert_eq!(ran.reason, plain.reason, "{mode:?}, k = {k}");
            assert_eq!(ran.n_accepted > 0, k > 0 && plain.tokens.len() > 2, "{mode:?}, k = {k}");
            assert!(k == 0 || plain.tokens.len() < 4 || ran.n_steps < plain.n_steps);
        }
    }
    plain
}

#[test]
fn outputs_are_the_same_with_wrong_and_right_drafts() {
    let schema = r#"{"type": "object", "properties": {
        "a": {"type": "string", "maxLength": 6}, "b": {"type": "boolean"}},
        "required": ["a", "b"], "additionalProperties": false}"#;
    let mut n_ended = 0;
    for seed in 0..6 {
        let ran = check(&json(schema), seed, 60);
        if ran.reason != FinishReason::MaxTokens {
            n_ended += 1;
            let text = tokenizer().decode(&ran.tokens, true);
            let value: Value = serde_json::from_str(&text).unwrap();
            assert!(value["b"].is_boolean(), "{text}");
        }
        let ran = check(&regex("(foo|bar|quux){2,4}!"), seed, 60);
        assert_eq!(ran.reason, FinishReason::GrammarComplete);
    }
    assert!(n_ended > 0);
}

#[test]
fn an_output_that_is_cut_says_so() {
    let ran = check(&regex("[a-z]{30,40}"), 7, 5);
    assert_eq!((ran.tokens.len(), ran.reason), (5, FinishReason::MaxTokens));
}

#[test]
fn an_end_of_sequence_id_ends_an_output_that_could_go_on() {
    let wishes = [&ids("go")[..], &[EOS]].concat();
    let script = Script { likes: [&wishes[..], &[0; 8]].concat(), drafts: vec![EOS; 16] };
    for mode in [OutputMode::Immediate, OutputMode::Deferred] {
        for k in [0, 3] {
            let ran = run(&regex("(go|stop)+"), &script, 20, (mode, k));
            assert_eq!((ran.tokens, ran.reason), (wishes.clone(), FinishReason::Eos(EOS)));
        }
    }
}

/// A constraint that begins behind a marker, which itself is a draft of the same window.
#[test]
fn a_constraint_may_begin_within_a_window() {
    let grammar = lark("start: other* <[9]> <[3]>\nother: <[0-8,10-4095]>");
    let script = Script {
        likes: vec![8, 8, 9, 5, 6, 6, 6, 6, 6, 6, 6, 6],
        drafts: vec![8, 8, 9, 5, 5, 5, 5, 5, 5, 5, 5, 5],
    };
    for mode in [OutputMode::Immediate, OutputMode::Deferred] {
        for k in [0, 3] {
            let ran = run(&grammar, &script, 20, (mode, k));
            let expected = (vec![8, 8, 9, 3], FinishReason::GrammarComplete);
            assert_eq!((ran.tokens, ran.reason), expected, "{mode:?}, k = {k}");
        }
    }
}

/// A guide whose parser gives up at a mask, as one does that has spent all that it may.
#[derive(Debug)]
struct Fragile {
    guide: Box<dyn Guide>,
    n_masks_left: u32,
}

impl Guide for Fragile {
    fn clone_guide(&self) -> Box<dyn Guide> {
        Box::new(Self { guide: self.guide.clone_guide(), n_masks_left: self.n_masks_left })
    }

    fn fill_mask(&mut self, mask: &mut [u32]) {
        self.n_masks_left = self.n_masks_left.saturating_sub(1);
        match self.n_masks_left {
            0 => mask.fill(0),
            _ => self.guide.fill_mask(mask),
        }
    }

    fn accept(&mut self, token: TokenId) -> bool {
        self.n_masks_left > 0 && self.guide.accept(token)
    }

    fn go_back(&mut self, n_tokens: usize) {
        self.guide.go_back(n_tokens);
    }

    fn is_complete(&mut self) -> bool {
        self.guide.is_complete()
    }

    fn failure(&self) -> Option<String> {
        (self.n_masks_left == 0).then(|| "all is spent".to_owned())
    }
}

#[test]
fn a_guide_that_gives_up_within_a_window_ends_its_request_alone() {
    let script = Script { likes: ids("aaaa").repeat(40), drafts: ids("aaaa").repeat(40) };
    for mode in [OutputMode::Immediate, OutputMode::Deferred] {
        for n_masks_left in 2..7 {
            let guide = Box::new(Fragile { guide: guide(&regex("a{1,60}")), n_masks_left });
            let ran = run_guided(guide, &script, 30, (mode, 3));
            assert_eq!(ran.reason, FinishReason::Failed("all is spent".to_owned()));
            assert!((ran.tokens.len() as u32) < n_masks_left);
        }
    }
}

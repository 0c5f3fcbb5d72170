//! Deferred output: each step is planned and launched before the tokens of the step before it have
//! come. Texts, drafts and acceptance are those of the reference and of immediate output.
//!
//! The KV of all engines starts as NaN, so that a read of a slot that nobody wrote shows.

use std::time::{Duration, Instant};

use engine::EngineStats;
use engine_types::{FinishReason, OutputMode, SamplingParams, TokenId};
use integration_tests::harness::{self, Generation};
use integration_tests::oracle::{Case, Checkpoint};
use integration_tests::recorder::StepRecord;
use model_runner::{IndexCacheDtype, KvInit, RunnerOptions};
use models::ComputeDtype;
use scheduler::SchedulerConfig;

use crate::oracle_tokens::{check_drafts, check_text, requests};

/// Pools of some thousand tokens, which are quickly filled with NaN.
fn options(num_speculative_tokens: u32) -> RunnerOptions {
    RunnerOptions {
        num_speculative_tokens,
        kv_init: KvInit::Nan,
        kv_cache_bytes: 16 << 20,
        ..RunnerOptions::default()
    }
}

/// Both modes, the deferred one last.
const MODES: [OutputMode; 2] = [OutputMode::Immediate, OutputMode::Deferred];

/// What an engine is to do and how.
struct Setting {
    checkpoint: Checkpoint,
    options: RunnerOptions,
    scheduler: SchedulerConfig,
}

impl Setting {
    fn new(checkpoint: Checkpoint, options: RunnerOptions) -> Self {
        let output_mode = OutputMode::Deferred;
        let scheduler = harness::scheduler_config(checkpoint, &options).unwrap();
        Self { checkpoint, options, scheduler: SchedulerConfig { output_mode, ..scheduler } }
    }

    /// Runs rounds of requests, each round at once, and returns what became of them, the steps and
    /// the statistics. In the end nothing is left.
    fn run<'a>(
        &self,
        rounds: impl IntoIterator<Item = Vec<(&'a [TokenId], SamplingParams)>>,
    ) -> (Vec<Vec<Generation>>, Vec<StepRecord>, EngineStats) {
        let Self { checkpoint, options, scheduler } = self;
        let dtype = ComputeDtype::Float32;
        let (engine, thread, records) =
            harness::start_scheduled(*checkpoint, options, scheduler.clone(), dtype).unwrap();
        let rounds = rounds.into_iter();
        let done = rounds.map(|round| harness::generate(&engine, round).unwrap()).collect();
        thread.drain();
        let (steps, stats) = (records.take(), engine.stats());
        assert_eq!((stats.n_failed_steps, stats.n_unfinished), (0, 0), "{options:?}");
        assert_eq!(stats.scheduler.blocks.n_used, 0, "{options:?}");
        let n_deferred: usize = steps.iter().map(|step| step.n_deferred).sum();
        let is_deferred = scheduler.output_mode == OutputMode::Deferred;
        assert_eq!(n_deferred > 0, is_deferred, "{options:?}: {n_deferred} rows in flight");
        (done, steps, stats)
    }

    /// Runs all cases, `n_rounds` times, and compares them with the reference.
    fn check(&self, n_rounds: usize) -> EngineStats {
        let cases = self.checkpoint.cases().unwrap();
        let rounds = (0..n_rounds).map(|_| requests(&cases).collect());
        let (rounds, _, stats) = self.run(rounds);
        let drafting = (self.options.num_speculative_tokens, self.options.index_share);
        for (case, found) in rounds.iter().flat_map(|round| cases.iter().zip(round)) {
            check_text(case, found, &format!("{:?}", self.options));
            check_drafts(case, found, drafting);
        }
        assert_eq!(stats.scheduler.n_preemptions, 0);
        stats
    }
}

on_both!(every_number_of_drafts_gives_the_reference_tokens);

fn every_number_of_drafts_gives_the_reference_tokens(checkpoint: Checkpoint) {
    for &index_share in checkpoint.index_shares() {
        for k in [0, 1, 3, 8] {
            let options = RunnerOptions { index_share, ..options(k) };
            Setting::new(checkpoint, options).check(1);
        }
    }
    if checkpoint == Checkpoint::TinyGlm52 {
        let index_cache_dtype = IndexCacheDtype::Fp8;
        let options = RunnerOptions { index_cache_dtype, ..options(3) };
        let cases = checkpoint.cases().unwrap();
        let [immediate, deferred] = MODES.map(|output_mode| {
            let mut setting = Setting::new(checkpoint, options.clone());
            setting.scheduler.output_mode = output_mode;
            setting.run([requests(&cases).collect()]).0
        });
        assert_eq!(deferred, immediate, "index keys in 8 bits");
    }
}

on_both!(chunks_of_64_change_nothing);

/// The threshold alone makes the chunks, so that the budget has room for every draft.
fn chunks_of_64_change_nothing(checkpoint: Checkpoint) {
    for k in [0, 1, 3] {
        let mut setting = Setting::new(checkpoint, options(k));
        setting.scheduler.long_prefill_token_threshold = 64;
        setting.check(1);
    }
}

on_both!(a_budget_too_small_for_all_gives_the_same_text);

/// Rows that find no room in the budget lose drafts or wait for the next step.
fn a_budget_too_small_for_all_gives_the_same_text(checkpoint: Checkpoint) {
    let cases = checkpoint.cases().unwrap();
    for (k, max_num_batched_tokens) in [(0, 16), (3, 16), (3, 64), (8, 16)] {
        let options = RunnerOptions { max_num_batched_tokens, ..options(k) };
        let (done, ..) =
            Setting::new(checkpoint, options.clone()).run([requests(&cases).collect()]);
        for (case, found) in cases.iter().zip(&done[0]) {
            check_text(case, found, &format!("{options:?}"));
        }
    }
}

on_both!(cases_served_from_the_cache_are_as_computed);

fn cases_served_from_the_cache_are_as_computed(checkpoint: Checkpoint) {
    for k in [0, 1, 3] {
        let mut setting = Setting::new(checkpoint, options(k));
        setting.scheduler.enable_prefix_caching = true;
        let stats = setting.check(2).scheduler;
        // Of 331 and 795 tokens 320 and 784 are whole blocks; short prompts add to it.
        assert!(stats.n_prefix_hit_tokens >= 320 + 784, "{stats:?}");
    }
}

on_both!(small_pools_preempt_and_give_the_same_text);

/// Each pool holds the longest case and little more, so that requests take each other's blocks
/// while steps are in flight.
fn small_pools_preempt_and_give_the_same_text(checkpoint: Checkpoint) {
    let cases = checkpoint.cases().unwrap();
    for (cases, num_blocks) in [(&cases[..12], 28), (&cases[..], 212)] {
        for (k, caching) in [(0, false), (1, true), (3, false), (3, true), (8, false)] {
            let num_blocks = Some(num_blocks);
            let options = RunnerOptions { num_blocks, block_size: 4, ..options(k) };
            let mut setting = Setting::new(checkpoint, options);
            setting.scheduler.enable_prefix_caching = caching;
            let rounds = (0..2).map(|_| requests(cases).collect());
            let (rounds, _, stats) = setting.run(rounds);
            for (case, found) in rounds.iter().flat_map(|round| cases.iter().zip(round)) {
                check_text(case, found, &format!("{:?}, caching: {caching}", setting.options));
            }
            assert!(stats.scheduler.n_preemptions > 0, "{:?}: {stats:?}", setting.options);
        }
    }
}

/// Where a text first ends with `stop`, and its length there.
fn first_end(text: &[TokenId], stop: &[TokenId]) -> usize {
    (stop.len()..=text.len()).find(|&end| text[..end].ends_with(stop)).expect("it is in the text")
}

/// Ends inside a case's text, by a token or two of it, at the beginning and further on.
fn ends_of(case: &Case) -> Vec<(SamplingParams, usize, FinishReason)> {
    let base = harness::params(case.max_tokens());
    let text = &case.greedy_ids;
    let mut ends = vec![];
    for start in [0, 1, 5, 11, 16].into_iter().filter(|start| start + 2 < text.len()) {
        let token = text[start];
        let params = SamplingParams { stop_token_ids: vec![token], ..base.clone() };
        ends.push((params, first_end(text, &[token]), FinishReason::StopToken(token)));
        let stop = text[start..start + 2].to_vec();
        let n_tokens = first_end(text, &stop);
        // The first never comes.
        let stop_sequences = vec![vec![7; 9], stop];
        let params = SamplingParams { stop_sequences, ..base.clone() };
        ends.push((params, n_tokens, FinishReason::StopSequence(1)));
        let params = SamplingParams { max_tokens: start as u32 + 1, ..base.clone() };
        ends.push((params, start + 1, FinishReason::MaxTokens));
    }
    ends
}

on_both!(ends_that_show_while_the_next_step_is_in_flight_cut_the_text_there);

/// The row that is in flight when a request ends adds nothing, and its blocks come home.
fn ends_that_show_while_the_next_step_is_in_flight_cut_the_text_there(checkpoint: Checkpoint) {
    let cases = &checkpoint.cases().unwrap()[..13];
    for k in [0, 1, 3] {
        let asked: Vec<_> = cases
            .iter()
            .flat_map(|case| ends_of(case).into_iter().map(move |end| (case, end)))
            .collect();
        let round = asked.iter().map(|(case, (params, ..))| (&case.prompt_ids[..], params.clone()));
        let round: Vec<_> = round.collect();
        let [immediate, deferred] = MODES.map(|output_mode| {
            // Room for all, so that none loses drafts.
            let options = RunnerOptions { kv_cache_bytes: 64 << 20, ..options(k) };
            let mut setting = Setting::new(checkpoint, options);
            setting.scheduler.output_mode = output_mode;
            let (mut done, _, stats) = setting.run([round.clone()]);
            assert_eq!(stats.scheduler.n_preemptions, 0);
            done.remove(0)
        });
        for ((case, (_, n_tokens, reason)), found) in asked.iter().zip(&deferred) {
            let place = format!("{} with {k} drafts, {reason:?}", case.name);
            assert_eq!(found.token_ids, case.greedy_ids[..*n_tokens], "{place}");
            assert_eq!(&found.finish_reason, reason, "{place}");
        }
        assert_eq!(deferred, immediate, "{k} drafts");
    }
}

on_both!(requests_of_one_batch_draft_as_each_asks);

fn requests_of_one_batch_draft_as_each_asks(checkpoint: Checkpoint) {
    let cases = checkpoint.cases().unwrap();
    let width = |idx: usize| [0, 1, 3, 8][idx % 4];
    let round: Vec<_> = requests(&cases)
        .enumerate()
        .map(|(idx, (prompt, params))| {
            (prompt, SamplingParams { num_speculative_tokens: Some(width(idx)), ..params })
        })
        .collect();
    let options = options(8);
    let (done, ..) = Setting::new(checkpoint, options.clone()).run([round]);
    for (idx, (case, found)) in cases.iter().zip(&done[0]).enumerate() {
        check_text(case, found, &format!("k={} of 8", width(idx)));
        check_drafts(case, found, (width(idx), options.index_share));
    }
}

on_both!(requests_that_leave_or_run_out_of_time_disturb_nobody);

fn requests_that_leave_or_run_out_of_time_disturb_nobody(checkpoint: Checkpoint) {
    let cases = checkpoint.cases().unwrap();
    let endless = || SamplingParams { ignore_eos: true, ..harness::params(2000) };
    for k in [0, 3] {
        let Setting { options, scheduler, .. } = Setting::new(checkpoint, options(k));
        let dtype = ComputeDtype::Float32;
        let (engine, thread, _) =
            harness::start_scheduled(checkpoint, &options, scheduler, dtype).unwrap();
        let submit = |(prompt, params)| harness::submit(&engine, prompt, params).unwrap();
        let mut leaving = submit((&cases[0].prompt_ids, endless()));
        let deadline = Instant::now() + Duration::from_millis(100);
        let expiring = [&cases[0], &cases[12]].map(|case| {
            harness::submit_until(&engine, &case.prompt_ids, endless(), deadline).unwrap()
        });
        let running: Vec<_> = requests(&cases).map(submit).collect();
        assert!(leaving.next().is_some(), "it has its first tokens");
        drop(leaving);
        for (case, events) in cases.iter().zip(running) {
            let found = harness::collect(events).unwrap();
            check_text(case, &found, &format!("{k} drafts"));
            check_drafts(case, &found, (k, options.index_share));
        }
        for events in expiring {
            let found = harness::collect(events).unwrap();
            assert_eq!(found.finish_reason, FinishReason::DeadlineExceeded);
            assert!(found.token_ids.len() < 2000);
        }
        thread.drain();
        let stats = engine.stats();
        assert_eq!((stats.n_failed_steps, stats.scheduler.blocks.n_used), (0, 0), "{stats:?}");
    }
}

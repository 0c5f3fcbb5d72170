//! Several continuations of one prompt (`n > 1`), which share the KV of the prompt, copy on write.
//! Decoding is greedy, so that each of them is the one that a request alone gets.
//!
//! The KV of all engines starts as NaN, so that a read of a slot that nobody wrote shows.

use engine::EngineStats;
use engine_types::{OutputMode, Usage};
use integration_tests::harness::{self, Generation};
use integration_tests::oracle::Checkpoint;
use integration_tests::recorder::StepRecord;
use model_runner::{IndexCacheDtype, KvInit, RunnerOptions};
use models::ComputeDtype;
use scheduler::SchedulerConfig;

use crate::oracle_tokens::{check_drafts, check_text, requests};

const N: usize = 3;

/// Room for all siblings at once.
fn options(num_speculative_tokens: u32) -> RunnerOptions {
    RunnerOptions {
        num_speculative_tokens,
        kv_init: KvInit::Nan,
        kv_cache_bytes: 32 << 20,
        ..RunnerOptions::default()
    }
}

/// Runs all cases at once, each `n` times, in an engine of their own.
fn run(
    checkpoint: Checkpoint,
    options: &RunnerOptions,
    (output_mode, enable_prefix_caching, n): (OutputMode, bool, usize),
) -> (Vec<Vec<Generation>>, Vec<StepRecord>, EngineStats) {
    let cases = checkpoint.cases().unwrap();
    let scheduler = harness::scheduler_config(checkpoint, options).unwrap();
    let scheduler = SchedulerConfig { output_mode, enable_prefix_caching, ..scheduler };
    let dtype = ComputeDtype::Float32;
    let (engine, thread, records) =
        harness::start_scheduled(checkpoint, options, scheduler, dtype).unwrap();
    let running: Vec<_> = requests(&cases)
        .map(|(prompt, params)| harness::submit_n(&engine, prompt, params, n).unwrap())
        .collect();
    let collect = |events: Vec<_>| events.into_iter().map(|e| harness::collect(e).unwrap());
    let done = running.into_iter().map(|events| collect(events).collect()).collect();
    thread.drain();
    let stats = engine.stats();
    assert_eq!((stats.n_failed_steps, stats.scheduler.blocks.n_used), (0, 0), "{options:?}");
    (done, records.take(), stats)
}

on_both!(siblings_get_what_a_request_alone_gets);

fn siblings_get_what_a_request_alone_gets(checkpoint: Checkpoint) {
    let cases = checkpoint.cases().unwrap();
    let keys = match checkpoint {
        Checkpoint::TinyDsv3 => &[IndexCacheDtype::Auto][..],
        Checkpoint::TinyGlm52 => &[IndexCacheDtype::Auto, IndexCacheDtype::Fp8],
    };
    for (k, &index_cache_dtype) in [0, 1, 3].iter().flat_map(|k| keys.iter().map(move |d| (*k, d)))
    {
        let options = RunnerOptions { index_cache_dtype, ..options(k) };
        let (alone, ..) = run(checkpoint, &options, (OutputMode::Immediate, false, 1));
        for (output_mode, caching) in [
            (OutputMode::Immediate, false),
            (OutputMode::Immediate, true),
            (OutputMode::Deferred, false),
            (OutputMode::Deferred, true),
        ] {
            let (done, steps, stats) = run(checkpoint, &options, (output_mode, caching, N));
            for ((case, alone), siblings) in cases.iter().zip(&alone).zip(&done) {
                let place = format!("{}, k={k}, {output_mode:?}, caching: {caching}", case.name);
                assert_eq!(siblings.len(), N, "{place}");
                for found in siblings {
                    let usage = Usage { cached_tokens: 0, ..found.usage };
                    assert_eq!(Generation { usage, ..found.clone() }, alone[0], "{place}");
                }
                if index_cache_dtype == IndexCacheDtype::Auto {
                    check_text(case, &siblings[N - 1], &place);
                    check_drafts(case, &siblings[N - 1], (k, options.index_share));
                }
            }
            let n_prompt: usize = cases.iter().map(|case| case.prompt_ids.len()).sum();
            let n_shared = stats.scheduler.n_shared_tokens as usize;
            assert!(n_shared > (N - 1) * (n_prompt - 2 * cases.len()) / 2, "{stats:?}");
            let n_copies: usize = steps.iter().map(|step| step.n_copies).sum();
            assert!(n_copies > cases.len(), "{n_copies} blocks copied");
            assert_eq!(stats.scheduler.n_preemptions, 0);
        }
    }
}

on_both!(siblings_in_a_small_pool_get_the_reference_text);

/// The pool holds the longest case and little more: siblings take each other's blocks.
fn siblings_in_a_small_pool_get_the_reference_text(checkpoint: Checkpoint) {
    let cases = checkpoint.cases().unwrap();
    for k in [0, 3] {
        for output_mode in [OutputMode::Immediate, OutputMode::Deferred] {
            let num_blocks = Some(212);
            let options = RunnerOptions { num_blocks, block_size: 4, ..options(k) };
            let (done, _, stats) = run(checkpoint, &options, (output_mode, true, N));
            for (case, siblings) in cases.iter().zip(&done) {
                siblings.iter().for_each(|found| check_text(case, found, &format!("{options:?}")));
            }
            assert!(stats.scheduler.n_preemptions > 0, "{options:?}: {stats:?}");
        }
    }
}

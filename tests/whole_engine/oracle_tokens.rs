//! Tokens, drafts and acceptance of every case of the reference, in float32.

use engine_types::{FinishReason, SamplingParams, TokenId};
use integration_tests::harness::{self, Generation};
use integration_tests::oracle::{self, Case, ProbeSet};
use model_runner::RunnerOptions;
use models::ComputeDtype;

const EOS: TokenId = 1;

fn options(num_speculative_tokens: u32) -> RunnerOptions {
    RunnerOptions { num_speculative_tokens, ..RunnerOptions::default() }
}

fn requests(cases: &[Case]) -> impl Iterator<Item = (&[TokenId], SamplingParams)> {
    cases.iter().map(|case| (&case.prompt_ids[..], harness::params(case.max_tokens())))
}

fn check_text(case: &Case, found: &Generation, setting: &str) {
    let place = format!("{}, {setting}", case.name);
    assert_eq!(found.token_ids, case.greedy_ids, "{place}");
    let end = match case.greedy_ids.len() < case.max_tokens() as usize {
        true => FinishReason::Eos(EOS),
        false => FinishReason::MaxTokens,
    };
    assert_eq!(found.finish_reason, end, "{place}");
    assert_eq!(found.usage.prompt_tokens as usize, case.prompt_ids.len(), "{place}");
}

/// Compares the drafts of the first verify step, and the acceptance of all for the `k` of which
/// the reference tells it.
fn check_drafts(case: &Case, found: &Generation, k: usize, setting: &str) {
    let place = format!("{}, {setting}", case.name);
    if k == 0 {
        assert_eq!(found.drafts_per_step, [[0; 0]; 0], "{place}");
        return;
    }
    let n_known = k.min(case.first_drafts.len());
    assert_eq!(found.drafts_per_step[0][..n_known], case.first_drafts[..n_known], "{place}");
    if let Some(speculation) = case.speculation.get(&format!("k={k}")) {
        let (found, expected) = (&found.accepted_per_step, &speculation.accepted_per_step);
        assert_eq!(found.len(), expected.len(), "verify steps of {place}");
        // The token limit cuts the last step; the reference counts it whole.
        let n_whole = expected.len() - 1;
        assert_eq!(found[..n_whole], expected[..n_whole], "{place}");
    }
}

/// Runs all cases in one engine and compares everything with the reference.
fn check_all(options: &RunnerOptions) {
    let cases = oracle::cases().unwrap();
    assert_eq!(cases.len(), 14);
    let (engine, thread) = harness::start(ComputeDtype::Float32, options).unwrap();
    let done = harness::generate(&engine, requests(&cases)).unwrap();
    let setting = format!("{options:?}");
    for (case, found) in cases.iter().zip(&done) {
        check_text(case, found, &setting);
        check_drafts(case, found, options.num_speculative_tokens as usize, &setting);
    }
    thread.drain();
    let stats = engine.stats();
    assert_eq!((stats.scheduler.n_preemptions, stats.n_failed_steps), (0, 0));
}

#[test]
fn every_number_of_drafts_gives_the_reference_tokens() {
    for k in [0, 1, 2, 3, 5, 8] {
        check_all(&options(k));
    }
}

#[test]
fn prefill_in_chunks_of_16_changes_nothing() {
    for k in [0, 1, 2, 3, 5, 8] {
        check_all(&RunnerOptions { max_num_batched_tokens: 16, ..options(k) });
    }
}

#[test]
fn block_sizes_change_nothing() {
    for block_size in [1, 4, 16, 64] {
        for k in [0, 1, 3, 8] {
            check_all(&RunnerOptions { block_size, ..options(k) });
        }
        let chunked = RunnerOptions { max_num_batched_tokens: 16, ..options(3) };
        check_all(&RunnerOptions { block_size, ..chunked });
    }
}

#[test]
fn cases_one_at_a_time_give_the_same_as_all_at_once() {
    for k in [0, 1, 3] {
        check_all(&RunnerOptions { max_num_seqs: 1, ..options(k) });
    }
}

/// Each pool holds the longest case and little more, so that requests take each other's blocks.
#[test]
fn a_pool_too_small_for_all_preempts_and_gives_the_same_text() {
    let cases = oracle::cases().unwrap();
    let (short, all) = (&cases[..12], &cases[..]);
    for (cases, num_blocks) in [(short, 28), (all, 212)] {
        for k in [0, 3, 8] {
            let num_blocks = Some(num_blocks);
            let options = RunnerOptions { num_blocks, block_size: 4, ..options(k) };
            let (engine, thread) = harness::start(ComputeDtype::Float32, &options).unwrap();
            let done = harness::generate(&engine, requests(cases)).unwrap();
            for (case, found) in cases.iter().zip(&done) {
                check_text(case, found, &format!("{options:?}"));
            }
            thread.drain();
            let stats = engine.stats().scheduler;
            assert!(stats.n_preemptions > 0, "{options:?}: {stats:?}");
            assert_eq!(stats.blocks.n_used, 0, "{options:?}: {stats:?}");
        }
    }
}

#[test]
fn requests_of_one_batch_draft_as_each_asks() {
    const WIDTHS: [u32; 6] = [0, 1, 2, 3, 5, 8];
    let cases = oracle::cases().unwrap();
    let (engine, _thread) = harness::start(ComputeDtype::Float32, &options(8)).unwrap();
    for shift in 0..WIDTHS.len() {
        let width = |idx: usize| WIDTHS[(idx + shift) % WIDTHS.len()];
        let requests = requests(&cases).enumerate().map(|(idx, (prompt, params))| {
            (prompt, SamplingParams { num_speculative_tokens: Some(width(idx)), ..params })
        });
        let done = harness::generate(&engine, requests).unwrap();
        for (idx, (case, found)) in cases.iter().zip(&done).enumerate() {
            let setting = format!("k={} of 8", width(idx));
            check_text(case, found, &setting);
            check_drafts(case, found, width(idx) as usize, &setting);
            let widest = found.drafts_per_step.iter().map(Vec::len).max().unwrap_or(0);
            assert!(widest <= width(idx) as usize, "{}, {setting}", case.name);
        }
    }
}

/// Five tokens, so that the limit does not cut the three drafts behind the first.
fn check_probes(set: &ProbeSet, options: &RunnerOptions) {
    let (engine, _thread) = harness::start(ComputeDtype::Float32, options).unwrap();
    let prefix = |idx: usize| &set.prompt_ids[..set.probes[idx].prefix_len];
    let requests = (0..set.probes.len()).map(|idx| (prefix(idx), harness::params(5)));
    let done = harness::generate(&engine, requests).unwrap();
    for (probe, found) in set.probes.iter().zip(&done) {
        let place = format!("{} at {}, {options:?}", set.case, probe.prefix_len);
        assert_eq!(found.token_ids[0], probe.next_token, "{place}");
        assert_eq!(found.drafts_per_step[0], probe.drafts, "{place}");
    }
}

#[test]
fn every_draft_probe_is_equal() {
    let sets = oracle::probe_sets().unwrap();
    assert_eq!(sets.iter().map(|set| set.probes.len()).sum::<usize>(), 55);
    for set in &sets {
        check_probes(set, &options(3));
        check_probes(set, &RunnerOptions { max_num_batched_tokens: 16, ..options(3) });
    }
}

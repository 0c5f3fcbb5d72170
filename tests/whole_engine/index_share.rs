//! What the indexers of sparse attention do, counted step by step, with draft steps that share a
//! selection and without.
//!
//! Each step's counts are compared with a sum over its rows that knows nothing of the runner: a
//! row at position `p` sees `p + 1` keys and scores them if they are more than `index_topk`. The
//! sum of the target's part does not depend on sharing.

use engine_types::{IndexerCounts, IndexerStats, PlanRow, SamplingParams, TokenId};
use integration_tests::harness;
use integration_tests::oracle::Checkpoint;
use integration_tests::recorder::StepRecord;
use model_runner::RunnerOptions;
use models::ComputeDtype;
use spec_decode::IndexShare;

const INDEX_TOPK: u32 = 64;
/// Layers of the target that have an indexer; the two others take the selection below them.
const N_TARGET_INDEXERS: u64 = 3;

fn options(num_speculative_tokens: u32, index_share: IndexShare) -> RunnerOptions {
    RunnerOptions { num_speculative_tokens, index_share, ..RunnerOptions::default() }
}

/// One indexer over rows that see so many keys each.
fn launch(n_visible_keys: impl IntoIterator<Item = u32>) -> IndexerCounts {
    let mut counts = IndexerCounts { n_launches: 1, ..IndexerCounts::default() };
    for n_visible in n_visible_keys {
        counts.n_rows += 1;
        counts.n_scored_keys += if n_visible > INDEX_TOPK { u64::from(n_visible) } else { 0 };
    }
    counts
}

/// What a step has to count, by its rows.
fn expected(step: &StepRecord, k: u32, index_share: IndexShare) -> IndexerStats {
    let rows = || step.rows.iter().map(|(row, _)| row);
    let of_row = |row: &PlanRow| row.n_computed + 1..=row.n_computed + row.n_query;
    let one_layer = launch(rows().flat_map(of_row));
    let mut target = IndexerCounts::default();
    (0..N_TARGET_INDEXERS).for_each(|_| target += one_layer);
    let mut stats = IndexerStats::default();
    match rows().any(|row| row.prefill) {
        true => stats.target_prefill = target,
        false => stats.target_verify = target,
    }

    // The draft layer selects for the rows that a draft is chosen behind, one a request.
    let n_selections = if index_share == IndexShare::Off { k } else { k.min(1) };
    for nth in 0..n_selections {
        let proposing = step.rows.iter().filter(|(row, _)| row.n_propose > nth);
        let n_visible = proposing.map(|(row, n_accepted)| {
            // Rejected drafts are not seen; the drafts of this propose are.
            row.n_computed + row.n_query - row.n_draft + n_accepted + nth
        });
        let n_visible: Vec<u32> = n_visible.collect();
        if !n_visible.is_empty() {
            stats.draft_steps[nth as usize] = launch(n_visible);
        }
    }
    stats
}

/// A prompt and how many tokens it gets.
type Job = (Vec<TokenId>, u32);

/// Sixteen prompts of 2 to 795 tokens, on both sides of `index_topk`, that end at different times.
fn ragged_jobs() -> Vec<Job> {
    let cases = Checkpoint::TinyGlm52.cases().unwrap();
    let mut prompts: Vec<_> = cases.iter().map(|case| case.prompt_ids.clone()).collect();
    let long = prompts[13].clone();
    prompts.extend([long[..63].to_vec(), long[..64].to_vec()]);
    let max_tokens = |idx: usize| 3 + (idx as u32 * 7) % 32;
    prompts.into_iter().enumerate().map(|(idx, prompt)| (prompt, max_tokens(idx))).collect()
}

/// Runs `jobs` at once and compares the counts of each step, and those of the engine, with the
/// sums over the rows; returns the steps.
fn check_counts(jobs: &[Job], options: &RunnerOptions) -> Vec<StepRecord> {
    let (engine, thread, records) =
        harness::start_recorded(Checkpoint::TinyGlm52, ComputeDtype::Float32, options).unwrap();
    let requests = jobs.iter().map(|(prompt, max_tokens)| {
        let params = harness::params(*max_tokens);
        (&prompt[..], SamplingParams { ignore_eos: true, ..params })
    });
    harness::generate(&engine, requests).unwrap();
    thread.drain();
    let steps = records.take();
    let k = options.num_speculative_tokens;
    let mut sum = IndexerStats::default();
    for step in &steps {
        assert_eq!(step.indexer, expected(step, k, options.index_share), "{options:?}: {step:?}");
        sum += &step.indexer;
    }
    let stats = engine.stats();
    assert_eq!(stats.indexer, sum, "{options:?}");
    assert_eq!(stats.n_steps, steps.len() as u64, "{options:?}");
    steps
}

/// Steps after which drafts were proposed; the others at most let the draft layer's KV follow.
fn count_proposes(steps: &[StepRecord]) -> u64 {
    let proposes = |step: &&StepRecord| step.rows.iter().any(|(row, _)| row.n_propose > 0);
    steps.iter().filter(proposes).count() as u64
}

#[test]
fn a_propose_runs_the_indexer_once_with_sharing_and_k_times_without() {
    let ragged = ragged_jobs();
    let alone: Job = (ragged[12].0[..90].to_vec(), 30);
    for jobs in [&[alone][..], &ragged[..]] {
        for k in [1, 2, 3, 5, 8] {
            for index_share in [IndexShare::Auto, IndexShare::Off] {
                let place = format!("{} requests, k={k}, {index_share}", jobs.len());
                let steps = check_counts(jobs, &options(k, index_share));
                let n_proposes = count_proposes(&steps);
                assert!(n_proposes > 3, "{place}: {n_proposes} proposes");
                let per_propose = if index_share == IndexShare::Off { u64::from(k) } else { 1 };
                let mut sum = IndexerStats::default();
                steps.iter().for_each(|step| sum += &step.indexer);
                let n_launches = sum.draft().n_launches;
                assert_eq!(n_launches, per_propose * n_proposes, "{place}");
                assert_eq!(sum.draft_steps[0].n_launches, n_proposes, "{place}");
                if index_share != IndexShare::Off {
                    assert_eq!(sum.draft_steps[1..], [IndexerCounts::default(); 7], "{place}");
                }
            }
        }
    }
}

#[test]
fn chunks_and_preemption_are_counted_as_they_run() {
    let ragged = ragged_jobs();
    let short: Vec<Job> = ragged[..12].iter().map(|(prompt, _)| (prompt.clone(), 48)).collect();
    for index_share in [IndexShare::Auto, IndexShare::Off] {
        let options = options(3, index_share);
        let chunked = RunnerOptions { max_num_batched_tokens: 16, ..options.clone() };
        check_counts(&ragged, &chunked);

        let small = RunnerOptions { block_size: 4, num_blocks: Some(28), ..options };
        let steps = check_counts(&short, &small);
        let rows = steps.iter().flat_map(|step| &step.rows);
        let n_begun = rows.filter(|(row, _)| row.n_computed == 0).count();
        assert!(n_begun > short.len(), "some request begins anew: {n_begun}");
    }
}

/// The numbers by hand: 70 prompt tokens in one step, then one token a step.
#[test]
fn rows_that_see_no_more_than_index_topk_keys_score_none() {
    let prompt = ragged_jobs()[13].0[..70].to_vec();
    let steps = check_counts(&[(prompt, 3)], &options(0, IndexShare::Auto));
    let counts =
        |n_launches, n_rows, n_scored_keys| IndexerCounts { n_launches, n_rows, n_scored_keys };
    assert_eq!(steps.len(), 3);
    let prefill = 3 * (65 + 66 + 67 + 68 + 69 + 70);
    assert_eq!(steps[0].indexer.target_prefill, counts(3, 3 * 70, prefill));
    assert_eq!(steps[1].indexer.target_verify, counts(3, 3, 3 * 71));
    assert_eq!(steps[2].indexer.target_verify, counts(3, 3, 3 * 72));
}

#[test]
fn dense_attention_counts_nothing() {
    let cases = Checkpoint::TinyDsv3.cases().unwrap();
    let options = options(3, IndexShare::Auto);
    let (engine, thread) =
        harness::start(Checkpoint::TinyDsv3, ComputeDtype::Float32, &options).unwrap();
    harness::generate(&engine, [(&cases[12].prompt_ids[..], harness::params(8))]).unwrap();
    thread.drain();
    assert!(engine.stats().indexer.is_empty() && engine.stats().n_steps > 0);
}

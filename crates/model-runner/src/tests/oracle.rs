//! Whole steps on the bundled checkpoint against reference values that a plain float32
//! implementation without cache, paging or batches made.

use engine_types::TokenId;
use serde_json::Value;

use super::driver::{Feed, Job, run};
use super::{options, runner};
use crate::limits::{AttentionChoice, RunnerOptions};
use models::KvInit;

const WHOLE: Feed = Feed { chunk: 4096, poison: false };

fn read(name: &str) -> Vec<Value> {
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/oracle-tiny-dsv3/");
    let text = std::fs::read_to_string(format!("{dir}{name}")).unwrap();
    serde_json::from_str(&text).unwrap()
}

fn ids(value: &Value) -> Vec<TokenId> {
    serde_json::from_value(value.clone()).unwrap()
}

fn jobs(cases: &[Value], n_drafts: usize) -> Vec<Job> {
    let job = |case: &Value| {
        Job::new(&ids(&case["prompt_ids"]), ids(&case["greedy_ids"]).len(), n_drafts)
    };
    cases.iter().map(job).collect()
}

/// Tokens, first drafts and accepted counts of finished jobs are the reference's.
fn check(cases: &[Value], jobs: &[Job], n_drafts: usize, what: &str) {
    for (case, job) in cases.iter().zip(jobs) {
        let what = format!("{} with {n_drafts} drafts, {what}", case["name"]);
        assert_eq!(job.generated(), ids(&case["greedy_ids"]), "tokens: {what}");
        let first = ids(&case["first_drafts"]);
        let n_known = n_drafts.min(first.len());
        assert_eq!(job.proposed[0][..n_known], first[..n_known], "first drafts: {what}");
        let speculation = &case["speculation"][format!("k={n_drafts}")];
        if speculation.is_object() {
            // The token limit cuts the last step in the reference.
            let expected = ids(&speculation["accepted_per_step"]);
            let n_whole = expected.len() - 1;
            assert_eq!(job.accepted[..n_whole], expected[..n_whole], "accepted: {what}");
            assert_eq!(job.accepted.len(), expected.len(), "verify steps: {what}");
        }
    }
}

#[test]
fn every_number_of_drafts_gives_the_reference_tokens() {
    let cases = read("cases.json");
    for n_drafts in [0, 1, 2, 3, 5, 8] {
        let mut runner = runner(&options(n_drafts));
        let done = run(&mut runner, jobs(&cases, n_drafts as usize), WHOLE);
        check(&cases, &done, n_drafts as usize, "all cases in one batch");
    }
}

/// Unwritten slots are NaN from the start and unused ones become NaN again after each step; block
/// sizes and chunks move every boundary.
#[test]
fn poisoned_slots_blocks_and_chunks_change_nothing() {
    let cases = read("cases.json");
    for (block_size, chunk) in [(1, 16), (4, 7), (16, 16), (64, 4096)] {
        let num_blocks = Some(8192 / block_size);
        let kv_init = KvInit::Nan;
        let options = RunnerOptions { block_size, num_blocks, kv_init, ..options(3) };
        let mut runner = runner(&options);
        let done = run(&mut runner, jobs(&cases, 3), Feed { chunk, poison: true });
        check(&cases, &done, 3, &format!("blocks of {block_size}, chunks of {chunk}"));
    }
}

/// The plain attention backend, which shares no code with the production one.
#[test]
fn the_reference_backend_gives_the_same_steps() {
    let cases = &read("cases.json")[..12];
    let mut runner = runner(&RunnerOptions { attention: AttentionChoice::Reference, ..options(3) });
    let done = run(&mut runner, jobs(cases, 3), Feed { chunk: 16, poison: false });
    check(cases, &done, 3, "reference attention");
}

/// Every draft of every step of a request in a batch is the one that it gets alone \[INV-11].
#[test]
fn drafts_in_a_batch_equal_those_alone() {
    let cases = read("cases.json");
    let mut runner = runner(&options(3));
    let together = run(&mut runner, jobs(&cases, 3), WHOLE);
    for (case, job) in cases.iter().zip(&together) {
        let alone = run(&mut runner, jobs(std::slice::from_ref(case), 3), WHOLE).remove(0);
        assert_eq!(alone.proposed, job.proposed, "{}", case["name"]);
        assert_eq!(alone.accepted, job.accepted, "{}", case["name"]);
    }
}

#[test]
fn every_draft_probe_is_equal() {
    for set in read("draft_probes.json") {
        let prompt = ids(&set["prompt_ids"]);
        let probes = set["probes"].as_array().unwrap();
        let prefix = |probe: &Value| &prompt[..probe["prefix_len"].as_u64().unwrap() as usize];
        let jobs = |probes: &[Value]| probes.iter().map(|p| Job::new(prefix(p), 1, 3)).collect();
        let mut runner = runner(&RunnerOptions { kv_init: KvInit::Nan, ..options(3) });
        for probes in probes.chunks(8) {
            for chunk in [64, 4096] {
                let done = run(&mut runner, jobs(probes), Feed { chunk, poison: true });
                for (probe, job) in probes.iter().zip(done) {
                    let place = format!("{} at {}", set["case"], probe["prefix_len"]);
                    assert_eq!(job.generated()[0], probe["next_token"], "{place}");
                    assert_eq!(job.proposed[0], ids(&probe["drafts"]), "{place}");
                }
            }
        }
    }
}

#[test]
fn prompt_logprobs_equal_the_reference() {
    let mut runner = runner(&options(0));
    for case in read("cases.json") {
        let prompt = ids(&case["prompt_ids"]);
        let expected: Vec<f32> = serde_json::from_value(case["prompt_logprobs"].clone()).unwrap();
        let whole = runner.prompt_logprobs(&prompt, 4096).unwrap();
        assert_eq!(whole, runner.prompt_logprobs(&prompt, 16).unwrap(), "chunks are exact");
        assert_eq!(whole.len(), expected.len());
        for (got, expected) in whole.iter().zip(&expected) {
            assert!((got - expected).abs() < 1e-3, "{}: {got}, not {expected}", case["name"]);
        }
    }
}

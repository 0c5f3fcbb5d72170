//! Steps that are launched before the step before them is collected.

use engine_types::{
    BlockId, ExecutorError, RequestId, RowSpec, RowTable, StepExecutor, StepOutcome, StepPlan,
};
use models::KvInit;

use super::driver::{Feed, Job, run};
use super::{PROMPT, WHOLE_PROMPT, options, oracle, runner, runner_of};
use crate::limits::RunnerOptions;

/// Every case of the reference, in chunks that end at different steps.
#[test]
fn deferred_steps_give_the_tokens_and_drafts_of_immediate_ones() {
    for model in ["tiny-dsv3", "tiny-glm52"] {
        let cases = oracle::cases(model);
        for n_drafts in [0, 1, 3] {
            let options = RunnerOptions { kv_init: KvInit::Nan, ..options(n_drafts) };
            let n_drafts = n_drafts as usize;
            let jobs: Vec<Job> = cases
                .iter()
                .map(|(prompt, greedy)| Job::new(prompt, greedy.len(), n_drafts))
                .collect();
            let [immediate, deferred] = [false, true].map(|deferred| {
                let feed = Feed { chunk: 64, poison: true, deferred };
                run(&mut runner_of(model, &options), jobs.clone(), feed)
            });
            for ((_, greedy), (one, other)) in cases.iter().zip(immediate.iter().zip(&deferred)) {
                let place = format!("{model} with {n_drafts} drafts");
                assert_eq!(other.generated(), greedy, "{place}");
                assert_eq!(one.generated(), greedy, "{place}");
                assert_eq!(other.proposed, one.proposed, "{place}");
                assert_eq!(other.accepted, one.accepted, "{place}");
            }
        }
    }
}

/// The step behind a failed one answers the rows that have nothing to do with it, and the tables
/// follow all plans.
#[test]
fn a_step_that_fails_takes_along_only_what_continues_it() {
    let options = RunnerOptions { kv_init: KvInit::Nan, ..options(3) };
    let alone = first_step(&options);
    let mut runner = runner(&options);
    let (mut plan, mut outcome) = (StepPlan::default(), StepOutcome::default());
    let table = plan.update_table(0, 0, &[BlockId(3)]);
    plan.push_row(RequestId(3), WHOLE_PROMPT, &[4096], &[], table);
    plan.update_table(1, 0, &[BlockId(9)]);
    runner.launch(&plan);
    plan.clear();
    let table = plan.update_table(0, 1, &[BlockId(4)]);
    let spec = RowSpec { n_computed: 1, n_draft: 3, prefill: false, ..WHOLE_PROMPT };
    plan.push_deferred_row(RequestId(3), spec, 0, table);
    let table = RowTable { slot: 1, n_blocks: 1 };
    plan.push_row(RequestId(4), WHOLE_PROMPT, &PROMPT, &[], table);
    runner.launch(&plan);

    let error = runner.collect(&mut outcome).unwrap_err();
    let ExecutorError::Step(text) = error else { panic!("{error}") };
    assert!(text.contains("request 3: token 4096"), "{text}");
    runner.collect(&mut outcome).unwrap();
    let row = outcome.row(RequestId(3)).expect("every planned row is answered");
    assert!(outcome.tokens(row).is_empty() && outcome.drafts(row).is_empty());
    let row = outcome.row(RequestId(4)).expect("every planned row is answered");
    assert_eq!((outcome.tokens(row), outcome.drafts(row)), (&alone.0[..], &alone.1[..]));
}

/// Token and drafts behind [`PROMPT`].
fn first_step(options: &RunnerOptions) -> (Vec<u32>, Vec<u32>) {
    let (mut plan, mut outcome) = (StepPlan::default(), StepOutcome::default());
    let table = plan.update_table(0, 0, &[BlockId(0)]);
    plan.push_row(RequestId(4), WHOLE_PROMPT, &PROMPT, &[], table);
    runner(options).execute(&plan, &mut outcome).unwrap();
    let row = &outcome.rows()[0];
    (outcome.tokens(row).to_vec(), outcome.drafts(row).to_vec())
}

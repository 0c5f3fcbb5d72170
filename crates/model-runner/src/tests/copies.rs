//! Requests that take over the blocks of another one, copy on write.

use engine_types::{
    BlockCopy, BlockId, OutcomeRow, RequestId, RowSpec, StepExecutor, StepOutcome, StepPlan,
    TokenId,
};
use models::{IndexCacheDtype, KvInit};
use tch::{Device, Kind, Tensor};

use super::{WHOLE_PROMPT, logits, options, oracle, runner_of};
use crate::limits::RunnerOptions;
use crate::runner::Runner;

/// 331 tokens are 20 blocks of 16 and 11 tokens of a further one.
const N_PROMPT: u32 = 331;
const N_FULL: usize = 20;
/// Blocks of the first request: the last two hold what it generates.
const N_BLOCKS: usize = 22;
/// The block of the second one that takes over the first one's partial block, and the next one.
const OWN: [u32; 2] = [77, 50];

const SUBJECTS: [(&str, IndexCacheDtype); 3] = [
    ("tiny-dsv3", IndexCacheDtype::Auto),
    ("tiny-glm52", IndexCacheDtype::Auto),
    ("tiny-glm52", IndexCacheDtype::Fp8),
];

/// What a step says of a row.
type Answer = (Vec<TokenId>, Vec<TokenId>);

fn answer(outcome: &StepOutcome, row: &OutcomeRow) -> Answer {
    (outcome.tokens(row).to_vec(), outcome.drafts(row).to_vec())
}

fn execute(runner: &mut Runner, plan: &StepPlan) -> Vec<Answer> {
    let mut outcome = StepOutcome::default();
    runner.execute(plan, &mut outcome).unwrap();
    outcome.rows().iter().map(|row| answer(&outcome, row)).collect()
}

/// A runner that has read the prompt for the first request, whose blocks are `0 .. 22` from the
/// last on, and what it said.
fn after_prompt((model, index_cache_dtype): (&'static str, IndexCacheDtype)) -> (Runner, Answer) {
    let kv_init = KvInit::Nan;
    let options = RunnerOptions { kv_init, index_cache_dtype, ..options(3) };
    let mut runner = runner_of(model, &options);
    let mut plan = StepPlan::default();
    let blocks: Vec<BlockId> = (0..N_BLOCKS as u32).rev().map(BlockId).collect();
    let table = plan.update_table(0, 0, &blocks);
    plan.push_row(RequestId(0), WHOLE_PROMPT, &oracle::prompt(model, "public-12"), &[], table);
    let first = execute(&mut runner, &plan).remove(0);
    (runner, first)
}

/// Appends the row of a window behind the prompt.
fn push_window(plan: &mut StepPlan, id: u64, window: &[TokenId], blocks: &[u32], start: usize) {
    let blocks: Vec<BlockId> = blocks[start..].iter().copied().map(BlockId).collect();
    let table = plan.update_table(u32::try_from(id).unwrap(), start as u32, &blocks);
    let n_draft = u32::try_from(window.len() - 1).unwrap();
    let spec = RowSpec { n_computed: N_PROMPT, n_draft, prefill: false, ..WHOLE_PROMPT };
    plan.push_row(RequestId(id), spec, window, &[], table);
}

/// Logits behind the window, which read all that was written in `blocks`.
fn later(runner: &Runner, blocks: &[u32]) -> Tensor {
    logits(runner, N_PROMPT + 4, &[11, 12, 13], blocks)
}

#[test]
fn a_request_forked_inside_a_block_goes_on_with_the_same_bits() {
    for subject in SUBJECTS {
        let own: Vec<u32> = (0..N_BLOCKS as u32).rev().collect();
        let forked = [&own[..N_FULL], &OWN].concat();
        let (mut runner, (tokens, drafts)) = after_prompt(subject);
        let window = [tokens, drafts].concat();
        let other = [window[0], 5, 6, 7];

        // The two requests alone: what each writes is not what the other one does.
        let alone = [&window[..], &other].map(|window| {
            let (mut runner, _) = after_prompt(subject);
            let mut plan = StepPlan::default();
            push_window(&mut plan, 0, window, &own, N_BLOCKS);
            let answer = execute(&mut runner, &plan).remove(0);
            (answer, later(&runner, &own))
        });
        assert!(!alone[0].1.equal(&alone[1].1), "{subject:?}: they differ");

        let mut plan = StepPlan::default();
        plan.push_copy(BlockCopy { from: BlockId(own[N_FULL]), to: BlockId(OWN[0]) });
        push_window(&mut plan, 0, &other, &own, N_BLOCKS);
        push_window(&mut plan, 1, &window, &forked, 0);
        let answers = execute(&mut runner, &plan);
        assert_eq!(answers, [alone[1].0.clone(), alone[0].0.clone()], "{subject:?}");
        assert!(later(&runner, &forked).equal(&alone[0].1), "{subject:?}: bit for bit");
        assert!(later(&runner, &own).equal(&alone[1].1), "{subject:?}: bit for bit");
    }
}

/// Otherwise the test above could pass without any copy.
#[test]
fn what_is_not_copied_is_missed() {
    for subject in SUBJECTS {
        let (runner, _) = after_prompt(subject);
        let own: Vec<u32> = (0..N_BLOCKS as u32).rev().collect();
        let forked = [&own[..N_FULL], &OWN].concat();
        let [whole, holed] = [&own, &forked].map(|blocks| logits(&runner, N_PROMPT, &[11], blocks));
        assert!(!holed.equal(&whole), "{subject:?}");
    }
}

/// Copies are done even if no row of the plan is left, as they are when its rows continue a step
/// that failed.
#[test]
fn every_cache_of_every_layer_is_copied_and_nothing_else() {
    const COPIES: [(u32, u32); 2] = [(3, 90), (1, 60)];
    let slots = |block: u32| Tensor::arange(16, (Kind::Int64, Device::Cpu)) + 16 * i64::from(block);
    for subject in SUBJECTS {
        let (mut runner, _) = after_prompt(subject);
        let before = caches(&runner);
        let n_index_caches = if subject.0 == "tiny-glm52" { 3 + 1 } else { 0 };
        assert_eq!(before.len(), 5 + 1 + n_index_caches, "{subject:?}");
        let mut plan = StepPlan::default();
        for (from, to) in COPIES {
            plan.push_copy(BlockCopy { from: BlockId(from), to: BlockId(to) });
        }
        assert!(execute(&mut runner, &plan).is_empty());
        for (before, after) in before.iter().zip(caches(&runner)) {
            let mut expected = before.copy();
            for (from, to) in COPIES {
                let _ = expected.index_copy_(0, &slots(to), &before.index_select(0, &slots(from)));
            }
            assert!(expected.equal(&after) && !before.equal(&after), "{subject:?}");
        }
    }
}

/// The bits of all caches.
fn caches(runner: &Runner) -> Vec<Tensor> {
    let tensors = runner.kv_cache().layers().iter().flat_map(models::LayerCache::tensors);
    tensors.map(|cache| cache.view_dtype(Kind::Uint8).copy()).collect()
}

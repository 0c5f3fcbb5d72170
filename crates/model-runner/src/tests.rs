//! Tests of the runner on the bundled checkpoint.

mod copies;
mod deferred;
mod distribution;
mod driver;
mod faults;
mod limits;
mod oracle;
mod sampling;
mod synthetic;

use batch_layout::{BatchLayout, SeqSpec};
use engine_types::{
    BlockCopy, BlockId, ExecutorError, RequestId, RowSpec, RowTable, StepExecutor, StepOutcome,
    StepPlan, TokenId,
};
use models::{ForwardOutput, KvInit, LoadOptions, LoadedModel};
use spec_decode::IndexShare;
use tch::Tensor;

use crate::limits::RunnerOptions;
use crate::runner::Runner;

/// A prompt whose first token is to be chosen, with three drafts behind it.
const WHOLE_PROMPT: RowSpec = RowSpec {
    n_computed: 0,
    n_draft: 0,
    samples: true,
    prefill: true,
    drafting: true,
    n_propose: 3,
    has_sampler: false,
};

const PROMPT: [TokenId; 9] = [0, 856, 1168, 596, 332, 2097, 3770, 2744, 330];

fn options(num_speculative_tokens: u32) -> RunnerOptions {
    RunnerOptions {
        num_blocks: Some(1024),
        max_num_batched_tokens: 8192,
        num_speculative_tokens,
        ..RunnerOptions::default()
    }
}

fn load(model: &str, drafting: bool) -> LoadedModel {
    let dir = bundled_checkpoints::resolve(model, None).unwrap();
    models::load(&dir, LoadOptions { drafting, ..LoadOptions::default() }).unwrap()
}

fn runner(options: &RunnerOptions) -> Runner {
    runner_of("tiny-dsv3", options)
}

fn runner_of(model: &str, options: &RunnerOptions) -> Runner {
    Runner::new(load(model, options.num_speculative_tokens > 0), options).unwrap()
}

fn logits_of(runner: &Runner, output: &ForwardOutput) -> Tensor {
    runner.logits(&output.hidden).unwrap()
}

/// Logits of the rows at positions `n_computed ..` of a sequence in `blocks`.
fn logits(runner: &Runner, n_computed: u32, tokens: &[TokenId], blocks: &[u32]) -> Tensor {
    let mut layout = BatchLayout::new(runner.limits().block_size);
    layout.push(SeqSpec { n_computed, n_query: u32::try_from(tokens.len()).unwrap() }, blocks);
    layout.finish();
    let ids: Vec<i64> = tokens.iter().map(|&id| i64::from(id)).collect();
    logits_of(runner, &runner.forward(&ids, &layout).unwrap())
}

/// Fault case L16: a verify row sees the tokens up to its own and nothing behind.
#[test]
fn verify_rows_do_not_see_the_drafts_behind_them() {
    for model in ["tiny-dsv3", "tiny-glm52"] {
        check_verify_rows(model);
    }
}

fn check_verify_rows(model: &str) {
    let options = RunnerOptions { block_size: 4, kv_init: KvInit::Nan, ..options(3) };
    let runner = runner_of(model, &options);
    let blocks = [5, 2, 9];
    let _ = logits(&runner, 0, &PROMPT[..5], &blocks);
    let window = logits(&runner, 5, &PROMPT[5..9], &blocks);
    let other = logits(&runner, 5, &[PROMPT[5], PROMPT[6], PROMPT[7], 77], &blocks);
    assert!(window.narrow(0, 0, 3).equal(&other.narrow(0, 0, 3)), "bit for bit");
    assert!(!window.get(3).equal(&other.get(3)));
    for (row, position) in (5..9).enumerate() {
        let single = logits(&runner, position, &PROMPT[5 + row..=5 + row], &blocks);
        assert!(single.get(0).equal(&window.get(i64::try_from(row).unwrap())), "row {row}");
    }
    // In a batch of lengths 5 and 9 the rows are those of the sequences alone.
    let long: Vec<TokenId> = PROMPT.iter().rev().copied().chain(PROMPT).collect();
    let _ = logits(&runner, 0, &long[..9], &[20, 21, 22, 23]);
    let alone = logits(&runner, 9, &long[9..13], &[20, 21, 22, 23]);
    let mut layout = BatchLayout::new(4);
    layout.push(SeqSpec { n_computed: 5, n_query: 4 }, &blocks);
    layout.push(SeqSpec { n_computed: 9, n_query: 4 }, &[20, 21, 22, 23]);
    layout.finish();
    let ids: Vec<i64> = PROMPT[5..9].iter().chain(&long[9..13]).map(|&id| i64::from(id)).collect();
    let both = logits_of(&runner, &runner.forward(&ids, &layout).unwrap());
    assert!(both.equal(&Tensor::cat(&[&window, &alone], 0)), "bit for bit");
}

/// Whether draft steps share a selection changes nothing that the target computes: verify logits
/// behind a long prompt are the same bits, whatever was drafted in between.
#[test]
fn verify_logits_have_the_same_bits_with_and_without_index_sharing() {
    // The 331 tokens of the reference behind which its drafts differ.
    let prompt = oracle::prompt("tiny-glm52", "public-12");
    let blocks: Vec<u32> = (0..22).rev().collect();
    let spec = RowSpec { n_propose: 5, ..WHOLE_PROMPT };
    let mut plan = StepPlan::default();
    let table: Vec<BlockId> = blocks.iter().copied().map(BlockId).collect();
    let table = plan.update_table(0, 0, &table);
    plan.push_row(RequestId(0), spec, &prompt, &[], table);
    let windows = [IndexShare::On, IndexShare::Off].map(|index_share| {
        let options = RunnerOptions { index_share, kv_init: KvInit::Nan, ..options(5) };
        let mut runner = runner_of("tiny-glm52", &options);
        assert_eq!(runner.shares_index(), index_share == IndexShare::On);
        let mut outcome = StepOutcome::default();
        runner.execute(&plan, &mut outcome).unwrap();
        let launches = outcome.indexer.draft_steps.map(|step| step.n_launches);
        let later = u64::from(index_share == IndexShare::Off);
        assert_eq!(launches, [1, later, later, later, later, 0, 0, 0]);
        let row = outcome.row(RequestId(0)).unwrap();
        let drafts = outcome.drafts(row).to_vec();
        (logits(&runner, 331, &[outcome.tokens(row)[0], 11, 12, 13, 14, 15], &blocks), drafts)
    });
    assert!(windows[0].0.equal(&windows[1].0), "bit for bit");
    assert_ne!(windows[0].1, windows[1].1, "the drafts show that sharing makes a difference here");
}

#[test]
fn sharing_is_refused_where_there_is_nothing_to_share() {
    let refusal = |model, drafts| {
        let options = RunnerOptions { index_share: IndexShare::On, ..options(drafts) };
        Runner::new(load(model, drafts > 0), &options).err().unwrap().to_string()
    };
    let dense = refusal("tiny-dsv3", 3);
    assert!(dense.contains("index_share is on, but the config has no index_topk"), "{dense}");
    let undrafted = refusal("tiny-glm52", 0);
    assert!(undrafted.contains("num_speculative_tokens is 0"), "{undrafted}");
    assert!(!runner(&options(3)).shares_index());
    assert!(runner_of("tiny-glm52", &options(3)).shares_index());
    assert!(!runner_of("tiny-glm52", &options(0)).shares_index());
}

#[test]
fn plans_that_break_a_bound_are_refused_and_later_ones_run() {
    let mut runner = runner(&RunnerOptions { max_num_seqs: 2, ..options(3) });
    let good = WHOLE_PROMPT;
    let middle = RowSpec { samples: false, n_propose: 0, ..good };
    let far = RowSpec { n_computed: 1 << 20, ..good };
    let table = [
        (good, vec![4096], vec![], 0..1, "token 4096, vocab_size is 4096"),
        (good, vec![1], vec![], 1024..1025, "block 1024, num_blocks is 1024"),
        (RowSpec { n_computed: 14, ..good }, vec![1], vec![], 0..1, "17 positions"),
        (RowSpec { n_propose: 4, ..good }, vec![1], vec![], 0..1, "4 wanted, the limit is 3"),
        (RowSpec { samples: false, ..good }, vec![1], vec![2], 0..1, "does not sample"),
        (RowSpec { drafting: false, ..good }, vec![1], vec![], 0..1, "not drafted for"),
        (good, vec![1], vec![2], 0..1, "lookahead belongs"),
        (middle, vec![1], vec![], 0..1, "lookahead belongs"),
        (far, vec![1], vec![], 0..1024, "the blocks hold 16384"),
        (RowSpec { n_computed: 8190, ..good }, vec![1], vec![], 0..1024, "max_model_len is "),
    ];
    let (mut plan, mut outcome) = (StepPlan::default(), StepOutcome::default());
    for (spec, tokens, lookahead, blocks, expected) in table {
        let blocks: Vec<BlockId> = blocks.map(BlockId).collect();
        plan.clear();
        let table = plan.update_table(1, 0, &blocks);
        plan.push_row(RequestId(3), spec, &tokens, &lookahead, table);
        let Err(ExecutorError::Step(text)) = runner.execute(&plan, &mut outcome) else {
            panic!("{expected}: not refused");
        };
        assert!(text.starts_with("step 0: request 3: ") && text.contains(expected), "{text}");
    }
    let refusal = |plan: &StepPlan, runner: &mut Runner| {
        runner.execute(plan, &mut StepOutcome::default()).unwrap_err().to_string()
    };
    plan.clear();
    let table = plan.update_table(0, 0, &[BlockId(0)]);
    (0..3).for_each(|id| plan.push_row(RequestId(id), good, &[1], &[], table));
    let text = refusal(&plan, &mut runner);
    assert!(text.contains("3 rows, max_num_seqs is 2"), "{text}");
    for (from, to) in [(1024, 1), (1, 1024)] {
        plan.clear();
        plan.push_copy(BlockCopy { from: BlockId(from), to: BlockId(to) });
        let text = refusal(&plan, &mut runner);
        assert!(text.contains("step 0: a copy of block 1024, num_blocks is 1024"), "{text}");
    }
    plan.clear();
    plan.push_row(RequestId(3), good, &[1], &[], RowTable { slot: 2, n_blocks: 1 });
    let text = refusal(&plan, &mut runner);
    assert!(text.contains("request 3: block table 2, max_num_seqs is 2"), "{text}");

    // The tables follow refused plans, too.
    plan.clear();
    plan.push_row(RequestId(3), good, &PROMPT, &[], RowTable { slot: 0, n_blocks: 1 });
    runner.execute(&plan, &mut outcome).unwrap();
    assert_eq!(outcome.tokens(outcome.row(RequestId(3)).unwrap()).len(), 1);
}

/// Its changes cannot be entered, so that no later plan would mean what it says.
#[test]
fn a_table_that_there_is_not_is_the_end() {
    let mut runner = runner(&RunnerOptions { max_num_seqs: 2, ..options(0) });
    let mut plan = StepPlan::default();
    plan.update_table(u32::MAX, 0, &[BlockId(0)]);
    let error = runner.execute(&plan, &mut StepOutcome::default()).unwrap_err();
    let ExecutorError::Fatal(text) = error else { panic!("{error}") };
    assert_eq!(text, "step 0: block table 4294967295, max_num_seqs is 2");
}

#[test]
fn an_empty_plan_has_an_empty_outcome() {
    let mut outcome = StepOutcome::default();
    outcome.push_row(RequestId(0), &[1], 0, &[]);
    runner(&options(0)).execute(&StepPlan::default(), &mut outcome).unwrap();
    assert!(outcome.rows().is_empty());
}

#[test]
fn a_prompt_that_does_not_fit_has_no_logprobs() {
    let mut runner = runner(&RunnerOptions { num_blocks: Some(1), ..options(0) });
    let error = runner.prompt_logprobs(&[1; 17], 8).unwrap_err().to_string();
    assert!(error.contains("2 KV blocks needed, num_blocks is 1"), "{error}");
    assert!(runner.prompt_logprobs(&[1], 8).unwrap().is_empty());
    assert!(runner.prompt_logprobs(&[], 8).unwrap().is_empty());
    assert!(runner.prompt_logprobs(&[4096], 8).is_err());
}

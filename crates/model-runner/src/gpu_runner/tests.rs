//! Plans of memory, and the order of steps over a device that a plain list stands in for: its
//! model says of every token the next number.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

use batch_layout::BatchLayout;
use engine_types::{RequestId, RowSpec, RowTable, Sampler, SamplerSetup, SamplingParams};
use gpu_model::{DraftPass, HiddenRows, Selected, SlotResult};
use gpu_runtime::{GpuError, Memory};

use super::*;
use crate::limits::{Planned, plan_limits};

/// What the device was asked for, in order: passes with their tokens, launches with the least
/// lengths of their slots, `collect`.
type Log = Rc<RefCell<Vec<String>>>;

struct NextNumber {
    config: ModelConfig,
    log: Log,
    /// Tokens of the last pass.
    ids: Vec<i32>,
    /// Tokens of the slots of the steps in flight, and of the step launched last.
    steps: VecDeque<Vec<i32>>,
    last: Vec<i32>,
    tables: Rc<RefCell<BTreeMap<u32, Vec<i32>>>>,
}

impl AnyModel for NextNumber {
    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn num_mtp_layers(&self) -> usize {
        0
    }

    fn can_share_selection(&self) -> bool {
        false
    }

    fn forward(&mut self, ids: &[i32], _: &BatchLayout) -> Result<(), GpuError> {
        self.log.borrow_mut().push(format!("pass {ids:?}"));
        self.ids = ids.to_vec();
        Ok(())
    }

    fn logits(&mut self, hidden: HiddenRows<'_>, _: Option<usize>) -> Result<Vec<f32>, GpuError> {
        let vocab = self.config.vocab_size as i32;
        let next = hidden.rows.iter().map(|&row| self.ids[row as usize] + 1);
        let one_hot = |next| (0..vocab).map(move |id| f32::from(u8::from(id == next)));
        Ok(next.flat_map(one_hot).collect())
    }

    fn draft(&mut self, _: DraftPass<'_>) -> Result<Option<Selected>, GpuError> {
        unreachable!("there is no MTP layer")
    }

    fn copy_block(&mut self, _: u32, _: u32) -> Result<(), GpuError> {
        Ok(())
    }

    fn synchronize(&self) -> Result<(), GpuError> {
        Ok(())
    }

    fn allocate_caches(&mut self, _: usize) -> Result<(), GpuError> {
        Ok(())
    }

    fn prepare_decode(&mut self, _: DecodeOptions) -> Result<Vec<CapturedStep>, GpuError> {
        Ok(vec![])
    }

    fn launch_step(
        &mut self,
        updates: &[TableUpdate<'_>],
        slots: &[SlotRecord<'_>],
    ) -> Result<(), GpuError> {
        let lens: Vec<u32> = slots.iter().map(|slot| slot.valid_len).collect();
        self.log.borrow_mut().push(format!("launch {lens:?}"));
        for update in updates {
            self.tables.borrow_mut().insert(update.table, update.blocks.to_vec());
        }
        let token = |slot: &SlotRecord<'_>| match slot.source {
            Some(row) => self.last[row as usize] + 1,
            None => slot.last_token as i32 + 1,
        };
        self.last = slots.iter().map(token).collect();
        self.steps.push_back(self.last.clone());
        Ok(())
    }

    fn collect_step(
        &mut self,
        n_slots: usize,
        show: &mut dyn FnMut(usize, SlotResult<'_>),
    ) -> Result<(), GpuError> {
        self.log.borrow_mut().push("collect".to_owned());
        let tokens = self.steps.pop_front().expect("a step is in flight");
        assert_eq!(tokens.len(), n_slots);
        for (slot, token) in tokens.into_iter().enumerate() {
            show(slot, SlotResult { tokens: &[token], drafts: &[] });
        }
        Ok(())
    }
}

fn config() -> ModelConfig {
    ModelConfig::load(&bundled_checkpoints::resolve("tiny-glm52", None).unwrap()).unwrap()
}

struct Bench {
    runner: GpuRunner,
    log: Log,
    tables: Rc<RefCell<BTreeMap<u32, Vec<i32>>>>,
    outcome: StepOutcome,
}

impl Bench {
    fn new() -> Self {
        let (config, options) = (config(), RunnerOptions::default());
        let planned = Planned { config: &config, num_mtp_layers: 0, kind: tch::Kind::Float };
        let limits = plan_limits(&options, planned).unwrap();
        let (log, tables) = (Log::default(), Rc::default());
        let model = NextNumber {
            config: config.clone(),
            log: Rc::clone(&log),
            ids: vec![],
            steps: VecDeque::new(),
            last: vec![],
            tables: Rc::clone(&tables),
        };
        let proposer = proposer(&config, (0, false), &options).unwrap();
        let subject = Subject::Gpu(GpuSubject::new(Box::new(model)));
        let runner = Runner::of(subject, limits, proposer, &options);
        let runner = GpuRunner::of(runner, Facts::of(&config, &limits, 64), None);
        Self { runner, log, tables, outcome: StepOutcome::default() }
    }

    /// Collects a step and returns the tokens of its rows, in the order of the requests.
    fn collect(&mut self) -> Vec<TokenId> {
        self.runner.collect(&mut self.outcome).unwrap();
        let mut rows = self.outcome.rows().to_vec();
        rows.sort_by_key(|row| row.request_id.0);
        rows.iter().flat_map(|row| self.outcome.tokens(row).to_vec()).collect()
    }

    fn log(&self) -> Vec<String> {
        std::mem::take(&mut *self.log.borrow_mut())
    }
}

/// A row at position `n_computed` that chooses a token.
fn row(n_computed: u32, prefill: bool) -> RowSpec {
    RowSpec { n_computed, samples: true, prefill, ..RowSpec::default() }
}

const FIRST: RowTable = RowTable { slot: 0, n_blocks: 1 };
const SECOND: RowTable = RowTable { slot: 1, n_blocks: 1 };

/// A decode step of request 1 whose last token is 10.
fn decode() -> StepPlan {
    let mut plan = StepPlan::default();
    let table = plan.update_table(0, 0, &[BlockId(3)]);
    plan.push_row(RequestId(1), row(4, false), &[10], &[], table);
    plan
}

/// The step behind it, in which request 2 comes with a prompt that ends with 20.
fn mixed() -> StepPlan {
    let mut plan = StepPlan::default();
    let table = plan.update_table(1, 0, &[BlockId(7)]);
    plan.push_row(RequestId(2), row(0, true), &[5, 20], &[], table);
    plan.push_deferred_row(RequestId(1), row(5, false), 0, FIRST);
    plan
}

/// The same where the host chooses for request 2.
fn drawn() -> StepPlan {
    let mut plan = StepPlan::default();
    push_drawn(&mut plan, (RequestId(2), 1), &[5, 20]);
    plan.push_deferred_row(RequestId(1), row(5, false), 0, FIRST);
    plan
}

/// A prompt of a request with a sampler.
fn push_drawn(plan: &mut StepPlan, (id, slot): (RequestId, u32), prompt: &[TokenId]) {
    let params = SamplingParams { top_k: 5, logprobs: Some(0), ..SamplingParams::default() };
    let sampler = Sampler { params, seed: 0, n_prompt: prompt.len() as u32, end_token_ids: vec![] };
    let sampler = Arc::new(sampler);
    plan.push_sampler(SamplerSetup { slot, sampler, tokens: prompt.to_vec() });
    let table = plan.update_table(slot, 0, &[BlockId(5 + slot)]);
    let spec = RowSpec { has_sampler: true, ..row(0, true) };
    plan.push_row(id, spec, prompt, &[], table);
}

#[test]
fn a_step_of_the_host_does_not_delay_the_tokens_before_it() {
    let mut bench = Bench::new();
    bench.runner.launch(&decode());
    bench.runner.launch(&drawn());
    assert_eq!(bench.log(), ["launch [4]"]);
    assert_eq!(bench.collect(), [11]);
    assert_eq!(bench.log(), ["collect"], "nothing of the second step has run");
    assert_eq!(bench.collect(), [12, 21]);
    assert_eq!(bench.log(), ["pass [5, 20]", "launch [5]", "collect"]);
}

#[test]
fn a_step_of_the_device_runs_the_waiting_one_before_it() {
    let mut bench = Bench::new();
    bench.runner.launch(&decode());
    bench.runner.launch(&drawn());
    assert_eq!(bench.collect(), [11]);
    bench.log();
    let mut plan = StepPlan::default();
    plan.push_deferred_row(RequestId(1), row(6, false), 1, FIRST);
    plan.push_deferred_row(RequestId(2), row(2, false), 0, SECOND);
    bench.runner.launch(&plan);
    assert_eq!(bench.log(), ["pass [5, 20]", "launch [5]", "collect", "launch [6, 2]"]);
    assert_eq!(bench.collect(), [12, 21]);
    assert_eq!(bench.collect(), [13, 22]);
    let told = [(0, vec![3]), (1, vec![6])];
    assert_eq!(*bench.tables.borrow(), BTreeMap::from(told));
}

/// Two waiting steps: what the second says of tables is not lost when the first one runs.
#[test]
fn tables_follow_the_steps_that_run() {
    let mut bench = Bench::new();
    let mut plan = StepPlan::default();
    push_drawn(&mut plan, (RequestId(2), 1), &[5, 20]);
    let table = plan.update_table(0, 0, &[BlockId(3)]);
    plan.push_row(RequestId(1), row(15, false), &[10], &[], table);
    bench.runner.launch(&plan);
    let mut plan = StepPlan::default();
    let table = plan.update_table(0, 1, &[BlockId(4)]);
    push_drawn(&mut plan, (RequestId(3), 2), &[30]);
    plan.push_deferred_row(RequestId(1), row(16, false), 1, table);
    bench.runner.launch(&plan);
    assert_eq!(bench.collect(), [11, 21]);
    assert_eq!(bench.tables.borrow()[&0], [3]);
    assert_eq!(bench.collect(), [12, 31]);
    assert_eq!(bench.tables.borrow()[&0], [3, 4]);
}

#[test]
fn greedy_prompts_are_queued_behind_what_is_in_flight() {
    let mut bench = Bench::new();
    bench.runner.launch(&decode());
    bench.runner.launch(&mixed());
    assert_eq!(bench.log(), ["launch [4]", "pass [5]", "launch [1, 5]"]);
    assert_eq!(bench.collect(), [11]);
    // Request 2 has slot 0 of the step before. A chunk of request 3 has none.
    let mut plan = StepPlan::default();
    let table = plan.update_table(2, 0, &[BlockId(9)]);
    plan.push_row(RequestId(3), RowSpec { samples: false, ..row(0, true) }, &[7, 8], &[], table);
    plan.push_deferred_row(RequestId(1), row(6, false), 1, FIRST);
    plan.push_deferred_row(RequestId(2), row(2, false), 0, SECOND);
    bench.runner.launch(&plan);
    assert_eq!(bench.log(), ["collect", "pass [7, 8]", "launch [6, 2]"]);
    assert_eq!(bench.collect(), [12, 21]);
    let mut plan = StepPlan::default();
    let third = RowTable { slot: 2, n_blocks: 1 };
    plan.push_row(RequestId(3), row(2, true), &[40], &[], third);
    plan.push_deferred_row(RequestId(2), row(3, false), 2, SECOND);
    bench.runner.launch(&plan);
    assert_eq!(bench.collect(), [13, 22]);
    assert_eq!(bench.outcome.rows().len(), 3, "the chunk is answered");
    assert_eq!(bench.log(), ["collect", "launch [2, 3]", "collect"]);
    assert_eq!(bench.collect(), [23, 41]);
}

#[test]
fn chunks_alone_end_a_step_without_slots() {
    let mut bench = Bench::new();
    let mut plan = StepPlan::default();
    let table = plan.update_table(2, 0, &[BlockId(9)]);
    plan.push_row(RequestId(3), RowSpec { samples: false, ..row(0, true) }, &[7, 8], &[], table);
    bench.runner.launch(&plan);
    assert_eq!(bench.log(), ["pass [7, 8]", "launch []"]);
    assert!(bench.collect().is_empty());
    assert_eq!((bench.log(), bench.outcome.rows().len()), (vec!["collect".to_owned()], 1));
}

#[test]
fn a_refused_prompt_takes_along_only_what_continues_it() {
    let mut bench = Bench::new();
    let mut plan = StepPlan::default();
    let table = plan.update_table(1, 0, &[BlockId(7)]);
    plan.push_row(RequestId(2), row(0, true), &[5, 1 << 20], &[], table);
    bench.runner.launch(&plan);
    let mut plan = StepPlan::default();
    let table = plan.update_table(0, 0, &[BlockId(3)]);
    plan.push_row(RequestId(1), row(4, false), &[10], &[], table);
    plan.push_deferred_row(RequestId(2), row(2, false), 0, SECOND);
    bench.runner.launch(&plan);
    let error = bench.runner.collect(&mut bench.outcome).unwrap_err();
    assert!(matches!(error, ExecutorError::Step(_)), "{error}");
    assert_eq!(bench.collect(), [11]);
    assert_eq!(bench.outcome.rows().len(), 2);
}

const GIB: usize = 1 << 30;

/// Without a bound of the pool.
fn options() -> RunnerOptions {
    RunnerOptions { kv_cache_bytes: u64::MAX, ..RunnerOptions::default() }
}

fn plan(free: usize, options: &RunnerOptions) -> Result<GpuPlan, RunnerError> {
    plan_of(&config(), free, options)
}

fn plan_of(
    config: &ModelConfig,
    free: usize,
    options: &RunnerOptions,
) -> Result<GpuPlan, RunnerError> {
    let mut tensors = config.target_tensors();
    tensors.extend(config.all_mtp_tensors());
    let memory = Memory { free, total: 10 * GIB };
    GpuPlan::new(memory, config, &tensors, ComputeDtype::Bfloat16, options)
}

#[test]
fn an_architecture_without_a_gpu_model_is_refused_by_name() {
    let fixtures = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/fixtures");
    for (name, architecture) in [("glm4-moe-mha", "Glm4Moe"), ("v2-softmax", "DeepseekV2")] {
        let config = ModelConfig::load(&Path::new(fixtures).join(name)).unwrap();
        let error = plan_of(&config, 9 * GIB, &RunnerOptions::default()).unwrap_err();
        let expected = format!("{architecture} does not run on a GPU: give --device cpu");
        assert_eq!(error.to_string(), expected);
    }
}

#[test]
fn the_pool_takes_what_everything_else_leaves() {
    // So many requests that the pool is not bounded by what they need.
    let options = RunnerOptions {
        num_speculative_tokens: 3,
        max_num_seqs: 4096,
        gpu_memory_utilization: 0.5,
        ..options()
    };
    let plan = plan(9 * GIB, &options).unwrap();
    let memory = plan.memory;
    assert_eq!(memory.spared, 5 << 30);
    let values: usize = config().target_tensors().iter().map(|spec| spec.n_values()).sum();
    assert!(memory.weights > 2 * values as u64, "two bytes a value, and an MTP layer");
    assert_eq!((memory.num_graphs, memory.graphs), (35, 35 * (16 << 20)));
    assert_eq!(u64::from(plan.limits.num_blocks), memory.num_blocks);
    let items = memory.items().map(|(_, bytes)| bytes);
    assert_eq!(items.iter().sum::<u64>(), memory.taken());
    assert!(memory.left().unwrap() < memory.block, "a block more would not fit");
    assert_eq!(memory.taken() + memory.left().unwrap(), 4 << 30);
}

#[test]
fn a_few_requests_leave_the_rest_free() {
    let options = RunnerOptions { gpu_graphs: false, ..options() };
    let plan = plan(9 * GIB, &options).unwrap();
    let per_seq = config().max_position_embeddings.div_ceil(16) as u64;
    assert_eq!(plan.memory.num_blocks, 64 * per_seq);
    assert_eq!(plan.memory.graphs, 0);
    let table = plan.memory.to_string();
    assert_eq!(table.lines().count(), 9, "{table}");
    let last: Vec<&str> = table.lines().last().unwrap().split_whitespace().collect();
    assert_eq!(last, ["spared", "1024.0", "MiB"]);
}

#[test]
fn a_bound_of_the_pool_holds_on_a_gpu() {
    let block = plan(9 * GIB, &options()).unwrap().memory.block;
    let bounded = |kv_cache_bytes| RunnerOptions { kv_cache_bytes, ..options() };
    let plan_of = |kv_cache_bytes| plan(9 * GIB, &bounded(kv_cache_bytes));
    assert_eq!(plan_of(5 * block + 1).unwrap().memory.num_blocks, 5);
    let given = RunnerOptions { num_blocks: Some(7), ..bounded(block) };
    assert_eq!(plan(9 * GIB, &given).unwrap().memory.num_blocks, 7);
    let error = plan_of(block - 1).unwrap_err().to_string();
    assert!(error.contains(&format!("one KV block needs {block} bytes")), "{error}");
}

#[test]
fn steps_are_captured_for_sizes_that_leave_few_slots_empty() {
    let options = RunnerOptions { max_num_seqs: 150, ..options() };
    let expected = [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 150];
    assert_eq!(plan(9 * GIB, &options).unwrap().sizes, expected);
    let one = RunnerOptions { max_num_seqs: 1, ..options };
    assert_eq!(plan(9 * GIB, &one).unwrap().sizes, [1]);
}

#[test]
fn more_rows_than_a_kernel_can_have_are_refused() {
    let seqs = RunnerOptions { max_num_seqs: 65_536, ..RunnerOptions::default() };
    let tokens = RunnerOptions { max_num_batched_tokens: 65_536, ..RunnerOptions::default() };
    for (options, name) in [(seqs, "max_num_seqs"), (tokens, "max_num_batched_tokens")] {
        let error = plan(9 * GIB, &options).unwrap_err().to_string();
        assert!(error.contains(&format!("a GPU does not run {name}")), "{error}");
    }
}

#[test]
fn what_does_not_fit_is_refused_with_the_sum() {
    let small = RunnerOptions { gpu_memory_utilization: 0.001, ..RunnerOptions::default() };
    let large = RunnerOptions { num_blocks: Some(1 << 20), ..RunnerOptions::default() };
    for (options, room, blocks) in
        [(small, "0.0 KiB", "1 KV blocks"), (large, "9.00 GiB", "1048576 KV")]
    {
        let error = plan(9 * GIB, &options).unwrap_err().to_string();
        assert!(error.contains(&format!("the GPU has room for {room}: ")), "{error}");
        let parts =
            ["weights (", " + workspace (", " + libraries (256.0 MiB) + 11 graphs ", blocks];
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
        assert!(error.contains("; raise gpu_memory_utilization, or lower max_num_seqs"), "{error}");
    }
}

//! The step executor of a GPU: the device alone runs what is greedy, and [`Runner`] the rest.

use std::collections::{BTreeSet, VecDeque};

use engine_types::{
    BlockId, ExecutorError, ExecutorLimits, IndexerStats, MAX_STEPS_IN_FLIGHT, PlanRow,
    StepExecutor, StepOutcome, StepPlan, TokenId, TokenSource,
};
use gpu_model::{
    AnyModel, CapturedStep, DecodeOptions, GpuModel, ModelError, PassLimits, SlotRecord,
    StepGraphs, TableUpdate,
};
use gpu_runtime::Gpu;
use half::bf16;
use model_config::ModelConfig;
use models::ComputeDtype;
use spec_decode::SyntheticAcceptance;
use weights::TensorMap;

use crate::error::RunnerError;
use crate::gpu::GpuSubject;
use crate::limits::RunnerOptions;
use crate::runner::{Runner, proposer};
use crate::subject::Subject;

mod counts;
mod plan;
mod split;
#[cfg(test)]
mod tests;

use counts::Counts;
use plan::Size;
pub use plan::{GpuPlan, MemoryPlan};
use split::{before_slots, has_slot, n_before, slots, slots_of_rows};

/// A model on a GPU with its KV caches, behind [`StepExecutor`].
///
/// Rows whose tokens follow greedily are slots of a *decode step*, which the device runs by itself;
/// the prompts before them are passes that nothing is read of. A step that has nothing else is
/// queued on the device when it is launched, whatever is in flight before it: lengths, tokens and
/// drafts that are in flight are taken from the step before on the device. Any other step waits for
/// what is in flight, and the host chooses its tokens.
pub struct GpuRunner {
    runner: Runner,
    /// Launched and not collected.
    steps: VecDeque<Launched>,
    /// For each row of the step launched last, which slot it has if it has one; `None` if that
    /// step is not on the device.
    last_slots: Option<Vec<u32>>,
    /// The outcome of the step collected last, if it did not fail.
    previous: Option<StepOutcome>,
    /// Tables that changed since the device was told.
    changed: BTreeSet<u32>,
    synthetic: Option<SyntheticAcceptance>,
    index_share: bool,
    facts: Facts,
}

#[derive(Clone, Copy)]
struct Facts {
    /// The most rows of a decode step; 0 where the device runs none as a whole.
    max_slots: usize,
    topk: u64,
    /// Indexers of the target.
    n_indexers: u64,
    /// Whether the draft layer has one.
    drafts_have_indexer: bool,
}

impl Facts {
    fn of(config: &ModelConfig, limits: &ExecutorLimits, max_slots: usize) -> Self {
        let drafts = limits.max_num_speculative_tokens;
        let layers = 0..config.num_hidden_layers;
        Self {
            max_slots,
            topk: config.dsa.as_ref().map_or(0, |dsa| dsa.index_topk as u64),
            n_indexers: layers.filter(|&idx| config.has_indexer(idx)).count() as u64,
            drafts_have_indexer: drafts > 0 && config.has_indexer(config.num_hidden_layers),
        }
    }
}

/// Puts a model on the device; with its MTP layers or without.
fn load(
    gpu: &Gpu,
    (config, tensors, with): (ModelConfig, TensorMap, (bool, PassLimits)),
    dtype: ComputeDtype,
) -> Result<Box<dyn AnyModel>, ModelError> {
    Ok(match dtype {
        ComputeDtype::Float32 => Box::new(GpuModel::<f32>::load(gpu, config, tensors, with)?),
        ComputeDtype::Bfloat16 => Box::new(GpuModel::<bf16>::load(gpu, config, tensors, with)?),
    })
}

/// The graphs of steps by their slots.
fn described(captured: &[CapturedStep]) -> String {
    let of = |step: &CapturedStep| {
        let CapturedStep { n_slots, n_launches, n_bytes } = *step;
        format!("{n_slots}: {n_launches} launches, {}", Size(n_bytes as u64))
    };
    captured.iter().map(of).collect::<Vec<_>>().join("; ")
}

struct Launched {
    plan: StepPlan,
    run: Run,
}

enum Run {
    /// With the outcome of the passes before its decode step.
    OnDevice(Box<StepOutcome>),
    /// Runs when it is collected, or before the next step that runs on the device: what is in
    /// flight before it is delivered first.
    Waiting,
    Done(Box<Result<StepOutcome, ExecutorError>>),
}

impl GpuRunner {
    /// Puts a model on the device, as `plan` says.
    ///
    /// # Errors
    ///
    /// [`RunnerError`] as of [`Runner::new`], or if the device fails or has no room.
    pub fn new(
        gpu: &Gpu,
        config: &ModelConfig,
        tensors: TensorMap,
        plan: &GpuPlan,
        options: &RunnerOptions,
    ) -> Result<Self, RunnerError> {
        let (limits, drafts) = (plan.limits, options.num_speculative_tokens as usize);
        let free = || gpu.memory().map(|memory| memory.free as u64).map_err(ModelError::from);
        let before = free()?;
        let of = (config.clone(), tensors, (drafts > 0, plan.pass_limits()));
        let mut model = load(gpu, of, plan.dtype)?;
        let loaded = before.saturating_sub(free()?);
        model.allocate_caches(limits.num_blocks as usize).map_err(ModelError::from)?;
        let facts = (plan.num_mtp_layers, model.can_share_selection());
        let proposer = proposer(config, facts, options)?;
        let index_share = proposer.shares_index();
        let captured = match &plan.sizes[..] {
            [] => vec![],
            sizes => model
                .prepare_decode(DecodeOptions {
                    num_speculative_tokens: drafts,
                    index_share,
                    sizes: sizes.to_vec(),
                    graphs: if options.gpu_graphs { StepGraphs::Whole } else { StepGraphs::None },
                    is_forced: options.synthetic_acceptance.is_some(),
                })
                .map_err(ModelError::from)?,
        };
        tracing::info!(
            device = gpu.info().name,
            num_blocks = limits.num_blocks,
            weights_and_workspace = %Size(loaded),
            of_plan = %Size(plan.memory.weights + plan.memory.workspace),
            free = %Size(free()?),
            graphs = described(&captured),
            "runner ready on the GPU"
        );
        let subject = Subject::Gpu(GpuSubject::new(model));
        let runner = Runner::of(subject, limits, proposer, options);
        let max_slots = plan.sizes.last().copied().unwrap_or(0);
        let facts = Facts::of(config, &limits, max_slots);
        Ok(Self::of(runner, facts, options.synthetic_acceptance.clone()))
    }

    fn of(runner: Runner, facts: Facts, synthetic: Option<SyntheticAcceptance>) -> Self {
        Self {
            index_share: runner.shares_index(),
            runner,
            steps: VecDeque::new(),
            last_slots: None,
            previous: None,
            changed: BTreeSet::new(),
            synthetic,
            facts,
        }
    }

    /// Whether draft steps after the first reuse its selection of keys.
    #[must_use]
    pub fn shares_index(&self) -> bool {
        self.index_share
    }

    /// Whether rows of the step can be slots. Tokens that do not exist are for the host to refuse.
    fn has_slots(&self, plan: &StepPlan) -> bool {
        let vocab_size = self.runner.limits().vocab_size;
        (1..=self.facts.max_slots).contains(&plan.rows().len())
            && plan.copies().is_empty()
            && plan.all_tokens().iter().all(|&id| id < vocab_size)
    }

    /// Whether the device can run the step without the host.
    fn is_on_device(&self, plan: &StepPlan) -> bool {
        let needs_no_host = |row: &PlanRow| has_slot(plan, row) || !row.samples && !row.has_sampler;
        self.has_slots(plan) && plan.rows().iter().all(needs_no_host)
    }

    /// How many drafts of each slot are accepted, for benches.
    fn forced(&self, plan: &StepPlan) -> Vec<u32> {
        let mut first = 0;
        let mut forced = Vec::new();
        for row in plan.rows() {
            let n_drafts = row.n_draft as usize;
            if has_slot(plan, row) {
                let of = |synthetic: &SyntheticAcceptance| {
                    synthetic.n_accepted(plan.step_id.0, first, n_drafts) as u32
                };
                forced.push(self.synthetic.as_ref().map_or(0, of));
            }
            // Rows of logits.
            first += if row.samples { n_drafts + 1 } else { 0 };
        }
        forced
    }

    /// Queues the passes of a step, then its decode step, and returns the outcome of the passes.
    fn queue(&mut self, plan: &StepPlan) -> Result<StepOutcome, ExecutorError> {
        let mut outcome = StepOutcome::default();
        self.run_by_passes(&before_slots(plan), &mut outcome)?;
        outcome.keep_rows(|row| slots(plan).all(|slot| slot.request_id != row.request_id));
        self.launch_slots(plan)?;
        Ok(outcome)
    }

    /// Queues a decode step. Rows whose tokens are in flight continue the slots of the step that
    /// the device ran last.
    fn launch_slots(&mut self, plan: &StepPlan) -> Result<(), ExecutorError> {
        let mut records = Vec::with_capacity(plan.rows().len());
        for (row, forced) in slots(plan).zip(self.forced(plan)) {
            let source = match row.source {
                TokenSource::Host => None,
                TokenSource::InFlight { row } => {
                    let slots = self.last_slots.as_ref().expect("the step before is on the device");
                    Some(slots[row as usize])
                }
            };
            records.push(SlotRecord {
                source,
                table: row.table.slot,
                valid_len: row.n_computed + n_before(row),
                last_token: plan.tokens(row).get(n_before(row) as usize).copied().unwrap_or(0),
                n_drafts: row.n_draft,
                n_wanted: row.n_propose,
                forced,
                drafts: plan.drafts(row),
            });
        }
        let tables: Vec<(u32, Vec<i32>)> = slots(plan)
            .filter(|row| self.changed.remove(&row.table.slot))
            .map(|row| {
                let blocks = self.runner.tables.blocks(row.table).iter();
                (row.table.slot, blocks.map(|&BlockId(block)| block.cast_signed()).collect())
            })
            .collect();
        let updates: Vec<TableUpdate<'_>> =
            tables.iter().map(|(table, blocks)| TableUpdate { table: *table, blocks }).collect();
        let result = self.with_model(|model| model.launch_step(&updates, &records));
        // A device that does not take a step takes none behind it.
        result.map_err(|error| ExecutorError::Fatal(format!("{}: the GPU: {error}", plan.step_id)))
    }

    fn with_model<T>(&self, run: impl FnOnce(&mut dyn AnyModel) -> T) -> T {
        let Subject::Gpu(subject) = &self.runner.subject else {
            unreachable!("the runner's subject is on the GPU")
        };
        run(subject.model.borrow_mut().as_mut())
    }

    /// Ends the steps in flight, whose outcomes are kept until they are collected.
    fn settle(&mut self) {
        for idx in 0..self.steps.len() {
            let Launched { plan, run } = &mut self.steps[idx];
            if matches!(run, Run::Done(_)) {
                continue;
            }
            let plan = std::mem::take(plan);
            let run = std::mem::replace(run, Run::Waiting);
            let before = match idx.checked_sub(1).map(|before| &self.steps[before].run) {
                None => self.previous.clone(),
                Some(Run::Done(outcome)) => outcome.as_ref().as_ref().ok().cloned(),
                Some(_) => unreachable!("steps end in their order"),
            };
            let outcome = self.end(&plan, run, before.as_ref());
            self.steps[idx] = Launched { plan, run: Run::Done(Box::new(outcome)) };
        }
    }

    /// The outcome of a step, behind the one before it if that did not fail.
    fn end(
        &mut self,
        plan: &StepPlan,
        run: Run,
        before: Option<&StepOutcome>,
    ) -> Result<StepOutcome, ExecutorError> {
        match run {
            Run::OnDevice(passes) => self.read(plan, before, *passes),
            Run::Waiting => self.run_on_host(plan, before),
            Run::Done(outcome) => *outcome,
        }
    }

    /// Waits for the oldest decode step and adds its outcome to that of the passes before it.
    fn read(
        &self,
        plan: &StepPlan,
        before: Option<&StepOutcome>,
        mut outcome: StepOutcome,
    ) -> Result<StepOutcome, ExecutorError> {
        let mut counts = Counts::new(self.facts, self.index_share);
        let (mut tokens, mut drafts): (Vec<TokenId>, Vec<TokenId>) = (vec![], vec![]);
        let rows: Vec<&PlanRow> = slots(plan).collect();
        let result = self.with_model(|model| {
            model.collect_step(rows.len(), &mut |slot, result| {
                let row = rows[slot];
                let known = |ids: &[i32], to: &mut Vec<TokenId>| {
                    to.clear();
                    to.extend(ids.iter().map(|id| id.cast_unsigned()));
                };
                known(result.tokens, &mut tokens);
                known(result.drafts, &mut drafts);
                let continued = continued(row, before);
                match (tokens.len(), continued) {
                    (0, Continued::Nothing) => outcome.push_row(row.request_id, &[], 0, &[]),
                    (0, _) => {
                        let why = "the model's logits hold a NaN";
                        outcome.push_failed_row(row.request_id, why.to_owned());
                    }
                    // What a NaN ended is not as the plan says, and its request ends alone.
                    _ if drafts.len() != row.n_propose as usize => {
                        let why = "the logits of a draft have a NaN";
                        outcome.push_failed_row(row.request_id, why.to_owned());
                    }
                    (n, continued) => {
                        counts.add(row, continued.n_accepted(), n, drafts.len());
                        outcome.push_row(row.request_id, &tokens, n as u32 - 1, &drafts);
                    }
                }
            })
        });
        let failed = |error| ExecutorError::Fatal(format!("{}: the GPU: {error}", plan.step_id));
        result.map_err(failed)?;
        let Counts { target: target_verify, drafts: draft_steps, .. } = counts;
        outcome.indexer += &IndexerStats { target_verify, draft_steps, ..IndexerStats::default() };
        Ok(outcome)
    }

    /// Runs a step that the host has a part in.
    fn run_on_host(
        &mut self,
        plan: &StepPlan,
        before: Option<&StepOutcome>,
    ) -> Result<StepOutcome, ExecutorError> {
        self.changed.extend(plan.table_updates().map(|update| update.slot));
        let mut resolved = StepPlan::default();
        resolved.resolve(plan, before);
        let mut outcome = self.run_resolved(&resolved)?;
        if resolved.rows().len() < plan.rows().len() {
            let ran = |id| resolved.rows().iter().any(|row| row.request_id == id);
            let left_out = plan.rows().iter().map(|row| row.request_id).filter(|id| !ran(*id));
            left_out.for_each(|id| outcome.push_row(id, &[], 0, &[]));
        }
        Ok(outcome)
    }
}

impl GpuRunner {
    /// Runs a step pass by pass. One that failed with the device is the last one.
    fn run_by_passes(
        &mut self,
        plan: &StepPlan,
        outcome: &mut StepOutcome,
    ) -> Result<(), ExecutorError> {
        let result = self.runner.run(plan, outcome);
        let Err(ExecutorError::Step(message)) = result else { return result };
        match self.with_model(|model| model.synchronize()) {
            Ok(()) => Err(ExecutorError::Step(message)),
            Err(_) => Err(ExecutorError::Fatal(message)),
        }
    }

    /// Runs a step whose tokens are known: its slots on the device, where drafting costs no way
    /// back to the host, and the other rows pass by pass.
    fn run_resolved(&mut self, plan: &StepPlan) -> Result<StepOutcome, ExecutorError> {
        if self.has_slots(plan) && slots(plan).next().is_some() {
            let passes = self.queue(plan)?;
            return self.read(plan, None, passes);
        }
        let mut outcome = StepOutcome::default();
        self.run_by_passes(plan, &mut outcome)?;
        Ok(outcome)
    }
}

/// What a row continues.
#[derive(Clone, Copy)]
enum Continued {
    /// Tokens that the plan had.
    Known,
    /// A row of the step before that accepted so many drafts.
    Row { n_accepted: u32 },
    /// A row without a token, so that there is nothing to run.
    Nothing,
}

impl Continued {
    fn n_accepted(self) -> u32 {
        if let Self::Row { n_accepted } = self { n_accepted } else { 0 }
    }
}

fn continued(row: &PlanRow, before: Option<&StepOutcome>) -> Continued {
    let TokenSource::InFlight { row: source } = row.source else { return Continued::Known };
    let answer = before.and_then(|outcome| {
        let answer = outcome.row_near(source as usize, row.request_id)?;
        (!outcome.tokens(answer).is_empty()).then_some(answer)
    });
    match answer {
        Some(answer) => Continued::Row { n_accepted: answer.n_accepted },
        None => Continued::Nothing,
    }
}

impl StepExecutor for GpuRunner {
    fn limits(&self) -> ExecutorLimits {
        self.runner.limits()
    }

    fn launch(&mut self, plan: &StepPlan) {
        assert!(self.steps.len() < MAX_STEPS_IN_FLIGHT, "too many steps in flight");
        let mut plan = plan.clone();
        let mut is_on_device = self.is_on_device(&plan);
        if is_on_device && self.last_slots.is_none() {
            // The device does not know the tokens of the step before.
            self.settle();
            let before = match self.steps.back().map(|step| &step.run) {
                Some(Run::Done(outcome)) => outcome.as_ref().as_ref().ok(),
                _ => self.previous.as_ref(),
            };
            let mut resolved = StepPlan::default();
            resolved.resolve(&plan, before);
            // A row that is left out is answered without tokens.
            is_on_device = resolved.rows().len() == plan.rows().len();
            if is_on_device {
                plan = resolved;
            }
        }
        let mut run = Run::Waiting;
        let mut last_slots = None;
        if is_on_device {
            self.changed.extend(plan.table_updates().map(|update| update.slot));
            run = match self.queue(&plan) {
                Ok(passes) => {
                    last_slots = Some(slots_of_rows(&plan));
                    Run::OnDevice(Box::new(passes))
                }
                Err(error) => Run::Done(Box::new(Err(error))),
            };
        }
        self.last_slots = last_slots;
        self.steps.push_back(Launched { plan, run });
    }

    fn collect(&mut self, outcome: &mut StepOutcome) -> Result<(), ExecutorError> {
        let Launched { plan, run } = self.steps.pop_front().expect("a step was launched");
        let before = self.previous.take();
        self.end(&plan, run, before.as_ref()).map(|ended| {
            outcome.clone_from(&ended);
            self.previous = Some(ended);
        })
    }
}

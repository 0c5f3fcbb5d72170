//! The step executor: one target pass over all rows, then verification, then drafts.

use attention_backends::{AttentionBackend, CpuBackend, DeviceLayout, ReferenceBackend};
use batch_layout::BatchLayout;
use engine_types::{
    BlockTables, ExecutorError, ExecutorLimits, IndexerStats, PlanRow, StepExecutor, StepOutcome,
    StepPlan, StepQueue, TokenId,
};
use models::{DeepseekMtp, ForwardContext, ForwardOutput, LoadedModel};
use spec_decode::{AcceptedRuns, DraftMethod, DraftSeq, EagleProposer, IndexShareFacts};
use tch::{Device, Tensor};

use crate::error::{RunnerError, StepError};
use crate::kv_cache::KvCache;
use crate::limits::{AttentionChoice, RunnerOptions, n_bytes_per_slot, plan_limits};
use crate::staging::{Staging, check_table};

/// A model with its KV caches, behind [`StepExecutor`]. A step runs when it is collected.
pub struct Runner {
    model: LoadedModel,
    backend: Box<dyn AttentionBackend>,
    limits: ExecutorLimits,
    pub(crate) kv_cache: KvCache,
    queue: StepQueue,
    tables: BlockTables,
    staging: Staging,
    target_ids: Vec<TokenId>,
    runs: AcceptedRuns,
    proposer: EagleProposer,
}

impl StepExecutor for Runner {
    fn limits(&self) -> ExecutorLimits {
        self.limits
    }

    fn launch(&mut self, plan: &StepPlan) {
        self.queue.launch(plan);
    }

    fn collect(&mut self, outcome: &mut StepOutcome) -> Result<(), ExecutorError> {
        // Taken out while the rest of the runner runs the step.
        let mut queue = std::mem::take(&mut self.queue);
        let result = queue.collect(outcome, |plan, outcome| self.run(plan, outcome));
        self.queue = queue;
        result
    }
}

impl Runner {
    /// Allocates the KV caches of `model` and plans its limits.
    ///
    /// # Errors
    ///
    /// [`RunnerError`] if an option is outside its bounds, drafts are wanted of a model that was
    /// loaded without MTP layers, or memory is short.
    pub fn new(model: LoadedModel, options: &RunnerOptions) -> Result<Self, RunnerError> {
        let limits = plan_limits(options, &model)?;
        let n_slots = i64::from(limits.num_blocks) * i64::from(limits.block_size);
        let caches = model.new_caches(n_slots, options.index_cache_dtype, options.kv_init);
        let caches = caches.map_err(|_| RunnerError::KvAllocation {
            num_blocks: limits.num_blocks,
            n_bytes: n_slots as u64 * n_bytes_per_slot(options, &model) as u64,
        })?;
        let kv_cache = KvCache::new(caches, limits.block_size);
        let backend: Box<dyn AttentionBackend> = match (options.attention, model.device) {
            (AttentionChoice::Auto, Device::Cpu) => Box::new(CpuBackend),
            _ => Box::new(ReferenceBackend),
        };
        let proposer = proposer(&model, options)?;
        tracing::info!(
            num_blocks = limits.num_blocks,
            block_size = limits.block_size,
            kv_bytes = kv_cache.n_bytes(),
            attention = backend.name(),
            num_speculative_tokens = limits.max_num_speculative_tokens,
            num_mtp_layers = model.num_mtp_layers(),
            index_share = proposer.shares_index(),
            "runner ready"
        );
        if proposer.shares_index() {
            tracing::info!(
                "MTP draft index_share_for_mtp_iteration enabled: step 0 computes indexer top-k, \
                 steps 1+ reuse the buffer."
            );
        }
        Ok(Self {
            model,
            backend,
            limits,
            kv_cache,
            queue: StepQueue::default(),
            tables: BlockTables::default(),
            staging: Staging::new(limits.block_size),
            target_ids: Vec::new(),
            runs: AcceptedRuns::default(),
            proposer,
        })
    }

    /// Whether draft steps after the first reuse its selection of keys.
    #[must_use]
    pub fn shares_index(&self) -> bool {
        self.proposer.shares_index()
    }

    /// Runs a step whose tokens are known. The block tables follow the plan even if it is refused.
    fn run(&mut self, plan: &StepPlan, outcome: &mut StepOutcome) -> Result<(), ExecutorError> {
        let at_step = |error: String| format!("{}: {error}", plan.step_id);
        // Without its changes, no table of a later plan can be trusted.
        let no_table = |error| ExecutorError::Fatal(at_step(error));
        let mut updates = plan.table_updates();
        updates.try_for_each(|u| check_table(u.slot, &self.limits)).map_err(no_table)?;
        self.tables.update(plan);
        let failed = |error| ExecutorError::Step(at_step(error));
        self.staging.fill(plan, &self.tables, &self.limits).map_err(failed)?;
        tch::no_grad(|| self.step(plan, outcome)).map_err(|error| failed(error.to_string()))
    }

    fn step(&mut self, plan: &StepPlan, outcome: &mut StepOutcome) -> Result<(), StepError> {
        self.kv_cache.copy_blocks(plan.copies())?;
        if plan.is_empty() {
            return Ok(());
        }
        let output = self.forward(&self.staging.ids, &self.staging.layout)?;
        let is_prefill = plan.rows().iter().any(|row| row.prefill);
        let IndexerStats { target_prefill, target_verify, .. } = &mut outcome.indexer;
        *(if is_prefill { target_prefill } else { target_verify }) = output.indexer;
        self.verify(&output.hidden)?;
        self.propose(plan, &output.hidden, outcome)
    }

    /// Runs the target over all rows.
    pub(crate) fn forward(
        &self,
        ids: &[i64],
        layout: &BatchLayout,
    ) -> Result<ForwardOutput, StepError> {
        let cx = ForwardContext {
            layout: &DeviceLayout::upload(layout, self.model.device),
            caches: self.kv_cache.layers(),
            backend: self.backend.as_ref(),
        };
        Ok(self.model.target.forward(&self.upload(ids)?, &cx)?)
    }

    /// Logits of hidden states, f32 `[R, vocab]`.
    pub(crate) fn logits(&self, hidden: &Tensor) -> Result<Tensor, StepError> {
        Ok(self.model.target.logits(hidden)?)
    }

    pub(crate) fn upload(&self, values: &[i64]) -> Result<Tensor, StepError> {
        Ok(Tensor::f_from_slice(values)?.f_to_device(self.model.device)?)
    }

    /// Chooses the target's token at every logits row and verifies the drafts against them.
    fn verify(&mut self, hidden: &Tensor) -> Result<(), StepError> {
        let metadata = &self.staging.metadata;
        self.target_ids.clear();
        if metadata.n_seqs() > 0 {
            let rows = self.upload(metadata.logits_rows())?;
            let logits = self.logits(&hidden.f_index_select(0, &rows)?)?;
            sampler::greedy(&logits, &mut self.target_ids)?;
        }
        self.runs.verify_greedy(metadata, &self.target_ids);
        Ok(())
    }

    /// Drafts for the next step and fills the outcome.
    fn propose(
        &mut self,
        plan: &StepPlan,
        hidden: &Tensor,
        outcome: &mut StepOutcome,
    ) -> Result<(), StepError> {
        let run_of = |row_idx| match self.staging.sampling_idx(row_idx) {
            Some(seq) => self.runs.run(seq),
            None => &[],
        };
        let mut drafts: &[Vec<TokenId>] = &[];
        if let Some(mtp) = &self.model.mtp {
            let drafted = plan.rows().iter().enumerate().filter(|(_, row)| row.drafting);
            let seqs: Vec<DraftSeq<'_>> = drafted
                .map(|(row_idx, row)| {
                    draft_seq(plan, row, run_of(row_idx), self.staging.blocks(row_idx))
                })
                .collect();
            let drafter = mtp.bind(self.kv_cache.layers(), self.backend.as_ref());
            let proposal = self.proposer.propose(&drafter, &seqs, hidden)?;
            outcome.indexer.draft_steps = *proposal.indexer;
            drafts = proposal.drafts;
        }
        let mut drafts = drafts.iter().map(Vec::as_slice);
        for (row_idx, row) in plan.rows().iter().enumerate() {
            let run = run_of(row_idx);
            let n_accepted = run.len().saturating_sub(1) as u32;
            let proposed = if row.drafting { drafts.next() } else { None };
            outcome.push_row(row.request_id, run, n_accepted, proposed.unwrap_or(&[]));
        }
        Ok(())
    }
}

/// The proposer that `options` ask for, with index sharing on or off.
fn proposer(model: &LoadedModel, options: &RunnerOptions) -> Result<EagleProposer, RunnerError> {
    let k = options.num_speculative_tokens as usize;
    let dsa = model.config.dsa.as_ref();
    let facts = IndexShareFacts {
        method: if k > 0 { DraftMethod::Mtp } else { DraftMethod::None },
        config_flag: dsa.is_some_and(|dsa| dsa.index_share_for_mtp_iteration),
        index_topk: dsa.map(|dsa| dsa.index_topk),
        draft_model_can_share: model.mtp.as_ref().is_some_and(DeepseekMtp::can_share_selection),
    };
    let mut proposer = EagleProposer::new(k, model.num_mtp_layers(), options.block_size)?;
    let is_shared = options.index_share.resolve(&facts);
    proposer.share_index(is_shared.map_err(|reason| RunnerError::IndexShare { reason })?);
    Ok(proposer)
}

/// What the drafter needs to know of a row whose accepted run is `run`, empty for a middle chunk.
fn draft_seq<'a>(
    plan: &'a StepPlan,
    row: &PlanRow,
    run: &'a [TokenId],
    blocks: &'a [u32],
) -> DraftSeq<'a> {
    let n_accepted = run.len().saturating_sub(1);
    let n_valid = (row.n_query - row.n_draft) as usize + n_accepted;
    let first_row = row.token_span().range().start;
    DraftSeq {
        first_position: row.n_computed,
        rows: first_row..first_row + n_valid,
        tokens: &plan.tokens(row)[..n_valid],
        following: if row.samples { &run[n_accepted..] } else { plan.lookahead(row) },
        blocks,
        n_propose: row.n_propose as usize,
    }
}

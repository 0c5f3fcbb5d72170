//! The step executor: one target pass over all rows, then verification, then drafts.

use attention_backends::{AttentionBackend, CpuBackend, ReferenceBackend};
use batch_layout::BatchLayout;
use engine_types::{
    BlockTables, ExecutorError, ExecutorLimits, IndexerStats, PlanRow, StepExecutor, StepOutcome,
    StepPlan, StepQueue, StepTokens, TokenId, TokenLogprobs,
};
use model_config::ModelConfig;
use models::{ForwardOutput, LoadedModel, MtpLayers};
use spec_decode::{DraftMethod, DraftSeq, EagleProposer, IndexShareFacts};
use tch::{Device, Tensor};

use crate::drawn::DrawnDrafts;
use crate::error::{RunnerError, StepError};
use crate::kv_cache::KvCache;
use crate::limits::{
    AttentionChoice, DraftSampling, Planned, RunnerOptions, n_bytes_per_slot, plan_limits,
};
use crate::samplers::Samplers;
use crate::staging::{Staging, check_table};
use crate::subject::{Subject, TorchSubject};
use crate::verify::{StepInput, Verifier};

/// A model with its KV caches, behind [`StepExecutor`]. A step runs when it is collected.
pub struct Runner {
    pub(crate) subject: Subject,
    limits: ExecutorLimits,
    queue: StepQueue,
    pub(crate) tables: BlockTables,
    pub(crate) samplers: Samplers,
    staging: Staging,
    verifier: Verifier,
    proposer: EagleProposer,
    draft_sampling: DraftSampling,
    drawn: DrawnDrafts,
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
        let (num_mtp_layers, kind) = (model.num_mtp_layers(), model.dtype.kind());
        let planned = Planned { config: &model.config, num_mtp_layers, kind };
        let limits = plan_limits(options, planned)?;
        let n_slots = i64::from(limits.num_blocks) * i64::from(limits.block_size);
        let caches = model.new_caches(n_slots, options.index_cache_dtype, options.kv_init);
        let caches = caches.map_err(|_| RunnerError::KvAllocation {
            num_blocks: limits.num_blocks,
            n_bytes: n_slots as u64 * n_bytes_per_slot(options, planned) as u64,
        })?;
        let kv_cache = KvCache::new(caches, limits.block_size);
        let backend: Box<dyn AttentionBackend> = match (options.attention, model.device) {
            (AttentionChoice::Auto, Device::Cpu) => Box::new(CpuBackend),
            _ => Box::new(ReferenceBackend),
        };
        let can_share = model.mtp.as_ref().is_some_and(MtpLayers::can_share_selection);
        let proposer = proposer(&model.config, (num_mtp_layers, can_share), options)?;
        tracing::info!(
            num_blocks = limits.num_blocks,
            block_size = limits.block_size,
            kv_bytes = kv_cache.n_bytes(),
            attention = backend.name(),
            num_speculative_tokens = limits.max_num_speculative_tokens,
            num_mtp_layers,
            index_share = proposer.shares_index(),
            draft_sampling = ?options.draft_sampling,
            "runner ready"
        );
        let subject = Subject::Torch(Box::new(TorchSubject { model, backend, kv_cache }));
        Ok(Self::of(subject, limits, proposer, options))
    }

    pub(crate) fn of(
        subject: Subject,
        limits: ExecutorLimits,
        proposer: EagleProposer,
        options: &RunnerOptions,
    ) -> Self {
        if proposer.shares_index() {
            tracing::info!(
                "MTP draft index_share_for_mtp_iteration enabled: step 0 computes indexer top-k, \
                 steps 1+ reuse the buffer."
            );
        }
        if let Some(synthetic) = &options.synthetic_acceptance {
            tracing::warn!(
                shares = ?synthetic.marginal(),
                "synthetic acceptance: drafts are accepted by a schedule, whatever the target \
                 says. The text is meaningless."
            );
        }
        Self {
            subject,
            limits,
            queue: StepQueue::default(),
            tables: BlockTables::default(),
            samplers: Samplers::default(),
            staging: Staging::new(limits.block_size),
            verifier: Verifier::new(options.synthetic_acceptance.clone()),
            proposer,
            draft_sampling: options.draft_sampling,
            drawn: DrawnDrafts::new(&limits),
        }
    }

    /// Whether draft steps after the first reuse its selection of keys.
    #[must_use]
    pub fn shares_index(&self) -> bool {
        self.proposer.shares_index()
    }

    /// Runs a step whose tokens are known. The block tables follow the plan even if it is refused.
    pub(crate) fn run(
        &mut self,
        plan: &StepPlan,
        outcome: &mut StepOutcome,
    ) -> Result<(), ExecutorError> {
        let at_step = |error: String| format!("{}: {error}", plan.step_id);
        // Without its changes, no table of a later plan can be trusted.
        let no_table = |error| ExecutorError::Fatal(at_step(error));
        let mut updates = plan.table_updates();
        updates.try_for_each(|u| check_table(u.slot, &self.limits)).map_err(no_table)?;
        let mut setups = plan.sampler_setups().iter();
        setups.try_for_each(|s| check_table(s.slot, &self.limits)).map_err(no_table)?;
        self.tables.update(plan);
        let failed = |error| ExecutorError::Step(at_step(error));
        self.samplers.update(plan, &self.limits).map_err(failed)?;
        self.staging.fill(plan, &self.tables, &self.limits).map_err(failed)?;
        tch::no_grad(|| self.step(plan, outcome)).map_err(|error| failed(error.to_string()))
    }

    fn step(&mut self, plan: &StepPlan, outcome: &mut StepOutcome) -> Result<(), StepError> {
        self.subject.copy_blocks(plan.copies())?;
        if plan.is_empty() {
            return Ok(());
        }
        let output = self.forward(&self.staging.ids, &self.staging.layout)?;
        let is_prefill = plan.rows().iter().any(|row| row.prefill);
        let IndexerStats { target_prefill, target_verify, .. } = &mut outcome.indexer;
        *(if is_prefill { target_prefill } else { target_verify }) = output.indexer;
        self.verify(plan, &output.hidden)?;
        let prompt_logprobs = self.prompt_logprobs_of(plan, &output.hidden)?;
        let drafts = self.propose(plan, &output.hidden, outcome)?;
        self.answer(plan, &drafts, prompt_logprobs, outcome);
        Ok(())
    }

    /// Runs the target over all rows.
    pub(crate) fn forward(
        &self,
        ids: &[i64],
        layout: &BatchLayout,
    ) -> Result<ForwardOutput, StepError> {
        self.subject.forward(ids, layout)
    }

    /// Logits of hidden states, f32 `[R, vocab]`.
    pub(crate) fn logits(&self, hidden: &Tensor) -> Result<Tensor, StepError> {
        self.subject.logits(hidden)
    }

    pub(crate) fn upload(&self, values: &[i64]) -> Result<Tensor, StepError> {
        self.subject.upload(values)
    }

    pub(crate) fn vocab_size(&self) -> usize {
        self.limits.vocab_size as usize
    }

    /// Verifies the drafts of all rows that sample.
    fn verify(&mut self, plan: &StepPlan, hidden: &Tensor) -> Result<(), StepError> {
        let metadata = &self.staging.metadata;
        if metadata.n_seqs() == 0 {
            self.verifier.clear();
            return Ok(());
        }
        let rows = self.upload(metadata.logits_rows())?;
        let logits = self.logits(&hidden.f_index_select(0, &rows)?)?;
        let step = StepInput {
            plan,
            metadata,
            samplers: &self.samplers,
            drawn: &self.drawn,
            vocab_size: self.limits.vocab_size,
        };
        self.verifier.verify(step, &logits)
    }

    /// Makes the drafts for the next step, for each row of the plan.
    fn propose(
        &mut self,
        plan: &StepPlan,
        hidden: &Tensor,
        outcome: &mut StepOutcome,
    ) -> Result<Vec<StepTokens>, StepError> {
        let mut drafts = vec![StepTokens::default(); plan.rows().len()];
        let Some(drafter) = self.subject.drafter() else { return Ok(drafts) };
        let is_drawn = self.draft_sampling == DraftSampling::Sampled;
        let (mut drafted, mut seqs) = (Vec::new(), Vec::new());
        for (row_idx, row) in plan.rows().iter().enumerate().filter(|(_, row)| row.drafting) {
            // What has failed is not drafted for: its hidden states may be anything.
            let Ok(run) = self.verifier.run(self.staging.sampling_idx(row_idx)) else { continue };
            let sampler = self.samplers.of(row).filter(|_| is_drawn);
            let sampling = sampler.map(|sampler| &sampler.draft_params);
            let blocks = self.staging.blocks(row_idx);
            seqs.push(DraftSeq { sampling, ..draft_seq(plan, row, run, blocks) });
            drafted.push(row_idx);
        }
        let proposal = self.proposer.propose(drafter.as_ref(), &seqs, hidden)?;
        outcome.indexer.draft_steps = *proposal.indexer;
        for (&row_idx, proposed) in drafted.iter().zip(proposal.drafts) {
            drafts[row_idx] = proposed[..].into();
        }
        self.drawn.keep(plan, &drafted, &seqs, &proposal)?;
        Ok(drafts)
    }

    /// Fills the outcome, and enters what the rows have chosen.
    fn answer(
        &mut self,
        plan: &StepPlan,
        drafts: &[StepTokens],
        prompt_logprobs: Vec<TokenLogprobs>,
        outcome: &mut StepOutcome,
    ) {
        let mut prompt_logprobs = prompt_logprobs.into_iter();
        let mut logprobs = std::mem::take(&mut self.verifier.logprobs).into_iter();
        for (row_idx, row) in plan.rows().iter().enumerate() {
            let (id, sampler) = (row.request_id, self.samplers.of(row));
            let n_of_prompt = sampler.map_or(0, |sampler| sampler.prompt_behind(row).len());
            let of_prompt = prompt_logprobs.by_ref().take(n_of_prompt);
            match self.verifier.run(self.staging.sampling_idx(row_idx)) {
                Ok(run) => {
                    let n_accepted = run.len().saturating_sub(1) as u32;
                    outcome.push_row(id, run, n_accepted, &drafts[row_idx]);
                    if sampler.is_some_and(|sampler| sampler.n_logprobs.is_some()) {
                        outcome.push_logprobs(logprobs.by_ref().take(run.len()));
                    }
                    if n_of_prompt > 0 {
                        outcome.push_prompt_logprobs(of_prompt);
                    }
                    self.samplers.extend(row, run);
                }
                Err(why) => {
                    outcome.push_failed_row(id, why.to_owned());
                    of_prompt.for_each(drop);
                }
            }
        }
    }
}

/// The proposer that `options` ask for, with index sharing on or off, of a model with so many MTP
/// layers, which can share or not.
pub(crate) fn proposer(
    config: &ModelConfig,
    (num_mtp_layers, draft_model_can_share): (usize, bool),
    options: &RunnerOptions,
) -> Result<EagleProposer, RunnerError> {
    let k = options.num_speculative_tokens as usize;
    let dsa = config.dsa.as_ref();
    let facts = IndexShareFacts {
        method: if k > 0 { DraftMethod::Mtp } else { DraftMethod::None },
        config_flag: dsa.is_some_and(|dsa| dsa.index_share_for_mtp_iteration),
        index_topk: dsa.map(|dsa| dsa.index_topk),
        draft_model_can_share,
    };
    let mut proposer = EagleProposer::new(k, num_mtp_layers, options.block_size)?;
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
        sampling: None,
    }
}

#[cfg(test)]
impl Runner {
    /// The caches of a runner in libtorch's tensors.
    pub(crate) fn kv_cache(&self) -> &KvCache {
        let Subject::Torch(subject) = &self.subject else { panic!("no caches of libtorch") };
        &subject.kv_cache
    }

    pub(crate) fn kv_cache_mut(&mut self) -> &mut KvCache {
        let Subject::Torch(subject) = &mut self.subject else { panic!("no caches of libtorch") };
        &mut subject.kv_cache
    }
}

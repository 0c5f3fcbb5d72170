//! An executor that notes what each step was asked to do and what it did.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use engine_types::{
    ExecutorError, ExecutorLimits, IndexerStats, PlanRow, StepExecutor, StepOutcome, StepPlan,
    TokenSource,
};

/// One step that succeeded.
#[derive(Clone, Debug)]
pub struct StepRecord {
    /// The plan's rows, as they ran, each with the number of its drafts that were accepted. A limit
    /// of tokens has not cut that number yet.
    pub rows: Vec<(PlanRow, u32)>,
    /// What the indexers did.
    pub indexer: IndexerStats,
    /// How many blocks were copied before.
    pub n_copies: usize,
    /// How many of the rows were launched before their tokens were known.
    pub n_deferred: usize,
}

/// The steps so far.
#[derive(Clone, Debug, Default)]
pub struct Records(Arc<Mutex<Vec<StepRecord>>>);

impl Records {
    /// The steps so far; they begin anew afterwards.
    #[must_use]
    pub fn take(&self) -> Vec<StepRecord> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Passes every step on and notes it.
pub struct Recorder<E> {
    executor: E,
    records: Records,
    launched: VecDeque<StepPlan>,
    /// Of the step before, if it succeeded.
    previous: Option<StepOutcome>,
}

impl<E> Recorder<E> {
    /// Notes the steps of `executor` in `records`.
    pub fn new(executor: E, records: Records) -> Self {
        Self { executor, records, launched: VecDeque::new(), previous: None }
    }
}

impl<E: StepExecutor> StepExecutor for Recorder<E> {
    fn limits(&self) -> ExecutorLimits {
        self.executor.limits()
    }

    fn launch(&mut self, plan: &StepPlan) {
        self.launched.push_back(plan.clone());
        self.executor.launch(plan);
    }

    fn collect(&mut self, outcome: &mut StepOutcome) -> Result<(), ExecutorError> {
        let launched = self.launched.pop_front().expect("a step was launched");
        let mut plan = StepPlan::default();
        plan.resolve(&launched, self.previous.take().as_ref());
        self.executor.collect(outcome)?;
        let n_accepted = |row: &PlanRow| outcome.row(row.request_id).map_or(0, |r| r.n_accepted);
        let is_deferred = |row: &&PlanRow| row.source != TokenSource::Host;
        let record = StepRecord {
            rows: plan.rows().iter().map(|row| (*row, n_accepted(row))).collect(),
            indexer: outcome.indexer,
            n_copies: plan.copies().len(),
            n_deferred: launched.rows().iter().filter(is_deferred).count(),
        };
        self.records.0.lock().unwrap_or_else(PoisonError::into_inner).push(record);
        self.previous = Some(outcome.clone());
        Ok(())
    }
}

//! An executor that notes what each step was asked to do and what it did.

use std::sync::{Arc, Mutex, PoisonError};

use engine_types::{
    ExecutorError, ExecutorLimits, IndexerStats, PlanRow, StepExecutor, StepOutcome, StepPlan,
};

/// One step that succeeded.
#[derive(Clone, Debug)]
pub struct StepRecord {
    /// The plan's rows, each with the number of its drafts that were accepted. A limit of tokens
    /// has not cut that number yet.
    pub rows: Vec<(PlanRow, u32)>,
    /// What the indexers did.
    pub indexer: IndexerStats,
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
}

impl<E> Recorder<E> {
    /// Notes the steps of `executor` in `records`.
    pub fn new(executor: E, records: Records) -> Self {
        Self { executor, records }
    }
}

impl<E: StepExecutor> StepExecutor for Recorder<E> {
    fn limits(&self) -> ExecutorLimits {
        self.executor.limits()
    }

    fn execute(&mut self, plan: &StepPlan, outcome: &mut StepOutcome) -> Result<(), ExecutorError> {
        self.executor.execute(plan, outcome)?;
        let n_accepted = |row: &PlanRow| outcome.row(row.request_id).map_or(0, |r| r.n_accepted);
        let rows = plan.rows().iter().map(|row| (*row, n_accepted(row))).collect();
        let record = StepRecord { rows, indexer: outcome.indexer };
        self.records.0.lock().unwrap_or_else(PoisonError::into_inner).push(record);
        Ok(())
    }
}

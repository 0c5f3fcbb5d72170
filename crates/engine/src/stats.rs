//! A snapshot of an engine.

use engine_types::IndexerStats;
use scheduler::SchedulerStats;

/// A snapshot of an engine, as of its last step or command.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EngineStats {
    /// What the scheduler counts.
    pub scheduler: SchedulerStats,
    /// Steps that were executed.
    pub n_steps: u64,
    /// Steps that failed.
    pub n_failed_steps: u64,
    /// What the indexers of sparse attention did, over all steps that did not fail.
    pub indexer: IndexerStats,
    /// Requests accepted and not yet finished, those still in the inbox included.
    pub n_unfinished: usize,
    /// Whether the engine thread runs.
    pub is_alive: bool,
    /// Whether the engine has been asked to stop.
    pub is_draining: bool,
}

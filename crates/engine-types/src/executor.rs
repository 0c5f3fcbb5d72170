//! The one trait between the planes.

use std::fmt;

use crate::outcome::StepOutcome;
use crate::plan::StepPlan;

/// What an executor can do; fixed from its construction on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExecutorLimits {
    /// Tokens a KV block.
    pub block_size: u32,
    /// KV blocks in the pool.
    pub num_blocks: u32,
    /// Largest number of tokens of one request, prompt and output together.
    pub max_model_len: u32,
    /// Largest number of rows in a plan, and of block tables.
    pub max_num_seqs: u32,
    /// Largest number of queried tokens in a plan.
    pub max_num_batched_tokens: u32,
    /// Largest `n_draft` and `n_propose` of a row; 0 where nothing drafts.
    pub max_num_speculative_tokens: u32,
    /// How many known tokens after a middle chunk the drafter can use (one for each draft layer).
    /// The draft layers' KV at a position depends on as many tokens behind it.
    pub n_lookahead_max: u32,
    /// Number of token ids: every id in a plan is below it.
    pub vocab_size: u32,
}

/// When the host learns a step's tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OutputMode {
    /// Before the next step is planned.
    #[default]
    Immediate,
    /// After the next step is planned and launched, so that a device never waits for the host.
    /// Rows of the next step name their tokens instead ([`TokenSource`](crate::TokenSource)).
    Deferred,
}

/// Largest number of steps that are launched and not collected: the one that runs and the one
/// that is planned behind it.
pub const MAX_STEPS_IN_FLIGHT: usize = 2;

/// Runs planned steps, one after the other. One engine thread owns it and calls it.
///
/// Whatever a step writes, later steps read: they run in the order in which they were launched.
pub trait StepExecutor {
    /// The limits that every plan keeps.
    fn limits(&self) -> ExecutorLimits;

    /// Takes the next step, and need not wait until it is done. At most [`MAX_STEPS_IN_FLIGHT`]
    /// steps are launched and not collected. What goes wrong, [`collect`](Self::collect) says.
    fn launch(&mut self, plan: &StepPlan);

    /// Waits for the oldest step that was launched and not collected, and fills `outcome` (clearing
    /// it first).
    ///
    /// The row of a step that continues a row of a failed step has no tokens and no drafts in its
    /// outcome; its other rows are not concerned.
    ///
    /// # Errors
    ///
    /// [`ExecutorError::Step`] if this step failed and the executor can go on,
    /// [`ExecutorError::Fatal`] if it cannot. Either way nothing of `outcome` may be used.
    fn collect(&mut self, outcome: &mut StepOutcome) -> Result<(), ExecutorError>;

    /// Launches a step and waits for it, while no other is in flight.
    ///
    /// # Errors
    ///
    /// As [`collect`](Self::collect).
    fn execute(&mut self, plan: &StepPlan, outcome: &mut StepOutcome) -> Result<(), ExecutorError> {
        self.launch(plan);
        self.collect(outcome)
    }
}

impl<X: StepExecutor + ?Sized> StepExecutor for Box<X> {
    fn limits(&self) -> ExecutorLimits {
        (**self).limits()
    }

    fn launch(&mut self, plan: &StepPlan) {
        (**self).launch(plan);
    }

    fn collect(&mut self, outcome: &mut StepOutcome) -> Result<(), ExecutorError> {
        (**self).collect(outcome)
    }
}

/// Why a step has no outcome.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ExecutorError {
    /// The step failed; later steps may succeed.
    Step(String),
    /// The executor is unusable from now on.
    Fatal(String),
}

impl fmt::Display for ExecutorError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Step(message) => write!(f, "the step failed: {message}"),
            Self::Fatal(message) => write!(f, "the executor failed for good: {message}"),
        }
    }
}

impl std::error::Error for ExecutorError {}

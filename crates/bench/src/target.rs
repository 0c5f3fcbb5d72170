//! What is measured: a server behind one of its protocols.

use std::fmt;
use std::pin::Pin;

use tokio_stream::Stream;

use crate::workload::Planned;

/// A server that continues prompts.
#[async_trait::async_trait]
pub trait Target: Send + Sync + 'static {
    /// Sends a request; its answer comes piece by piece.
    async fn send(&self, request: &Planned) -> Result<Pieces, Failure>;

    /// Makes the server forget the prompts that it has cached, so that a run repeats the work of
    /// the one before; false if it cannot be asked to.
    async fn forget_prompts(&self) -> Result<bool, Failure>;

    /// What the server counts, if it tells.
    async fn counters(&self) -> Result<Option<Counters>, Failure>;
}

/// An answer as it comes.
pub type Pieces = Pin<Box<dyn Stream<Item = Result<Piece, Failure>> + Send>>;

/// Part of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Piece {
    /// A message with this many tokens, at least 1, counted by ids.
    Tokens(u32),
    /// A message whose tokens are not told, which counts as one until the end says more.
    Text,
    /// The end.
    Finished(Totals),
}

/// What the end of an answer says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Prompt tokens, where the server says.
    pub n_prompt: Option<u32>,
    /// Generated tokens, where the server says.
    pub n_output: Option<u32>,
}

/// Why a request failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// What failures are counted by: a gRPC code, an HTTP status, `connection`.
    pub class: String,
    /// What the server or the connection said.
    pub message: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.class, self.message)
    }
}

impl std::error::Error for Failure {}

impl Failure {
    /// A failure of this class.
    #[must_use]
    pub fn new(class: impl Into<String>, message: impl Into<String>) -> Self {
        Self { class: class.into(), message: message.into() }
    }
}

/// What a server counts since its start.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Counters {
    /// Verify steps of requests: those that verified at least one draft.
    pub verify_steps: u64,
    /// Drafts verified.
    pub draft_tokens: u64,
    /// Drafts accepted.
    pub accepted_tokens: u64,
    /// Steps that verified a draft at each position.
    pub drafted_per_position: Vec<u64>,
    /// Steps that accepted it.
    pub accepted_per_position: Vec<u64>,
    /// Steps of the engine that only continued outputs, only read prompts, or did both.
    pub decode_steps: u64,
    /// See above.
    pub prefill_steps: u64,
    /// See above.
    pub mixed_steps: u64,
    /// Times a request gave its blocks up to another.
    pub preemptions: u64,
    /// Prompt tokens for which the prefix cache was asked.
    pub prefix_queried_tokens: u64,
    /// How many of those it had.
    pub prefix_hit_tokens: u64,
    /// Launches of indexers, over target and drafts.
    pub indexer_launches: u64,
    /// Keys that they scored.
    pub indexer_scored_keys: u64,
}

impl Counters {
    /// What was counted between `before` and now.
    ///
    /// # Errors
    ///
    /// If a count is less by now: it is that of a server that was started anew.
    pub fn since(&self, before: &Self) -> Result<Self, Failure> {
        let less = |now: u64, before: u64| {
            now.checked_sub(before).ok_or_else(|| {
                Failure::new("restart", "the server was started anew while it was measured")
            })
        };
        let each = |now: &[u64], before: &[u64]| -> Result<Vec<u64>, Failure> {
            let at = |of: &[u64], idx: usize| of.get(idx).copied().unwrap_or_default();
            let n = now.len().max(before.len());
            (0..n).map(|idx| less(at(now, idx), at(before, idx))).collect()
        };
        Ok(Self {
            verify_steps: less(self.verify_steps, before.verify_steps)?,
            draft_tokens: less(self.draft_tokens, before.draft_tokens)?,
            accepted_tokens: less(self.accepted_tokens, before.accepted_tokens)?,
            drafted_per_position: each(&self.drafted_per_position, &before.drafted_per_position)?,
            accepted_per_position: each(
                &self.accepted_per_position,
                &before.accepted_per_position,
            )?,
            decode_steps: less(self.decode_steps, before.decode_steps)?,
            prefill_steps: less(self.prefill_steps, before.prefill_steps)?,
            mixed_steps: less(self.mixed_steps, before.mixed_steps)?,
            preemptions: less(self.preemptions, before.preemptions)?,
            prefix_queried_tokens: less(self.prefix_queried_tokens, before.prefix_queried_tokens)?,
            prefix_hit_tokens: less(self.prefix_hit_tokens, before.prefix_hit_tokens)?,
            indexer_launches: less(self.indexer_launches, before.indexer_launches)?,
            indexer_scored_keys: less(self.indexer_scored_keys, before.indexer_scored_keys)?,
        })
    }

    /// Mean tokens a verify step adds; `None` without one.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "counts stay far below 2^52")]
    pub fn acceptance_length(&self) -> Option<f64> {
        let n_steps = self.verify_steps;
        (n_steps > 0).then(|| 1.0 + self.accepted_tokens as f64 / n_steps as f64)
    }

    /// Share of the drafts that were accepted; `None` without one.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "counts stay far below 2^52")]
    pub fn acceptance_rate(&self) -> Option<f64> {
        let n_drafts = self.draft_tokens;
        (n_drafts > 0).then(|| self.accepted_tokens as f64 / n_drafts as f64)
    }
}

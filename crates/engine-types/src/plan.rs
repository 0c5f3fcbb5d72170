//! What a step is to do: one row a request, with flat buffers behind.

use crate::ids::{BlockId, RequestId, Span, StepId, TokenId};

/// The scalar part of a row, as the scheduler decides it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowSpec {
    /// Tokens of the request whose KV is valid before this step; also the position of the row's
    /// first queried token.
    pub n_computed: u32,
    /// How many of the queried tokens, counted from the end, are drafts to be verified. Explicit,
    /// since a short last prefill chunk and a verify window look alike.
    pub n_draft: u32,
    /// Whether the row emits tokens: true for a final prefill chunk, a decode and a verify row,
    /// false for a middle prefill chunk.
    pub samples: bool,
    /// Whether the request is drafted for, so that the draft layers' KV must follow this row.
    pub drafting: bool,
    /// How many drafts to propose for the next step; 0 where none can be used.
    pub n_propose: u32,
}

/// One request's part of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlanRow {
    /// Whose row this is.
    pub request_id: RequestId,
    /// Tokens whose KV is valid before this step.
    pub n_computed: u32,
    /// Tokens fed in this step: positions `n_computed .. n_computed + n_query`.
    pub n_query: u32,
    /// How many of them, from the end, are drafts.
    pub n_draft: u32,
    /// Whether the row emits tokens.
    pub samples: bool,
    /// Whether the draft layers' KV must follow this row.
    pub drafting: bool,
    /// How many drafts to propose after this row.
    pub n_propose: u32,
    tokens: Span,
    lookahead: Span,
    blocks: Span,
}

/// One step's work, as plain data that the executor only reads.
///
/// The buffers are reused: [`StepPlan::clear`] keeps their capacity.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepPlan {
    /// Which step this is.
    pub step_id: StepId,
    rows: Vec<PlanRow>,
    tokens: Vec<TokenId>,
    lookahead: Vec<TokenId>,
    blocks: Vec<BlockId>,
}

impl StepPlan {
    /// Empties the plan and keeps its buffers.
    pub fn clear(&mut self) {
        self.rows.clear();
        self.tokens.clear();
        self.lookahead.clear();
        self.blocks.clear();
    }

    /// Appends a row.
    ///
    /// `tokens` are the ids at positions `n_computed ..`, drafts last. `lookahead` are the known
    /// ids that follow them (prompt tokens after a middle chunk), which the drafter needs because
    /// it runs ahead of the target; at most `ExecutorLimits::n_lookahead_max`, empty on a sampling
    /// row. `blocks` is the block table, long enough for every position that the step writes:
    /// the queried tokens and, behind them, `n_propose - 1` draft positions.
    ///
    /// # Panics
    ///
    /// If no token is queried, or none of the queried tokens is a known one.
    pub fn push_row(
        &mut self,
        request_id: RequestId,
        spec: RowSpec,
        tokens: &[TokenId],
        lookahead: &[TokenId],
        blocks: &[BlockId],
    ) {
        assert!(
            tokens.len() > spec.n_draft as usize,
            "{request_id}: a row queries at least one known token [INV-6]"
        );
        let row = PlanRow {
            request_id,
            n_computed: spec.n_computed,
            n_query: Span::after(0, tokens.len()).len,
            n_draft: spec.n_draft,
            samples: spec.samples,
            drafting: spec.drafting,
            n_propose: spec.n_propose,
            tokens: Span::after(self.tokens.len(), tokens.len()),
            lookahead: Span::after(self.lookahead.len(), lookahead.len()),
            blocks: Span::after(self.blocks.len(), blocks.len()),
        };
        self.tokens.extend_from_slice(tokens);
        self.lookahead.extend_from_slice(lookahead);
        self.blocks.extend_from_slice(blocks);
        self.rows.push(row);
    }

    /// The rows, in the order in which their tokens are packed.
    #[must_use]
    pub fn rows(&self) -> &[PlanRow] {
        &self.rows
    }

    /// Whether the step has nothing to do.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// All queried tokens, row after row.
    #[must_use]
    pub fn all_tokens(&self) -> &[TokenId] {
        &self.tokens
    }

    /// The tokens that `row` queries.
    #[must_use]
    pub fn tokens(&self, row: &PlanRow) -> &[TokenId] {
        &self.tokens[row.tokens.range()]
    }

    /// The drafts that `row` verifies.
    #[must_use]
    pub fn drafts(&self, row: &PlanRow) -> &[TokenId] {
        let tokens = self.tokens(row);
        &tokens[tokens.len() - row.n_draft as usize..]
    }

    /// The known tokens that follow those that `row` queries.
    #[must_use]
    pub fn lookahead(&self, row: &PlanRow) -> &[TokenId] {
        &self.lookahead[row.lookahead.range()]
    }

    /// The block table of `row`.
    #[must_use]
    pub fn blocks(&self, row: &PlanRow) -> &[BlockId] {
        &self.blocks[row.blocks.range()]
    }
}

impl PlanRow {
    /// Where this row's tokens lie in [`StepPlan::all_tokens`].
    #[must_use]
    pub fn token_span(&self) -> Span {
        self.tokens
    }
}

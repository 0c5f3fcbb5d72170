//! What a step is to do: one row a request, with flat buffers behind.

use crate::block_tables::{RowTable, TableUpdate};
use crate::ids::{BlockId, RequestId, Span, StepId, TokenId};
use crate::outcome::StepOutcome;
use crate::sampling::SamplerSetup;

/// The scalar part of a row, as the scheduler decides it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RowSpec {
    /// Tokens of the request whose KV is valid before this step; also the position of the row's
    /// first queried token. Of a row whose tokens are in flight, the least that it can be.
    pub n_computed: u32,
    /// How many of the queried tokens, counted from the end, are drafts to be verified. Explicit,
    /// since a short last prefill chunk and a verify window look alike.
    pub n_draft: u32,
    /// Whether the row emits tokens: true for a final prefill chunk, a decode and a verify row,
    /// false for a middle prefill chunk.
    pub samples: bool,
    /// Whether the row reads a prompt (or recomputes after a preemption) rather than continuing an
    /// output. For statistics.
    pub prefill: bool,
    /// Whether the request is drafted for, so that the draft layers' KV must follow this row.
    pub drafting: bool,
    /// How many drafts to propose for the next step; 0 where none can be used.
    pub n_propose: u32,
    /// Whether the row's table has a sampler ([`StepPlan::sampler_setups`]); without one, the row
    /// is greedy.
    pub has_sampler: bool,
}

/// Where the tokens that a row queries come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenSource {
    /// The plan holds them.
    Host,
    /// They are not known on the host yet: the row queries the last token that this row of the step
    /// before emits, and the drafts that it proposes. The positions of both follow from how many
    /// drafts it accepts, which adds to [`PlanRow::n_computed`].
    InFlight {
        /// Which row of the step before.
        row: u32,
    },
}

/// One request's part of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlanRow {
    /// Whose row this is.
    pub request_id: RequestId,
    /// Tokens whose KV is valid before this step; the least number where `source` is in flight.
    pub n_computed: u32,
    /// Tokens fed in this step: positions `n_computed .. n_computed + n_query`.
    pub n_query: u32,
    /// How many of them, from the end, are drafts.
    pub n_draft: u32,
    /// Whether the row emits tokens.
    pub samples: bool,
    /// Whether the row reads a prompt or recomputes.
    pub prefill: bool,
    /// Whether the draft layers' KV must follow this row.
    pub drafting: bool,
    /// How many drafts to propose after this row; the outcome has exactly as many.
    pub n_propose: u32,
    /// Whether its table has a sampler.
    pub has_sampler: bool,
    /// Where its tokens come from.
    pub source: TokenSource,
    /// The row's block table, long enough for every position that the step can write: the queried
    /// tokens and, behind them, `n_propose - 1` draft positions.
    pub table: RowTable,
    queried: Span,
    tokens: Span,
    lookahead: Span,
    masks: Span,
}

/// A block whose content another one takes over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockCopy {
    /// Which block is read.
    pub from: BlockId,
    /// Which block is written.
    pub to: BlockId,
}

/// One step's work, as plain data that the executor only reads.
///
/// An executor first copies blocks ([`StepPlan::copies`]), then brings its block tables up to date
/// ([`StepPlan::table_updates`]), then runs the rows. The buffers are reused: [`StepPlan::clear`]
/// keeps their capacity.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepPlan {
    /// Which step this is.
    pub step_id: StepId,
    rows: Vec<PlanRow>,
    n_queried: usize,
    tokens: Vec<TokenId>,
    lookahead: Vec<TokenId>,
    updates: Vec<(RowTable, Span)>,
    blocks: Vec<BlockId>,
    copies: Vec<BlockCopy>,
    setups: Vec<SamplerSetup>,
    masks: Vec<u32>,
}

impl StepPlan {
    /// Empties the plan and keeps its buffers.
    pub fn clear(&mut self) {
        self.rows.clear();
        self.n_queried = 0;
        self.tokens.clear();
        self.lookahead.clear();
        self.updates.clear();
        self.blocks.clear();
        self.copies.clear();
        self.setups.clear();
        self.masks.clear();
    }

    /// Says that table `slot` reads `blocks` from index `start` on and ends with them, and returns
    /// it. A plan tells only what has changed since the plans before it.
    pub fn update_table(&mut self, slot: u32, start: u32, blocks: &[BlockId]) -> RowTable {
        let span = Span::after(self.blocks.len(), blocks.len());
        self.blocks.extend_from_slice(blocks);
        self.updates.push((RowTable { slot, n_blocks: start }, span));
        RowTable { slot, n_blocks: start + span.len }
    }

    /// Says that a block takes over another one's content before the rows run.
    pub fn push_copy(&mut self, copy: BlockCopy) {
        self.copies.push(copy);
    }

    /// Says how the tokens of a table are chosen from this plan on, until it is said again.
    pub fn push_sampler(&mut self, setup: SamplerSetup) {
        self.setups.push(setup);
    }

    /// Restricts the choices of the row appended last, whose tokens are known: `masks` has as many
    /// words for each of its `n_draft + 1` choices as hold one bit for each token id, the lowest
    /// bit of the first word for id 0.
    ///
    /// # Panics
    ///
    /// If there is no row, or its tokens are in flight.
    pub fn mask_last_row(&mut self, masks: &[u32]) {
        let span = Span::after(self.masks.len(), masks.len());
        self.masks.extend_from_slice(masks);
        let row = self.rows.last_mut().expect("a row to mask");
        assert_eq!(row.source, TokenSource::Host, "what follows tokens in flight is unknown");
        row.masks = span;
    }

    /// Appends a row whose tokens are known.
    ///
    /// `tokens` are the ids at positions `n_computed ..`, drafts last. `lookahead` are the known
    /// ids that follow them (prompt tokens after a middle chunk), which the drafter needs because
    /// it runs ahead of the target; at most `ExecutorLimits::n_lookahead_max`, empty on a sampling
    /// row.
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
        table: RowTable,
    ) {
        let n_known = tokens.len().checked_sub(spec.n_draft as usize);
        let (known, drafts) = tokens.split_at(n_known.unwrap_or_default());
        self.push_row_of(request_id, spec, (known, drafts), lookahead, table);
    }

    /// The same for drafts that lie elsewhere than the known tokens.
    ///
    /// # Panics
    ///
    /// If no known token is queried, or not as many drafts as `spec` says.
    #[inline]
    pub fn push_row_of(
        &mut self,
        request_id: RequestId,
        spec: RowSpec,
        (known, drafts): (&[TokenId], &[TokenId]),
        lookahead: &[TokenId],
        table: RowTable,
    ) {
        assert!(
            !known.is_empty() && drafts.len() == spec.n_draft as usize,
            "{request_id}: a row queries at least one known token [INV-6]"
        );
        let mut row = self.row(request_id, spec, TokenSource::Host, table);
        row.tokens = Span::after(self.tokens.len(), known.len() + drafts.len());
        row.lookahead = Span::after(self.lookahead.len(), lookahead.len());
        row.n_query = row.tokens.len;
        self.tokens.extend_from_slice(known);
        self.tokens.extend_from_slice(drafts);
        if !lookahead.is_empty() {
            self.lookahead.extend_from_slice(lookahead);
        }
        self.push(row);
    }

    /// Appends a row that continues row `source_row` of the step before, which is in flight: it
    /// queries that row's last token and `spec.n_draft` of its drafts.
    ///
    /// # Panics
    ///
    /// If the row does not sample: only a middle prefill chunk does not, and its tokens are known.
    #[inline]
    pub fn push_deferred_row(
        &mut self,
        request_id: RequestId,
        spec: RowSpec,
        source_row: u32,
        table: RowTable,
    ) {
        assert!(spec.samples, "{request_id}: a row of tokens in flight samples");
        let mut row = self.row(request_id, spec, TokenSource::InFlight { row: source_row }, table);
        row.n_query = 1 + spec.n_draft;
        self.push(row);
    }

    #[inline]
    fn row(&self, id: RequestId, spec: RowSpec, source: TokenSource, table: RowTable) -> PlanRow {
        let RowSpec { n_computed, n_draft, samples, prefill, drafting, n_propose, has_sampler } =
            spec;
        let none = Span::default();
        PlanRow {
            request_id: id,
            n_computed,
            n_query: 0,
            n_draft,
            samples,
            prefill,
            drafting,
            n_propose,
            has_sampler,
            source,
            table,
            queried: none,
            tokens: none,
            lookahead: none,
            masks: none,
        }
    }

    #[inline]
    fn push(&mut self, mut row: PlanRow) {
        row.queried = Span::after(self.n_queried, row.n_query as usize);
        self.n_queried += row.n_query as usize;
        self.rows.push(row);
    }

    /// Everything of `plan` but its rows and their tokens.
    fn take_all_but_rows(&mut self, plan: &Self) {
        self.clear();
        self.step_id = plan.step_id;
        self.copies.extend_from_slice(&plan.copies);
        self.updates.extend_from_slice(&plan.updates);
        self.blocks.extend_from_slice(&plan.blocks);
        self.lookahead.extend_from_slice(&plan.lookahead);
        self.setups.extend_from_slice(&plan.setups);
        self.masks.extend_from_slice(&plan.masks);
    }

    /// Fills `self` with `plan` as it is once the outcome of the step before is known: every row
    /// has its tokens and its exact `n_computed`. The outcome is `None` where that step failed;
    /// rows that continue it, or a row that failed alone, are left out.
    ///
    /// # Panics
    ///
    /// If `plan` continues a row that `previous` does not have, did not sample, or has not as many
    /// drafts as are to be verified.
    pub fn resolve(&mut self, plan: &Self, previous: Option<&StepOutcome>) {
        self.take_all_but_rows(plan);
        for row in &plan.rows {
            let (start, mut row) = (self.tokens.len(), *row);
            match row.source {
                TokenSource::Host => self.tokens.extend_from_slice(plan.tokens(&row)),
                TokenSource::InFlight { row: source } => {
                    let Some(previous) = previous else { continue };
                    let answer = previous.row_near(source as usize, row.request_id);
                    let answer = answer.expect("the step before has the row that is continued");
                    // A row that failed alone has none.
                    let Some(last) = previous.tokens(answer).last() else { continue };
                    row.n_computed += answer.n_accepted;
                    row.source = TokenSource::Host;
                    self.tokens.push(*last);
                    let drafts = &previous.drafts(answer)[..row.n_draft as usize];
                    self.tokens.extend_from_slice(drafts);
                }
            }
            row.tokens = Span::after(start, self.tokens.len() - start);
            assert_eq!(row.tokens.len, row.n_query, "{}: as many as queried", row.request_id);
            self.push(row);
        }
    }

    /// Fills `self` with the rows of `plan` that `keep` says, and with everything that is not a
    /// row's. The tokens of no row are in flight.
    ///
    /// # Panics
    ///
    /// If they are of one that is kept.
    pub fn keep_rows(&mut self, plan: &Self, mut keep: impl FnMut(&PlanRow) -> bool) {
        self.take_all_but_rows(plan);
        for row in plan.rows.iter().filter(|row| keep(row)) {
            assert_eq!(row.source, TokenSource::Host, "{}: tokens in flight", row.request_id);
            let tokens = Span::after(self.tokens.len(), row.tokens.range().len());
            self.tokens.extend_from_slice(plan.tokens(row));
            self.push(PlanRow { tokens, ..*row });
        }
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

    /// How many tokens all rows query.
    #[must_use]
    pub fn n_queried(&self) -> usize {
        self.n_queried
    }

    /// The known ones among the queried tokens, row after row.
    #[must_use]
    pub fn all_tokens(&self) -> &[TokenId] {
        &self.tokens
    }

    /// The tokens that `row` queries; empty where they are in flight.
    #[must_use]
    pub fn tokens(&self, row: &PlanRow) -> &[TokenId] {
        &self.tokens[row.tokens.range()]
    }

    /// The drafts that `row` verifies; empty where they are in flight.
    #[must_use]
    pub fn drafts(&self, row: &PlanRow) -> &[TokenId] {
        let tokens = self.tokens(row);
        &tokens[tokens.len().saturating_sub(row.n_draft as usize)..]
    }

    /// The known tokens that follow those that `row` queries.
    #[must_use]
    pub fn lookahead(&self, row: &PlanRow) -> &[TokenId] {
        &self.lookahead[row.lookahead.range()]
    }

    /// How the block tables differ from those of the steps before, in the order in which the
    /// differences apply.
    pub fn table_updates(&self) -> impl Iterator<Item = TableUpdate<'_>> {
        self.updates.iter().map(|(table, span)| TableUpdate {
            slot: table.slot,
            start: table.n_blocks,
            blocks: &self.blocks[span.range()],
        })
    }

    /// How the tokens of some tables are chosen from now on. A table that gets another owner
    /// without a sampler has none in its rows ([`PlanRow::has_sampler`]).
    #[must_use]
    pub fn sampler_setups(&self) -> &[SamplerSetup] {
        &self.setups
    }

    /// The bit masks of the row's `n_draft + 1` choices, one behind the other; empty where every
    /// token may be chosen.
    #[must_use]
    pub fn masks(&self, row: &PlanRow) -> &[u32] {
        &self.masks[row.masks.range()]
    }

    /// Blocks whose content others take over before the rows run. One may be read by several; none
    /// that is written is in another.
    #[must_use]
    pub fn copies(&self) -> &[BlockCopy] {
        &self.copies
    }
}

impl PlanRow {
    /// Where this row's tokens lie among the queried tokens of all rows.
    #[must_use]
    pub fn token_span(&self) -> Span {
        self.queried
    }
}

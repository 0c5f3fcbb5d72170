//! From a plan to the arrays of a forward pass, with every bound checked on the way.

use std::ops::Range;

use batch_layout::{BatchLayout, SeqSpec};
use engine_types::{BlockId, BlockTables, ExecutorLimits, PlanRow, StepPlan};
use spec_decode::SpecDecodeMetadata;

/// The host side of a step's input; buffers are reused.
#[derive(Debug)]
pub(crate) struct Staging {
    /// Positions, slots and tables of all rows.
    pub(crate) layout: BatchLayout,
    /// Logits rows and drafts of the sampling rows.
    pub(crate) metadata: SpecDecodeMetadata,
    /// Token ids of all rows, `[n_tokens]`.
    pub(crate) ids: Vec<i64>,
    blocks: Vec<u32>,
    rows: Vec<StagedRow>,
}

/// Where a plan row's parts are.
#[derive(Debug)]
struct StagedRow {
    blocks: Range<usize>,
    sampling_idx: Option<usize>,
}

impl Staging {
    pub(crate) fn new(block_size: u32) -> Self {
        Self {
            layout: BatchLayout::new(block_size),
            metadata: SpecDecodeMetadata::default(),
            ids: Vec::new(),
            blocks: Vec::new(),
            rows: Vec::new(),
        }
    }

    /// Fills the arrays from `plan`. A plan that breaks the contract is refused before anything
    /// reaches the device; the text says which row and which bound.
    pub(crate) fn fill(
        &mut self,
        plan: &StepPlan,
        tables: &BlockTables,
        limits: &ExecutorLimits,
    ) -> Result<(), String> {
        check_sizes(plan, limits)?;
        check_copies(plan, limits)?;
        self.layout.clear();
        self.metadata.clear();
        self.blocks.clear();
        self.rows.clear();
        self.ids.clear();
        self.ids.extend(plan.all_tokens().iter().map(|&id| i64::from(id)));
        for row in plan.rows() {
            let refused = |fault: String| format!("{}: {fault}", row.request_id);
            check_row(plan, row, limits).map_err(refused)?;
            let blocks = tables.blocks(row.table);
            check_blocks(row, blocks, limits).map_err(refused)?;
            let start = self.blocks.len();
            self.blocks.extend(blocks.iter().map(|block| block.0));
            let spec = SeqSpec { n_computed: row.n_computed, n_query: row.n_query };
            self.layout.push(spec, &self.blocks[start..]);
            let sampling_idx = row.samples.then_some(self.metadata.n_seqs());
            if row.samples {
                self.metadata.push(row.token_span().range(), plan.drafts(row));
            }
            self.rows.push(StagedRow { blocks: start..self.blocks.len(), sampling_idx });
        }
        self.layout.finish();
        Ok(())
    }

    /// Block table of row `row_idx` of the plan.
    pub(crate) fn blocks(&self, row_idx: usize) -> &[u32] {
        &self.blocks[self.rows[row_idx].blocks.clone()]
    }

    /// Which of the sampling sequences row `row_idx` of the plan is, if it samples.
    pub(crate) fn sampling_idx(&self, row_idx: usize) -> Option<usize> {
        self.rows[row_idx].sampling_idx
    }
}

fn check_sizes(plan: &StepPlan, limits: &ExecutorLimits) -> Result<(), String> {
    let (n_rows, n_tokens) = (plan.rows().len(), plan.n_queried());
    if n_rows > limits.max_num_seqs as usize {
        return Err(format!("{n_rows} rows, max_num_seqs is {}", limits.max_num_seqs));
    }
    if n_tokens > limits.max_num_batched_tokens as usize {
        let limit = limits.max_num_batched_tokens;
        return Err(format!("{n_tokens} tokens, max_num_batched_tokens is {limit}"));
    }
    Ok(())
}

fn check_copies(plan: &StepPlan, limits: &ExecutorLimits) -> Result<(), String> {
    let mut copied = plan.copies().iter().flat_map(|copy| [copy.from, copy.to]);
    match copied.find(|block| block.0 >= limits.num_blocks) {
        Some(block) => Err(format!("a copy of {block}, num_blocks is {}", limits.num_blocks)),
        None => Ok(()),
    }
}

fn check_row(plan: &StepPlan, row: &PlanRow, limits: &ExecutorLimits) -> Result<(), String> {
    let known = plan.tokens(row).iter().chain(plan.lookahead(row));
    if let Some(id) = known.into_iter().find(|&&id| id >= limits.vocab_size) {
        return Err(format!("token {id}, vocab_size is {}", limits.vocab_size));
    }
    check_table(row.table.slot, limits)?;
    let max_drafts = limits.max_num_speculative_tokens;
    if row.n_draft.max(row.n_propose) > max_drafts {
        let (verified, wanted) = (row.n_draft, row.n_propose);
        return Err(format!("{verified} drafts and {wanted} wanted, the limit is {max_drafts}"));
    }
    let n_words = (row.n_draft as usize + 1) * limits.vocab_size.div_ceil(32) as usize;
    let masks = plan.masks(row);
    if !masks.is_empty() && (!row.samples || masks.len() != n_words) {
        return Err(format!("{} words of masks, the row needs {n_words}", masks.len()));
    }
    if !row.samples && row.n_draft.max(row.n_propose) > 0 {
        return Err("a row that does not sample has drafts".to_owned());
    }
    if row.n_propose > 0 && !row.drafting {
        return Err("drafts are wanted of a row that is not drafted for".to_owned());
    }
    if row.drafting && max_drafts == 0 {
        return Err("the row is drafted for, and this executor does not draft".to_owned());
    }
    if row.drafting && row.samples != plan.lookahead(row).is_empty() {
        return Err("lookahead belongs to the middle chunks of a drafted request".to_owned());
    }
    Ok(())
}

/// Whether there is a table of that number.
pub(crate) fn check_table(slot: u32, limits: &ExecutorLimits) -> Result<(), String> {
    if slot >= limits.max_num_seqs {
        return Err(format!("block table {slot}, max_num_seqs is {}", limits.max_num_seqs));
    }
    Ok(())
}

fn check_blocks(row: &PlanRow, blocks: &[BlockId], limits: &ExecutorLimits) -> Result<(), String> {
    if let Some(block) = blocks.iter().find(|block| block.0 >= limits.num_blocks) {
        return Err(format!("{block}, num_blocks is {}", limits.num_blocks));
    }
    let n_positions = u64::from(row.n_computed)
        + u64::from(row.n_query)
        + u64::from(row.n_propose.saturating_sub(1));
    let n_covered = blocks.len() as u64 * u64::from(limits.block_size);
    if n_positions > n_covered {
        return Err(format!("{n_positions} positions are written, the blocks hold {n_covered}"));
    }
    if n_positions > u64::from(limits.max_model_len) {
        let limit = limits.max_model_len;
        return Err(format!("{n_positions} positions are written, max_model_len is {limit}"));
    }
    Ok(())
}

//! The block tables that an executor keeps from step to step.

use crate::ids::BlockId;
use crate::plan::StepPlan;

/// A row's block table: the first `n_blocks` entries of table `slot`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RowTable {
    /// Which table; below `ExecutorLimits::max_num_seqs`.
    pub slot: u32,
    /// How many blocks of it the row may use.
    pub n_blocks: u32,
}

/// A change of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableUpdate<'a> {
    /// Which table.
    pub slot: u32,
    /// From which entry on it changes; what was behind is forgotten.
    pub start: u32,
    /// Its entries from there on.
    pub blocks: &'a [BlockId],
}

/// All block tables, as the plans so far have left them.
///
/// Plans carry only changes, so that the cost of a step does not grow with the contexts.
///
/// ```
/// use engine_types::{BlockId, BlockTables, StepPlan};
///
/// let (mut tables, mut plan) = (BlockTables::default(), StepPlan::default());
/// plan.update_table(3, 0, &[BlockId(7), BlockId(2)]);
/// tables.update(&plan);
/// plan.clear();
/// let table = plan.update_table(3, 2, &[BlockId(5)]);
/// tables.update(&plan);
/// assert_eq!(tables.blocks(table), [BlockId(7), BlockId(2), BlockId(5)]);
/// ```
#[derive(Clone, Debug, Default)]
pub struct BlockTables {
    tables: Vec<Vec<BlockId>>,
}

impl BlockTables {
    /// Enters the changes of `plan`; each plan once, in the order of the steps, also of a step
    /// that fails.
    ///
    /// # Panics
    ///
    /// If a change begins behind the end of its table.
    pub fn update(&mut self, plan: &StepPlan) {
        for update in plan.table_updates() {
            let slot = update.slot as usize;
            if slot >= self.tables.len() {
                self.tables.resize_with(slot + 1, Vec::new);
            }
            let table = &mut self.tables[slot];
            let start = update.start as usize;
            assert!(start <= table.len(), "table {slot} has no entry before {start}");
            table.truncate(start);
            table.extend_from_slice(update.blocks);
        }
    }

    /// The blocks of a row's table; position `p` lies in entry `p / block_size`.
    ///
    /// # Panics
    ///
    /// If no plan has said that many of its blocks.
    #[must_use]
    pub fn blocks(&self, table: RowTable) -> &[BlockId] {
        let RowTable { slot, n_blocks } = table;
        let known = self.tables.get(slot as usize).and_then(|all| all.get(..n_blocks as usize));
        known.unwrap_or_else(|| panic!("table {slot} has fewer than {n_blocks} blocks"))
    }
}

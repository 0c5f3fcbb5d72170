//! Which rows of a step end on the device, and what is left of the others.

use engine_types::{PlanRow, RowSpec, StepPlan};

/// Whether the device chooses what follows a row: greedily, and with nothing excluded. Such a row
/// has a slot of the decode step, with its last known token and its drafts; what it has before that
/// token is a chunk of a prompt.
pub(super) fn has_slot(plan: &StepPlan, row: &PlanRow) -> bool {
    row.samples && !row.has_sampler && plan.masks(row).is_empty()
}

/// The rows with a slot, slot after slot.
pub(super) fn slots(plan: &StepPlan) -> impl Iterator<Item = &PlanRow> {
    plan.rows().iter().filter(|row| has_slot(plan, row))
}

/// For each row of a plan, which slot it has if it has one.
pub(super) fn slots_of_rows(plan: &StepPlan) -> Vec<u32> {
    let mut n_slots = 0;
    let next = |row| {
        let slot = n_slots;
        n_slots += u32::from(has_slot(plan, row));
        slot
    };
    plan.rows().iter().map(next).collect()
}

/// Tokens of a row with a slot that come before the slot's.
pub(super) fn n_before(row: &PlanRow) -> u32 {
    row.n_query - row.n_draft - 1
}

/// Everything of `plan` that goes before its decode step: the rows without a slot, then the chunks
/// of those with one.
pub(super) fn before_slots(plan: &StepPlan) -> StepPlan {
    let mut before = StepPlan::default();
    before.keep_rows(plan, |row| !has_slot(plan, row));
    for row in slots(plan).filter(|row| n_before(row) > 0) {
        let PlanRow { n_computed, prefill, drafting, .. } = *row;
        let spec = RowSpec { n_computed, prefill, drafting, ..RowSpec::default() };
        let (chunk, rest) = plan.tokens(row).split_at(n_before(row) as usize);
        before.push_row(row.request_id, spec, chunk, &rest[..1], row.table);
    }
    before
}

#[cfg(test)]
mod tests {
    use engine_types::{BlockId, RequestId};

    use super::*;

    #[test]
    fn prompts_lose_their_last_token_and_what_is_drawn_stays_whole() {
        let mut plan = StepPlan::default();
        let table = plan.update_table(0, 0, &[BlockId(3)]);
        let chunk = RowSpec { n_computed: 4, prefill: true, drafting: true, ..RowSpec::default() };
        let last = RowSpec { samples: true, n_propose: 2, ..chunk };
        let drawn = RowSpec { has_sampler: true, ..last };
        plan.push_row(RequestId(1), last, &[10, 11, 12], &[], table);
        plan.push_row(RequestId(2), chunk, &[20, 21], &[22], table);
        plan.push_row(RequestId(3), drawn, &[30, 31], &[], table);
        plan.push_row(RequestId(4), last, &[40], &[], table);
        let window = RowSpec { n_draft: 2, prefill: false, ..last };
        plan.push_row(RequestId(5), window, &[50, 51, 52], &[], table);
        plan.push_deferred_row(RequestId(6), window, 0, table);
        let ids: Vec<u64> = slots(&plan).map(|row| row.request_id.0).collect();
        assert_eq!(ids, [1, 4, 5, 6]);
        assert_eq!(slots_of_rows(&plan), [0, 1, 1, 1, 2, 3]);
        let before = before_slots(&plan);
        assert_eq!(before.table_updates().count(), 1);
        let row = |row: &PlanRow| {
            let PlanRow { request_id, n_computed, samples, n_propose, drafting, .. } = *row;
            let (tokens, behind) = (before.tokens(row), before.lookahead(row));
            (request_id.0, n_computed, samples, n_propose, drafting, tokens, behind)
        };
        let rows: Vec<_> = before.rows().iter().map(row).collect();
        let expected: [(_, _, _, _, _, &[u32], &[u32]); 3] = [
            (2, 4, false, 0, true, &[20, 21], &[22]),
            (3, 4, true, 2, true, &[30, 31], &[]),
            (1, 4, false, 0, true, &[10, 11], &[12]),
        ];
        assert_eq!(rows, expected);
    }
}

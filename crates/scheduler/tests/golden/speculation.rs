//! Tokens and drafts of rows that continue a step in flight.

use engine_types::{ExecutorLimits, RequestId, RowSpec, RowTable, StepOutcome, StepPlan, TokenId};
use scheduler::SchedulerConfig;

use crate::rig::{BOTH, Rig, config, limits, text};

const SPEC: RowSpec = RowSpec {
    n_computed: 9,
    n_draft: 0,
    samples: true,
    prefill: false,
    drafting: true,
    n_propose: 0,
    has_sampler: false,
};
/// The token of a row that is new in its step.
const STAGED: TokenId = 7;

/// A row of the step before, or a new one.
#[derive(Clone, Copy)]
enum Source {
    Row(u32),
    New,
}
use Source::{New, Row};

/// What the rows of a step query whose row `i` continues `sources[i]` with `widths[i]` tokens. Row
/// `r` of the step before, that of request `r`, emitted `last[r]` and proposed `drafts[r]`.
fn queried(
    last: &[TokenId],
    drafts: &[&[TokenId]],
    sources: &[Source],
    widths: &[u32],
) -> Vec<Vec<TokenId>> {
    let mut outcomes = [StepOutcome::default(), StepOutcome::default()];
    for (id, (token, drafts)) in (0..).map(RequestId).zip(last.iter().zip(drafts)) {
        outcomes[0].push_row(id, &[*token], 0, drafts);
    }
    // The same rows in another order: they are joined by request.
    for row in outcomes[0].clone().rows().iter().rev() {
        let [straight, reversed] = &mut outcomes;
        reversed.push_row(row.request_id, straight.tokens(row), 0, straight.drafts(row));
    }
    let mut plan = StepPlan::default();
    for (idx, (source, width)) in (100..).zip(sources.iter().zip(widths)) {
        match source {
            Row(row) => {
                let spec = RowSpec { n_draft: width - 1, ..SPEC };
                plan.push_deferred_row(RequestId((*row).into()), spec, *row, RowTable::default());
            }
            New => plan.push_row(RequestId(idx), SPEC, &[STAGED], &[], RowTable::default()),
        }
    }
    let resolved = outcomes.map(|outcome| {
        let mut resolved = StepPlan::default();
        resolved.resolve(&plan, Some(&outcome));
        resolved.rows().iter().map(|row| resolved.tokens(row).to_vec()).collect::<Vec<_>>()
    });
    assert_eq!(resolved[0], resolved[1]);
    resolved[0].clone()
}

#[test]
fn rows_continue_with_the_last_token_and_the_drafts_of_their_request() {
    let last = [100, 200, 300];
    let drafts: [&[TokenId]; 3] = [&[11, 12], &[21, 22], &[31, 32]];
    let whole = [vec![100, 11, 12], vec![200, 21, 22], vec![300, 31, 32]];
    assert_eq!(queried(&last, &drafts, &[Row(0), Row(1), Row(2)], &[3; 3]), whole);

    let ragged: [&[TokenId]; 3] = [&[], &[21, 22, 23], &[31, 32]];
    assert_eq!(
        queried(&last, &ragged, &[Row(0), Row(1), Row(2)], &[1, 4, 2]),
        [vec![100], vec![200, 21, 22, 23], vec![300, 31]]
    );

    let new = vec![STAGED];
    let [first, second, third] = &whole;
    for (sources, expected) in [
        (&[New, Row(0), Row(1), Row(2)][..], vec![&new, first, second, third]),
        (&[Row(0), New, Row(2)], vec![first, &new, third]),
        (&[Row(2), New, New, Row(0)], vec![third, &new, &new, first]),
        (&[Row(1), Row(0), New], vec![second, first, &new]),
    ] {
        let found = queried(&last, &drafts, sources, &[3; 4]);
        assert_eq!(found.iter().collect::<Vec<_>>(), expected);
    }
    assert_eq!(
        queried(&last, &drafts, &[Row(2), New, Row(0)], &[1; 3]),
        [vec![300], vec![STAGED], vec![100]]
    );
    assert_eq!(
        queried(&[10, 20, 30], &[&[][..]; 3], &[Row(2), Row(0), Row(1)], &[1; 3]),
        [[30], [10], [20]]
    );
}

/// The reference queues what was accepted, and steps of middle chunks alone must not drain the
/// queue. Ours has none: what was accepted comes with its row, and a middle chunk's row is empty.
#[test]
fn middle_chunks_answer_nothing_and_disturb_nobody() {
    for mode in BOTH {
        let limits = ExecutorLimits { max_num_batched_tokens: 12, ..limits(4, 40) };
        let config = SchedulerConfig { chunk_alignment: 1, ..config(mode, 3) };
        let mut rig = Rig::new(config, limits).with_right_drafts(1);
        let mut n_middle = [0, 0];
        let mut step = |rig: &mut Rig| {
            let has_work = rig.step();
            for row in rig.plan.rows().iter().filter(|row| !row.samples) {
                n_middle[row.request_id.0 as usize] += 1;
            }
            has_work
        };
        rig.submit(0, 30, 6);
        while rig.tokens(0).is_empty() {
            step(&mut rig);
        }
        // Its chunks run beside the verify rows of the first.
        rig.submit(1, 20, 6);
        while step(&mut rig) {}
        assert_eq!((rig.tokens(0), rig.tokens(1)), (text(30..36), text(20..26)), "{mode:?}");
        assert!(n_middle[0] == 2 && n_middle[1] >= 1, "{mode:?}: {n_middle:?}");
        for id in [0, 1] {
            let accepted: Vec<u32> = rig.deltas(id).iter().map(|delta| delta.n_accepted).collect();
            assert_eq!(accepted, [0, 1, 1, 0], "{mode:?}");
        }
    }
}

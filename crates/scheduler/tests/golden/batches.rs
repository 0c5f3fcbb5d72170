//! What a step's rows hold, and how many there are.

use engine_types::{ExecutorLimits, SamplingParams, TokenId};
use scheduler::SchedulerConfig;

use crate::rig::{BOTH, Rig, config, limits, params};

/// Runs a step and returns the tokens of its rows.
fn run(rig: &mut Rig) -> Vec<(u64, Vec<TokenId>)> {
    let rows = rig.collect().iter();
    rows.map(|(row, tokens)| (row.request_id.0, tokens.clone())).collect()
}

#[test]
fn the_first_verify_row_is_the_first_token_and_its_drafts() {
    for mode in BOTH {
        let long =
            ExecutorLimits { max_model_len: 8192, max_num_batched_tokens: 8192, ..limits(16, 512) };
        let mut rig = Rig::new(config(mode, 3), long);
        let prompt = vec![7; 6366];
        rig.submit_with(0, &prompt, &[14, 101, 102, 103], params(16));
        rig.step();
        rig.plan();
        if rig.scheduler.n_in_flight() == 2 {
            rig.collect();
        }
        let (row, tokens) = &rig.collect()[0];
        assert_eq!((row.n_computed, row.n_draft), (6366, 3), "{mode:?}");
        assert_eq!(tokens[..], [14, 101, 102, 103], "{mode:?}");
    }
}

/// Drafts stay with their request where one between two others has none.
#[test]
fn rows_without_drafts_shift_nobody() {
    for mode in BOTH {
        for widths in [[3, 0, 3], [0, 0, 0]] {
            let mut rig = Rig::new(config(mode, 3), limits(4, 20));
            for (id, k) in (0..).zip(widths) {
                let params = SamplingParams { num_speculative_tokens: Some(k), ..params(8) };
                let output: Vec<TokenId> = (10 * id + 10..10 * id + 14).collect();
                rig.submit_with(id.into(), &[5, 6, 7], &output, params);
            }
            rig.step();
            rig.plan();
            if rig.scheduler.n_in_flight() == 2 {
                rig.collect();
            }
            let expected = match widths[0] {
                0 => [vec![10], vec![20], vec![30]],
                _ => [vec![10, 11, 12, 13], vec![20], vec![30, 31, 32, 33]],
            };
            assert_eq!(run(&mut rig), (0..).zip(expected).collect::<Vec<_>>(), "{mode:?}");
        }
    }
}

/// The reference sets a partly read prompt aside while others decode, and queues it again at the
/// tail. Ours reads on beside them, and a request keeps its rank.
#[test]
fn a_partly_read_prompt_goes_on_beside_outputs_and_keeps_its_rank() {
    for mode in BOTH {
        let config = SchedulerConfig { chunk_alignment: 1, ..config(mode, 0) };
        let mut rig =
            Rig::new(config, ExecutorLimits { max_num_batched_tokens: 16, ..limits(4, 40) });
        rig.submit(0, 4, 20);
        rig.submit(1, 40, 20);
        rig.submit(2, 3, 20);
        let mut steps = vec![];
        for _ in 0..5 {
            rig.step();
            steps.push(rig.rows().iter().map(|row| (row.0, row.2)).collect::<Vec<_>>());
        }
        let expected = [
            &[(0, 4), (1, 12)][..],
            &[(0, 1), (1, 12), (2, 3)],
            &[(0, 1), (2, 1), (1, 12)],
            &[(0, 1), (2, 1), (1, 4)],
            &[(0, 1), (1, 1), (2, 1)],
        ];
        assert_eq!(steps, expected, "{mode:?}");
        rig.drain();
    }
}

/// The largest verify batch is the smaller of `max_num_seqs` and what fits the budget, and who had
/// no row is first in the next step. Where not even one window fits, the reference runs nothing;
/// ours verifies as many drafts as there is room for.
#[test]
fn the_budget_bounds_the_rows_of_a_verify_step() {
    for mode in BOTH {
        for (max_num_seqs, budget, k, n_rows, n_queried) in [
            (256, 16384, 3, 256, 1024),
            (256, 512, 3, 128, 512),
            (256, 512, 0, 256, 256),
            (256, 2, 3, 1, 2),
        ] {
            let limits =
                ExecutorLimits { max_num_seqs, max_num_batched_tokens: budget, ..limits(4, 1024) };
            let mut rig = Rig::new(config(mode, k), limits);
            let n_requests = max_num_seqs.min(budget);
            (0..n_requests).for_each(|id| rig.submit(id.into(), 1, 40));
            rig.step();
            assert_eq!(rig.plan.rows().len() as u32, n_requests);
            rig.step();
            let place = format!("{mode:?}, {max_num_seqs} requests, budget {budget}, k={k}");
            assert_eq!(rig.plan.rows().len(), n_rows, "{place}");
            assert_eq!(rig.plan.n_queried(), n_queried, "{place}");
            let first: Vec<u64> = rig.rows().iter().map(|row| row.0).collect();
            rig.step();
            let second: Vec<u64> = rig.rows().iter().map(|row| row.0).collect();
            let is_turn = n_requests as usize > n_rows;
            assert!(!is_turn || first.iter().all(|id| !second.contains(id)), "{place}");
        }
    }
}

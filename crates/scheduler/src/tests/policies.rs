//! Who goes first, and how long the others wait.

use std::collections::HashMap;

use engine_types::{ExecutorLimits, OutputMode, RequestId};

use super::support::{Rig, caching, config, deferred, limits, request};
use crate::{ConfigError, Scheduler, SchedulerConfig, SchedulingPolicy, SubmitError};

fn priority(aging_steps: u32) -> SchedulerConfig {
    SchedulerConfig { policy: SchedulingPolicy::Priority { aging_steps }, ..config(0) }
}

fn submit(rig: &mut Rig, id: u64, n_prompt: u32, max_tokens: u32, priority: i32) {
    let mut request = request(id, n_prompt, max_tokens);
    request.priority = priority;
    rig.scheduler.submit(request).unwrap();
}

/// The order in which requests start that wait with these priorities behind a running one.
fn starts(config: SchedulerConfig, priorities: &[i32]) -> Vec<u64> {
    let mut limits = limits(4, 16);
    limits.max_num_seqs = 1;
    let mut rig = Rig::new(config, limits);
    for (id, priority) in (0..).zip(priorities) {
        submit(&mut rig, id, 2, 2, *priority);
    }
    order_of_starts(&mut rig)
}

fn order_of_starts(rig: &mut Rig) -> Vec<u64> {
    let mut starts = vec![];
    while rig.plan() {
        starts.extend(rig.rows().iter().filter(|row| row.1 == 0).map(|row| row.0));
        rig.apply();
    }
    starts
}

#[test]
fn requests_start_by_submission_or_priority() {
    assert_eq!(starts(config(0), &[3, -1, 0, -1]), [0, 1, 2, 3]);
    assert_eq!(starts(priority(8), &[3, -1, 0, -1]), [1, 3, 2, 0]);
    assert_eq!(starts(priority(u32::MAX), &[i32::MAX, i32::MIN, 0]), [1, 2, 0]);
}

#[test]
fn a_low_priority_is_overtaken_for_its_aging_steps_only() {
    for (aging_steps, levels, is_overtaken) in
        [(4, 1, [true, true, false]), (2, 2, [true, true, false]), (1, 1, [false; 3])]
    {
        let mut limits = limits(4, 16);
        limits.max_num_seqs = 1;
        let mut rig = Rig::new(priority(aging_steps), limits);
        submit(&mut rig, 0, 2, 10, -9);
        submit(&mut rig, 9, 2, 2, levels);
        // Better ones come one, three and four steps later.
        for (id, n_steps) in [(1, 1), (2, 2), (3, 1)] {
            (0..n_steps).for_each(|_| assert!(rig.step()));
            submit(&mut rig, id, 2, 2, 0);
        }
        let order = order_of_starts(&mut rig);
        let place = order.iter().position(|id| *id == 9).unwrap();
        let overtook = [1, 2, 3].map(|id| order[..place].contains(&id));
        assert_eq!(overtook, is_overtaken, "{aging_steps} {levels}");
    }
}

#[test]
fn the_worst_rank_loses_its_blocks() {
    for (config, victim) in [(config(0), 2), (priority(10), 1)] {
        let mut rig = Rig::new(config, limits(4, 4));
        submit(&mut rig, 1, 6, 8, 5);
        submit(&mut rig, 2, 6, 8, 0);
        while rig.stats().n_preemptions == 0 {
            assert!(rig.step());
        }
        assert_eq!(rig.rows().iter().filter(|row| row.0 == victim).count(), 0);
        assert_eq!(rig.stats().n_running, 1);
        rig.drain();
        assert_eq!((rig.tokens(1), rig.tokens(2)), ((106..114).collect(), (106..114).collect()));
    }
}

#[test]
fn a_small_budget_goes_round() {
    // Per plan: request and queried tokens, of which it wants four.
    let budgets = [
        (4, [&[(1, 4)][..], &[(2, 4)], &[(3, 4)], &[(1, 4)]]),
        (6, [&[(1, 4), (2, 2)], &[(3, 4), (1, 2)], &[(2, 4), (3, 2)], &[(1, 4), (2, 2)]]),
        (9, [&[(1, 4), (2, 4), (3, 1)]; 4]),
    ];
    for (budget, plans) in budgets {
        let mut limits = limits(4, 64);
        limits.max_num_batched_tokens = budget;
        let mut rig = Rig::new(config(3), limits);
        (1..=3).for_each(|id| rig.submit(id, 1, 40));
        rig.step();
        for rows in plans {
            rig.plan();
            let widths: Vec<_> = rig.rows().iter().map(|row| (row.0, row.2)).collect();
            assert_eq!(widths, rows);
            rig.apply();
        }
    }
}

#[test]
fn prompts_and_outputs_take_turns_where_both_do_not_fit() {
    let mut limits = limits(4, 64);
    limits.max_num_batched_tokens = 6;
    let mut rig = Rig::new(SchedulerConfig { chunk_alignment: 1, ..config(3) }, limits);
    rig.submit(1, 2, 40);
    rig.submit(2, 20, 4);
    // It would fit what is left, but does not start while others are left out.
    rig.submit(3, 1, 4);
    let mut plans = vec![];
    for _ in 0..6 {
        rig.plan();
        plans.push(rig.rows().iter().map(|row| (row.0, row.2)).collect::<Vec<_>>());
        rig.apply();
    }
    let (output, both) = (vec![(1, 4)], vec![(2, 4), (1, 2)]);
    let first = vec![(1, 2), (2, 4)];
    assert_eq!(plans, [first, output.clone(), both.clone(), output.clone(), both, output]);
}

#[test]
fn who_has_a_row_in_the_plan_keeps_its_blocks() {
    let mut limits = limits(4, 4);
    limits.max_num_batched_tokens = 6;
    let mut rig = Rig::new(config(3), limits);
    rig.submit(1, 4, 9);
    rig.submit(2, 1, 9);
    rig.submit(3, 1, 9);
    let plans = [
        &[(1, 0, 4, 0), (2, 0, 1, 0), (3, 0, 1, 0)][..],
        &[(1, 4, 4, 3), (2, 1, 2, 1)],
        // Request 1 needs a third block and gets the one of request 2, though 3 has a worse rank.
        &[(3, 1, 1, 0), (1, 8, 2, 1)],
    ];
    for rows in plans {
        rig.plan_next();
        assert_eq!(rig.rows(), rows);
    }
    assert_eq!((rig.stats().n_running, rig.stats().n_preempted), (2, 1));
    rig.drain();
    for (id, n_prompt) in [(1, 4), (2, 1), (3, 1)] {
        assert_eq!(rig.tokens(id), (100 + n_prompt..109 + n_prompt).collect::<Vec<_>>());
    }
}

/// The most plans between two rows of a request, less the number of requests that ran.
fn longest_wait(config: SchedulerConfig, limits: ExecutorLimits, prompts: &[u32]) -> i64 {
    let mut rig = Rig::new(config, limits);
    for (id, n_prompt) in (0..).zip(prompts) {
        rig.submit(id, *n_prompt, 12);
    }
    // By request: plans since its last row, and how many ran when it was first left out.
    let (mut waits, mut longest) = (HashMap::<u64, (i64, i64)>::new(), i64::MIN);
    while rig.plan_next() || rig.scheduler.n_in_flight() > 0 {
        if rig.plan.is_empty() {
            rig.apply();
            continue;
        }
        let rows = rig.rows();
        for (id, ..) in &rows {
            let wait = waits.insert(*id, (0, 0));
            if let Some((n_plans, n_ran)) = wait.filter(|wait| wait.0 > 0) {
                longest = longest.max(n_plans - n_ran);
            }
        }
        let n_running = rig.scheduler.running.len() as i64;
        for slot in rig.scheduler.running.iter() {
            let id = rig.scheduler.entries[slot].id.0;
            if rows.iter().all(|row| row.0 != id) {
                let (n_plans, n_ran) = waits[&id];
                waits.insert(id, (n_plans + 1, if n_plans == 0 { n_running } else { n_ran }));
            }
        }
    }
    assert_eq!(rig.stats().n_preemptions, 0);
    assert_eq!(rig.stats().n_finished as usize, prompts.len());
    longest
}

#[test]
fn nobody_waits_for_more_plans_than_requests_run() {
    let prompts = [&[1, 1, 1, 1, 1][..], &[9, 30, 2, 17, 5], &[40, 1, 40, 3], &[4, 33], &[50]];
    let mut longest = i64::MIN;
    for mode in [OutputMode::Immediate, OutputMode::Deferred] {
        for (k, budget) in [(0, 1), (0, 2), (0, 3), (0, 7), (3, 1), (3, 4), (3, 6), (3, 9)] {
            for (threshold, alignment) in [(0, 1), (0, 64), (4, 1), (6, 8)] {
                for prompts in prompts {
                    let mut limits = limits(4, 400);
                    limits.max_num_seqs = 5;
                    limits.max_num_batched_tokens = budget;
                    let config = SchedulerConfig {
                        output_mode: mode,
                        long_prefill_token_threshold: threshold,
                        chunk_alignment: alignment,
                        ..config(k)
                    };
                    longest = longest.max(longest_wait(config, limits, prompts));
                }
            }
        }
    }
    assert!((-1..=0).contains(&longest), "{longest}");
}

#[test]
fn who_lacks_blocks_keeps_those_it_has_and_nobody_starts() {
    let mut rig = Rig::new(config(0), limits(4, 3));
    rig.submit(1, 6, 2);
    rig.submit(2, 4, 4);
    rig.step();
    rig.submit(3, 1, 2);
    rig.plan();
    // Request 2 needs a second block, and nobody has a worse rank.
    assert_eq!((rig.rows(), rig.stats().blocks.n_used), (vec![(1, 6, 1, 0)], 3));
    assert_eq!((rig.stats().n_running, rig.stats().n_waiting), (2, 1));
    rig.apply();
    rig.plan();
    assert_eq!(rig.rows(), [(2, 4, 1, 0), (3, 0, 1, 0)]);
    rig.apply();
    rig.drain();
    assert_eq!((rig.tokens(2), rig.stats().n_preemptions), ((104..108).collect(), 0));
}

/// The query lengths of the first steps for prompts of these lengths.
fn first_chunks(threshold: u32, alignment: u32, budget: u32, prompts: &[u32]) -> Vec<Vec<u32>> {
    let mut limits = limits(4, 400);
    (limits.max_model_len, limits.max_num_batched_tokens) = (1000, budget);
    let (long_prefill_token_threshold, chunk_alignment) = (threshold, alignment);
    let config = SchedulerConfig { long_prefill_token_threshold, chunk_alignment, ..config(0) };
    let mut rig = Rig::new(config, limits);
    (0..).zip(prompts).for_each(|(id, n_prompt)| rig.submit(id, *n_prompt, 1));
    let mut chunks = vec![];
    while rig.plan() {
        chunks.push(rig.plan.rows().iter().map(|row| row.n_query).collect());
        rig.apply();
    }
    chunks
}

#[test]
fn prompts_are_read_in_chunks() {
    // With a threshold one long prompt leaves the step to others.
    assert_eq!(first_chunks(8, 64, 64, &[20]), [[8], [8], [4]]);
    assert_eq!(first_chunks(8, 64, 64, &[20, 17, 3])[0], [8, 8, 3]);
    assert_eq!(first_chunks(8, 4, 13, &[20, 20])[0], [8, 4]);
    // Where the budget ends a chunk, its length is a multiple of the alignment, or of the block.
    assert_eq!(first_chunks(0, 64, 192, &[128, 128]), [[128, 64].to_vec(), vec![64]]);
    assert_eq!(first_chunks(0, 64, 191, &[128, 128]), [[128], [128]]);
    assert_eq!(first_chunks(0, 1, 191, &[128, 128])[0], [128, 60]);
    // Without room for one unit the first prompt takes what there is.
    assert_eq!(first_chunks(0, 64, 10, &[25, 5]), [vec![10], vec![10], vec![5, 5]]);
}

#[test]
fn configurations_are_refused_by_field() {
    let refused = |config: SchedulerConfig| Scheduler::new(config, limits(16, 8)).unwrap_err();
    let error = refused(SchedulerConfig { chunk_alignment: 0, ..config(0) });
    assert_eq!(error, ConfigError::Zero { field: "chunk_alignment" });
    assert_eq!(refused(priority(0)), ConfigError::Zero { field: "policy.aging_steps" });
    let threshold = |value| SchedulerConfig { long_prefill_token_threshold: value, ..config(0) };
    let error = refused(threshold(15));
    assert_eq!(error, ConfigError::PrefillThreshold { value: 15, block_size: 16 });
    assert!(error.to_string().starts_with("long_prefill_token_threshold is 15;"), "{error}");
    assert!(
        [0, 16].into_iter().all(|value| Scheduler::new(threshold(value), limits(16, 8)).is_ok())
    );
}

#[test]
fn the_queue_counts_siblings() {
    let config = SchedulerConfig { max_num_seqs: 2, max_queued_requests: 2, ..config(0) };
    let mut rig = Rig::new(config, limits(4, 16));
    rig.submit(9, 4, 2);
    let mut group = |n_siblings: u64| {
        let siblings = (1..=n_siblings).map(RequestId).collect();
        rig.scheduler.submit(engine_types::Request { siblings, ..request(0, 4, 2) })
    };
    assert_eq!(group(3), Err(SubmitError::QueueFull { limit: 4 }));
    assert_eq!(group(2), Ok(()));
    assert_eq!(rig.scheduler.submit(request(5, 4, 2)), Err(SubmitError::QueueFull { limit: 4 }));
    rig.drain();
    assert_eq!(rig.stats().n_finished, 4);
}

#[test]
fn what_was_asked_had_and_computed_is_counted() {
    for config in [caching(0), SchedulerConfig { enable_prefix_caching: true, ..deferred(0) }] {
        let mut rig = Rig::new(config, limits(4, 16));
        assert_eq!(rig.stats().prefix_hit_rate(), None);
        rig.submit(1, 10, 2);
        rig.drain();
        rig.submit(2, 10, 2);
        rig.drain();
        let stats = rig.stats();
        assert_eq!((stats.n_prefix_queried_tokens, stats.n_prefix_hit_tokens), (20, 8));
        assert_eq!(stats.prefix_hit_rate(), Some(0.4));
        // Ten and two tokens of the prompts, and one of each output.
        assert_eq!((stats.n_computed_tokens, stats.n_generated_tokens), (14, 4));
    }
}

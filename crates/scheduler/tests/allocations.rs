//! Once warm, a step allocates nothing \[INV-8]: `plan` and `apply` over full batches of verify
//! rows, with the prefix cache hashing blocks as they fill.

use allocation_counter::measure;
use engine_types::{
    ExecutorLimits, Request, RequestEvent, RequestId, SamplingParams, StepOutcome, StepPlan,
};
use scheduler::{Scheduler, SchedulerConfig};

const K: u32 = 3;
const N_REQUESTS: u32 = 64;

fn scheduler(enable_prefix_caching: bool) -> Scheduler {
    let limits = ExecutorLimits {
        block_size: 4,
        num_blocks: N_REQUESTS * 120,
        max_model_len: 512,
        max_num_seqs: N_REQUESTS,
        max_num_batched_tokens: 8192,
        max_num_speculative_tokens: K,
        n_lookahead_max: 1,
        vocab_size: 10_000,
    };
    let config = SchedulerConfig {
        max_num_seqs: N_REQUESTS,
        max_num_batched_tokens: 8192,
        num_speculative_tokens: K,
        enable_prefix_caching,
        ..SchedulerConfig::default()
    };
    Scheduler::new(config, limits).expect("a valid configuration")
}

/// Answers each row with its first `n_accepted` drafts and one token, and drafts again.
fn answer(plan: &StepPlan, outcome: &mut StepOutcome, n_accepted: u32) {
    outcome.clear();
    for row in plan.rows() {
        let n_accepted = n_accepted.min(row.n_draft);
        let run = if row.samples { &[7, 7, 7, 9][(3 - n_accepted) as usize..] } else { &[] };
        let drafts = &[7, 7, 7][..row.n_propose as usize];
        outcome.push_row(row.request_id, run, n_accepted, drafts);
    }
}

#[test]
fn a_warm_step_allocates_nothing() {
    for enable_prefix_caching in [false, true] {
        let mut scheduler = scheduler(enable_prefix_caching);
        let (mut plan, mut outcome) = (StepPlan::default(), StepOutcome::default());
        let mut events: Vec<RequestEvent> = Vec::new();
        // Longer and longer requests first: the buffers of the batch itself grow to their size.
        for (round, n_prompt) in [400, 100].into_iter().enumerate() {
            for id in 0..N_REQUESTS {
                let params = SamplingParams {
                    max_tokens: 100,
                    ignore_eos: true,
                    ..SamplingParams::default()
                };
                let id = u64::from(id) + 1000 * round as u64;
                let prompt = vec![id as u32; n_prompt];
                let request = Request {
                    id: RequestId(id),
                    prompt,
                    params,
                    cache_salt: None,
                    priority: 0,
                    guide: None,
                    stop_texts: None,
                    siblings: vec![],
                };
                scheduler.submit(request).unwrap();
            }
            let mut n_steps = 0;
            while scheduler.stats().n_running + scheduler.stats().n_waiting > 0 {
                events.clear();
                let planned = measure(|| {
                    scheduler.plan(&mut plan, &mut events);
                });
                answer(&plan, &mut outcome, n_steps % 4);
                let applied = measure(|| scheduler.apply(&plan, &outcome, &mut events));
                let is_end =
                    events.iter().any(|event| matches!(event, RequestEvent::Finished { .. }));
                // The end of a request hands its counts out in a box.
                if round > 0 && !is_end {
                    let place = format!("step {n_steps}, caching {enable_prefix_caching}");
                    assert_eq!((planned.count_total, applied.count_total), (0, 0), "{place}");
                }
                n_steps += 1;
            }
            assert!(n_steps > 30, "{n_steps}");
        }
    }
}

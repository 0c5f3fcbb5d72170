//! What of a request others find in the prefix cache.

use engine_types::OutputMode;
use scheduler::SchedulerConfig;

use crate::rig::{BOTH, Rig, config, limits, params, text};

fn caching(mode: OutputMode) -> Rig {
    let config = SchedulerConfig { enable_prefix_caching: true, ..config(mode, 0) };
    Rig::new(config, limits(4, 20))
}

/// Submits a request and returns where its first row begins, and how many tokens it queries.
fn first_row(rig: &mut Rig, id: u64, n_prompt: u32) -> (u32, u32) {
    rig.submit(id, n_prompt, 1);
    loop {
        rig.step();
        if let Some(row) = rig.rows().into_iter().find(|row| row.0 == id) {
            return (row.1, row.2);
        }
    }
}

/// The reference has 16 tokens without deferred output and 20 with it, since it runs a forward pass
/// more before it learns of the end. Ours knows of a limit in both modes and so never computes the
/// KV of the last token: a follow-up of 24 tokens queries 8, not 4.
#[test]
fn a_finished_output_is_found_but_for_its_last_token() {
    for mode in BOTH {
        let mut rig = caching(mode);
        rig.submit(0, 8, 12);
        rig.drain();
        assert_eq!(rig.stats().blocks.n_cached, 4);
        assert_eq!(first_row(&mut rig, 1, 24), (16, 8), "{mode:?}");
    }
}

/// Behind 8 of the output's tokens the reference has 16 tokens in deferred mode: it publishes when
/// the pass that writes a token's KV has been launched. Ours waits for its outcome, in both modes:
/// a pass that fails leaves nothing that others would find.
#[test]
fn a_running_output_is_found_up_to_what_was_collected() {
    for mode in BOTH {
        for (n_streamed, n_found) in [(8, 12), (9, 16)] {
            let mut rig = caching(mode);
            rig.submit(0, 8, 12);
            while rig.tokens(0).len() < n_streamed {
                rig.step();
            }
            assert_eq!(first_row(&mut rig, 1, 24), (n_found, 24 - n_found), "{mode:?}");
        }
    }
}

#[test]
fn a_shared_prefix_is_not_computed_again() {
    for mode in BOTH {
        for (is_on, row) in [(true, (8, 2)), (false, (0, 10))] {
            let mut rig =
                if is_on { caching(mode) } else { Rig::new(config(mode, 0), limits(4, 20)) };
            rig.submit_with(0, &[&text(0..8)[..], &[77, 78]].concat(), &[], params(1));
            rig.drain();
            assert_eq!(first_row(&mut rig, 1, 10), row, "{mode:?}");
            assert_eq!(rig.plan.all_tokens(), text(row.0..10));
            rig.drain();
            let (_, usage) = rig.end(1).expect("it has ended");
            assert_eq!(usage.cached_tokens, row.0);
        }
    }
}

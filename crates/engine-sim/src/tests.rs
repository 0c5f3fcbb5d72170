//! Runs of the simulation itself.

use crate::{run_seed, run_seeds};

#[test]
fn a_few_hundred_seeds_equal_the_oracle() {
    let summary = run_seeds(0..300);
    assert_eq!(summary.n_seeds, 300);
    assert!(summary.n_preemptions > 100, "{summary}");
    assert!(summary.n_accepted_tokens > 1_000, "{summary}");
    assert!(summary.n_cached_tokens > 2_000 && summary.n_evictions > 1_000, "{summary}");
    assert!(summary.n_shared_tokens > 1_000 && summary.n_copies > 50, "{summary}");
    assert!(summary.n_deferred_steps > 5_000 && summary.n_failed_steps > 100, "{summary}");
    assert!(summary.n_preemptions_in_flight > 10, "{summary}");
}

#[test]
fn a_seed_always_does_the_same() {
    assert_eq!(run_seed(7), run_seed(7));
}

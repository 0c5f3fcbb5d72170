//! What a simulation did, in numbers.

use std::fmt;
use std::ops::AddAssign;

/// Counts over all seeds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Seeds run.
    pub n_seeds: u64,
    /// Requests accepted, siblings counted each.
    pub n_requests: u64,
    /// Tokens generated.
    pub n_tokens: u64,
    /// Drafts accepted.
    pub n_accepted_tokens: u64,
    /// Prompt tokens that the prefix cache served.
    pub n_cached_tokens: u64,
    /// Prompt tokens that requests got from a sibling.
    pub n_shared_tokens: u64,
    /// Blocks copied for that.
    pub n_copies: u64,
    /// Blocks that the prefix cache gave up for their room.
    pub n_evictions: u64,
    /// Preemptions.
    pub n_preemptions: u64,
    /// Those of requests with a row in flight.
    pub n_preemptions_in_flight: u64,
    /// Steps executed.
    pub n_steps: u64,
    /// Steps that were planned while another was in flight.
    pub n_deferred_steps: u64,
    /// Steps that failed.
    pub n_failed_steps: u64,
    /// Longest time that the token budget left a running request without a row, in planned steps.
    pub max_starved: u32,
}

impl AddAssign for Summary {
    fn add_assign(&mut self, other: Self) {
        self.n_seeds += other.n_seeds;
        self.n_requests += other.n_requests;
        self.n_tokens += other.n_tokens;
        self.n_accepted_tokens += other.n_accepted_tokens;
        self.n_cached_tokens += other.n_cached_tokens;
        self.n_shared_tokens += other.n_shared_tokens;
        self.n_copies += other.n_copies;
        self.n_evictions += other.n_evictions;
        self.n_preemptions += other.n_preemptions;
        self.n_preemptions_in_flight += other.n_preemptions_in_flight;
        self.n_steps += other.n_steps;
        self.n_deferred_steps += other.n_deferred_steps;
        self.n_failed_steps += other.n_failed_steps;
        self.max_starved = self.max_starved.max(other.max_starved);
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} seeds, {} requests, {} tokens ({} accepted drafts), {} prompt tokens cached, \
             {} shared ({} blocks copied), {} evictions, {} preemptions ({} with a row in flight), \
             {} steps ({} planned with another in flight, {} \
             failed), no row for {} steps at most: all equal to the serial oracle",
            self.n_seeds,
            self.n_requests,
            self.n_tokens,
            self.n_accepted_tokens,
            self.n_cached_tokens,
            self.n_shared_tokens,
            self.n_copies,
            self.n_evictions,
            self.n_preemptions,
            self.n_preemptions_in_flight,
            self.n_steps,
            self.n_deferred_steps,
            self.n_failed_steps,
            self.max_starved,
        )
    }
}

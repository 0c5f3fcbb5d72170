//! How many drafts a request makes.

use crate::error::ConfigError;

/// Largest cost of a [`DraftingCosts`] field: ten seconds, if the unit is the microsecond.
const MAX_COST: u32 = 10_000_000;
/// Larger batches count as this many requests, so that no product overflows.
const MAX_REQUESTS: u32 = 1 << 14;
/// Largest [`AdaptiveDrafting::probe_share`].
const MAX_PROBE_SHARE: u32 = 1 << 16;

/// 1 in the fixed-point numbers here.
const ONE: u32 = 1 << 16;
/// Each step forgets `1 / 2^WINDOW_SHIFT` of what the steps before it have counted.
const WINDOW_SHIFT: u32 = 4;
/// As what a draft counts, by its cost. Above 1, because a length that looks best is more often
/// than not one whose acceptance is overestimated.
const DRAFT_WEIGHT: (u64, u64) = (17, 16);
/// What a request starts with: so many drafts tried, so many of them accepted.
const PRIOR: (u32, u32) = (4 * ONE, 3 * ONE);

/// How the number of drafts of a request and step is found. No drafts at all, for the engine or a
/// request, is `num_speculative_tokens: 0`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DraftPolicy {
    /// Always the request's `num_speculative_tokens`.
    Fixed,
    /// As many as pay, from 0 to the request's `num_speculative_tokens`.
    Adaptive(AdaptiveDrafting),
}

impl Default for DraftPolicy {
    fn default() -> Self {
        Self::Adaptive(AdaptiveDrafting::default())
    }
}

impl DraftPolicy {
    /// Drafts to propose for a request that may have `k_max`, in a batch of `n_running` requests:
    /// a pure function, never above `k_max`.
    #[must_use]
    pub fn draft_length(&self, k_max: u32, acceptance: &Acceptance, n_running: u32) -> u32 {
        match self {
            Self::Fixed => k_max,
            Self::Adaptive(rule) => rule.draft_length(k_max, acceptance, n_running),
        }
    }

    /// Checks every field against its range.
    ///
    /// # Errors
    ///
    /// [`ConfigError::OutOfRange`] names the first field outside it.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let Self::Adaptive(rule) = self else { return Ok(()) };
        let DraftingCosts { step, request, draft_step, draft } = rule.costs;
        let fields = [
            ("drafting.costs.step", step, 0, MAX_COST),
            ("drafting.costs.request", request, 1, MAX_COST),
            ("drafting.costs.draft_step", draft_step, 0, MAX_COST),
            ("drafting.costs.draft", draft, 0, MAX_COST),
            ("drafting.probe_share", rule.probe_share, 1, MAX_PROBE_SHARE),
        ];
        let outside = |&(_, value, min, max): &_| !(min..=max).contains(&value);
        match fields.into_iter().find(outside) {
            None => Ok(()),
            Some((field, value, min, max)) => {
                Err(ConfigError::OutOfRange { field, value, min, max })
            }
        }
    }
}

/// Drafts as many as pay.
///
/// A request whose drafts are accepted with probability `a` each, up to the first that is not,
/// gets `1 + a + .. + a^k` tokens from a step with `k` drafts. The length is the `k` with the most
/// tokens by the cost of the step, as if all requests of the batch were like this one and each
/// draft cost a sixteenth more than it does. Where that is 0, one draft is made now and then to
/// find out whether drafts have become better, unless not even an accepted draft would pay. The
/// cheaper a draft is beside a step, the sooner: all these probes together cost at most one part in
/// [`probe_share`](Self::probe_share) of the request's steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdaptiveDrafting {
    /// What a step costs.
    pub costs: DraftingCosts,
    /// Probes cost at most one part in so many, 1 to 65,536.
    pub probe_share: u32,
}

/// What a step of `n` requests with `k` drafts each costs:
/// `step + n * request + k * (draft_step + n * draft)`, in any unit, since only ratios matter.
/// The default was measured in microseconds; `docs/perf` says how.
///
/// The draft layers' first pass belongs to `step` and `request`: it runs over all rows of a request
/// that drafts, even in a step in which it proposes nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DraftingCosts {
    /// A step, however many requests it has, 0 to 10,000,000.
    pub step: u32,
    /// Each request without its drafts, 1 to 10,000,000.
    pub request: u32,
    /// Each draft position, however many requests have a draft there, 0 to 10,000,000.
    pub draft_step: u32,
    /// Each draft, to propose and to verify, 0 to 10,000,000.
    pub draft: u32,
}

impl Default for AdaptiveDrafting {
    fn default() -> Self {
        let costs = DraftingCosts { step: 520, request: 100, draft_step: 150, draft: 160 };
        Self { costs, probe_share: 64 }
    }
}

impl AdaptiveDrafting {
    fn draft_length(&self, k_max: u32, acceptance: &Acceptance, n_running: u32) -> u32 {
        let n_requests = u64::from(n_running.clamp(1, MAX_REQUESTS));
        let cost_of = |once: u32, each: u32| u64::from(once) + n_requests * u64::from(each);
        let without_drafts = cost_of(self.costs.step, self.costs.request) * DRAFT_WEIGHT.1;
        let a_draft = cost_of(self.costs.draft_step, self.costs.draft) * DRAFT_WEIGHT.0;
        let (one, rate) = (u64::from(ONE), u64::from(acceptance.rate()));
        // Each draft adds fewer tokens than the one before it and costs the same, so that the
        // first one that does not raise tokens by cost ends the search.
        let (mut length, mut added, mut tokens, mut cost) = (0, one, one, without_drafts);
        while length < k_max {
            added = added * rate / one;
            if added * cost <= tokens * a_draft {
                break;
            }
            length += 1;
            tokens += added;
            cost += a_draft;
        }
        let cost_since_draft = u64::from(acceptance.n_idle).saturating_mul(without_drafts);
        let is_probe_due = cost_since_draft >= a_draft * u64::from(self.probe_share);
        if length == 0 && is_probe_due && a_draft < without_drafts {
            return k_max.min(1);
        }
        length
    }
}

/// How the drafts of one request fared of late.
///
/// Counts the drafts that were tried, which are the accepted ones and the first rejected one of
/// each step: those behind it say nothing. Older steps count less, also while nothing is drafted,
/// so that one probe says much after a long time without.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Acceptance {
    n_tried: u32,
    n_accepted: u32,
    /// Steps since the last draft.
    n_idle: u32,
}

impl Default for Acceptance {
    fn default() -> Self {
        Self { n_tried: PRIOR.0, n_accepted: PRIOR.1, n_idle: 0 }
    }
}

impl Acceptance {
    /// Enters a step of the request that verified `n_drafts` drafts, or none, and accepted
    /// `n_accepted` of them.
    ///
    /// # Panics
    ///
    /// If more drafts were accepted than verified.
    pub fn record(&mut self, n_drafts: u32, n_accepted: u32) {
        assert!(n_accepted <= n_drafts, "accepted drafts were verified");
        // What is left of a long time without drafts counts as one draft.
        if n_drafts > 0 || self.n_tried > ONE {
            self.n_tried -= self.n_tried >> WINDOW_SHIFT;
            self.n_accepted -= self.n_accepted >> WINDOW_SHIFT;
        }
        if n_drafts == 0 {
            self.n_idle = self.n_idle.saturating_add(1);
            return;
        }
        self.n_tried += ONE * n_drafts.min(n_accepted + 1);
        self.n_accepted += ONE * n_accepted;
        self.n_idle = 0;
    }

    /// The probability that a draft is accepted if those before it were, in `1 / 65536`.
    fn rate(&self) -> u32 {
        let rate = u64::from(self.n_accepted) * u64::from(ONE) / u64::from(self.n_tried);
        u32::try_from(rate).expect("no more drafts are accepted than tried")
    }
}

#[cfg(test)]
mod tests;

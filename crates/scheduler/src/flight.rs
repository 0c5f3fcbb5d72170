//! What a step that has been planned will have done to a request, before its outcome is known.

use engine_types::StepId;

use crate::entry::Entry;

/// A request's newest row of which the outcome is not known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Flight {
    pub(crate) step: StepId,
    /// Which row of that step.
    pub(crate) row: u32,
    /// Known tokens that it queries.
    pub(crate) n_known: u32,
    pub(crate) n_draft: u32,
    pub(crate) samples: bool,
    /// Drafts that it proposes.
    pub(crate) n_propose: u32,
}

/// Where a request's next row begins, as far as that is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Frontier {
    /// Tokens whose KV will be valid, at least.
    pub(crate) n_computed: u32,
    /// Tokens that will be committed, at least, unless the request ends.
    pub(crate) n_tokens: u32,
    /// Tokens that will be committed, at most.
    pub(crate) n_tokens_max: u32,
    /// The row in flight that emits the last of them, if it is not on the host.
    pub(crate) source: Option<Flight>,
}

impl Frontier {
    pub(crate) fn of(entry: &Entry) -> Self {
        let (n_computed, n_tokens) = (entry.n_computed, entry.n_tokens());
        let here = Self { n_computed, n_tokens, n_tokens_max: n_tokens, source: None };
        match entry.flight {
            None => here,
            Some(flight) if !flight.samples => {
                Self { n_computed: n_computed + flight.n_known, ..here }
            }
            Some(flight) => Self {
                n_computed: n_tokens,
                n_tokens: n_tokens + 1,
                n_tokens_max: n_tokens + 1 + flight.n_draft,
                source: Some(flight),
            },
        }
    }

    /// Tokens without KV, at least 1.
    pub(crate) fn n_pending(&self) -> u32 {
        self.n_tokens - self.n_computed
    }
}

//! The engine as its clients see it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use engine_types::{ExecutorLimits, Request, RequestId};
use scheduler::RequestRules;

use crate::error::{SubmitError, SubscribeError};
use crate::inbox::{Inbox, Phase, Submission};
use crate::kv_events::{KvEventSink, KvSubscribers};
use crate::sink::EventSink;
use crate::stats::EngineStats;

/// Submits and aborts requests; cheap to clone. No method waits for a step.
#[derive(Clone)]
pub struct EngineHandle {
    shared: Arc<Shared>,
}

/// What handles and the engine thread share.
pub(crate) struct Shared {
    pub(crate) inbox: Inbox,
    pub(crate) kv_subscribers: KvSubscribers,
    /// Written by the engine thread after each step.
    pub(crate) stats: Mutex<EngineStats>,
    rules: RequestRules,
    has_prefix_cache: bool,
    next_id: AtomicU64,
}

impl Shared {
    pub(crate) fn new(max_unfinished: usize, rules: RequestRules, has_prefix_cache: bool) -> Self {
        Self {
            inbox: Inbox::new(max_unfinished),
            kv_subscribers: KvSubscribers::default(),
            stats: Mutex::default(),
            rules,
            has_prefix_cache,
            next_id: AtomicU64::new(0),
        }
    }
}

impl EngineHandle {
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        Self { shared }
    }

    /// A new request id, never handed out before by this engine.
    #[must_use]
    pub fn next_request_id(&self) -> RequestId {
        RequestId(self.shared.next_id.fetch_add(1, Ordering::Relaxed))
    }

    /// Hands a request to the engine, whose events go to `sink`.
    ///
    /// # Errors
    ///
    /// If the request is not taken; `sink` is then dropped without an event.
    ///
    /// # Panics
    ///
    /// If the request has siblings: each of them needs a sink.
    pub fn submit(&self, request: Request, sink: Box<dyn EventSink>) -> Result<(), SubmitError> {
        self.submit_all(request, vec![sink], None)
    }

    /// Hands a request and its siblings to the engine; the events of each go to a sink of its own,
    /// that of the request itself first. Those that are unfinished at `deadline` end there with
    /// [`FinishReason::DeadlineExceeded`](engine_types::FinishReason::DeadlineExceeded).
    ///
    /// # Errors
    ///
    /// If the request is not taken, of which nothing is then; the sinks are dropped without an
    /// event.
    ///
    /// # Panics
    ///
    /// If there is not one sink for each id.
    pub fn submit_all(
        &self,
        request: Request,
        sinks: Vec<Box<dyn EventSink>>,
        deadline: Option<Instant>,
    ) -> Result<(), SubmitError> {
        assert_eq!(sinks.len(), 1 + request.siblings.len(), "one sink for each id");
        self.shared.rules.check(&request).map_err(SubmitError::Invalid)?;
        let arrival = Instant::now();
        self.shared.inbox.submit(Submission { request, sinks, arrival, deadline })
    }

    /// Asks for the end of a request, which then gets its `Finished` event before the next step.
    ///
    /// Returns whether the request was unfinished; an unknown or finished one changes nothing.
    pub fn abort(&self, id: RequestId) -> bool {
        self.shared.inbox.abort(id)
    }

    /// What the executor can do.
    #[must_use]
    pub fn limits(&self) -> ExecutorLimits {
        self.shared.rules.limits
    }

    /// What each request must keep to, whatever the load.
    #[must_use]
    pub fn request_rules(&self) -> RequestRules {
        self.shared.rules
    }

    /// Whether requests with the same prefix share its KV.
    #[must_use]
    pub fn has_prefix_cache(&self) -> bool {
        self.shared.has_prefix_cache
    }

    /// Sends what changes in the prefix cache to `sink` from now on, after a snapshot of what it
    /// holds; as long as anyone subscribes, each step records its changes.
    ///
    /// # Errors
    ///
    /// If there is no prefix cache, or too many subscribers, or the engine has stopped; `sink` is
    /// then dropped without an event.
    pub fn subscribe_kv_events(&self, sink: Box<dyn KvEventSink>) -> Result<(), SubscribeError> {
        if !self.shared.has_prefix_cache {
            return Err(SubscribeError::NoPrefixCache);
        }
        self.shared.kv_subscribers.add(sink)?;
        self.shared.inbox.wake();
        Ok(())
    }

    /// Empties the prefix cache before the next step; requests keep the blocks that they hold.
    /// Those submitted from now on find nothing that is cached now.
    pub fn clear_prefix_cache(&self) {
        self.shared.inbox.clear_prefix_cache();
    }

    /// A snapshot of the engine.
    #[must_use]
    pub fn stats(&self) -> EngineStats {
        let stats = self.shared.stats.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let phase = self.shared.inbox.phase();
        EngineStats {
            n_unfinished: self.shared.inbox.n_unfinished(),
            is_alive: !matches!(phase, Phase::Stopped { .. }),
            is_draining: matches!(phase, Phase::Draining | Phase::Aborting),
            ..stats
        }
    }

    /// Whether the engine thread runs.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        !matches!(self.shared.inbox.phase(), Phase::Stopped { .. })
    }

    /// Why the engine died, if it did.
    #[must_use]
    pub fn fault(&self) -> Option<String> {
        match self.shared.inbox.phase() {
            Phase::Stopped { fault } => fault,
            _ => None,
        }
    }

    /// Takes no more requests and stops the engine once those it has are finished.
    pub fn drain(&self) {
        self.shared.inbox.shut_down(Phase::Draining);
    }

    /// Takes no more requests, aborts those the engine has and stops it.
    pub fn shutdown(&self) {
        self.shared.inbox.shut_down(Phase::Aborting);
    }
}

impl std::fmt::Debug for EngineHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EngineHandle").field("stats", &self.stats()).finish()
    }
}

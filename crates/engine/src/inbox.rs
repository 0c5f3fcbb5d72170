//! The bounded inbox between handles and the engine thread.

use std::collections::{HashSet, VecDeque};
use std::mem;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use engine_types::{Request, RequestId};

use crate::error::SubmitError;
use crate::sink::EventSink;

/// A request on its way to the engine thread.
pub(crate) struct Submission {
    pub(crate) request: Request,
    /// One for each of its ids.
    pub(crate) sinks: Vec<Box<dyn EventSink>>,
    pub(crate) arrival: Instant,
    pub(crate) deadline: Option<Instant>,
}

impl Submission {
    /// The request's id, then its siblings'.
    pub(crate) fn ids(&self) -> impl Iterator<Item = RequestId> {
        std::iter::once(self.request.id).chain(self.request.siblings.iter().copied())
    }
}

/// What the engine is up to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum Phase {
    /// It takes requests.
    #[default]
    Serving,
    /// It finishes what it has.
    Draining,
    /// It aborts what it has.
    Aborting,
    /// It has stopped, in order or not.
    Stopped {
        /// Why, if not in order.
        fault: Option<String>,
    },
}

#[derive(Default)]
struct State {
    submissions: VecDeque<Submission>,
    aborts: Vec<RequestId>,
    /// Every accepted request without `Finished`; bounds both lists above.
    unfinished: HashSet<RequestId>,
    clears_prefix_cache: bool,
    /// Whether the engine thread is to look around, though it has no command.
    is_woken: bool,
    phase: Phase,
}

/// Commands to the engine thread. No lock is held while a step runs.
pub(crate) struct Inbox {
    max_unfinished: usize,
    state: Mutex<State>,
    changed: Condvar,
}

/// What the engine thread takes from the inbox at once.
#[derive(Default)]
pub(crate) struct Commands {
    pub(crate) submissions: VecDeque<Submission>,
    pub(crate) aborts: Vec<RequestId>,
    pub(crate) clears_prefix_cache: bool,
    pub(crate) phase: Phase,
}

impl Inbox {
    pub(crate) fn new(max_unfinished: usize) -> Self {
        Self { max_unfinished, state: Mutex::default(), changed: Condvar::new() }
    }

    /// The state is valid between any two statements that can panic, so poisoning is ignored.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn submit(&self, submission: Submission) -> Result<(), SubmitError> {
        let mut state = self.lock();
        match &state.phase {
            Phase::Serving => {}
            Phase::Draining | Phase::Aborting | Phase::Stopped { fault: None } => {
                return Err(SubmitError::ShuttingDown);
            }
            Phase::Stopped { fault: Some(fault) } => return Err(SubmitError::Dead(fault.clone())),
        }
        if submission.ids().any(|id| state.unfinished.contains(&id)) {
            return Err(SubmitError::DuplicateId);
        }
        if state.unfinished.len() + submission.sinks.len() > self.max_unfinished {
            return Err(SubmitError::QueueFull { limit: self.max_unfinished });
        }
        state.unfinished.extend(submission.ids());
        state.submissions.push_back(submission);
        self.changed.notify_all();
        Ok(())
    }

    /// Asks for the end of a request; false if it is not unfinished.
    pub(crate) fn abort(&self, id: RequestId) -> bool {
        let mut state = self.lock();
        if !state.unfinished.contains(&id) {
            return false;
        }
        if !state.aborts.contains(&id) {
            state.aborts.push(id);
            self.changed.notify_all();
        }
        true
    }

    /// Asks for an empty prefix cache.
    pub(crate) fn clear_prefix_cache(&self) {
        self.lock().clears_prefix_cache = true;
        self.wake();
    }

    /// Lets the engine thread go round once, if it waits.
    pub(crate) fn wake(&self) {
        self.lock().is_woken = true;
        self.changed.notify_all();
    }

    /// Moves on to draining or aborting; a phase never goes back.
    pub(crate) fn shut_down(&self, phase: Phase) {
        let mut state = self.lock();
        match state.phase {
            Phase::Serving => state.phase = phase,
            Phase::Draining if phase == Phase::Aborting => state.phase = phase,
            _ => return,
        }
        self.changed.notify_all();
    }

    /// Takes all commands, at most `max_unfinished` of each kind; waits for one, or to be woken, if
    /// `idle`.
    pub(crate) fn take(&self, idle: bool, into: &mut Commands) {
        let mut state = self.lock();
        while idle
            && state.submissions.is_empty()
            && state.aborts.is_empty()
            && !state.is_woken
            && state.phase == Phase::Serving
        {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        into.submissions.append(&mut state.submissions);
        into.aborts.append(&mut state.aborts);
        into.clears_prefix_cache |= mem::take(&mut state.clears_prefix_cache);
        state.is_woken = false;
        into.phase = state.phase.clone();
    }

    /// Forgets a request that got its `Finished`.
    pub(crate) fn finished(&self, id: RequestId) {
        let mut state = self.lock();
        state.unfinished.remove(&id);
        state.aborts.retain(|aborted| *aborted != id);
    }

    /// Closes the inbox for good and yields the requests that nobody looked at.
    pub(crate) fn stop(&self, fault: Option<String>) -> Vec<Submission> {
        let mut state = self.lock();
        state.phase = Phase::Stopped { fault };
        self.changed.notify_all();
        state.submissions.drain(..).collect()
    }

    pub(crate) fn phase(&self) -> Phase {
        self.lock().phase.clone()
    }

    pub(crate) fn n_unfinished(&self) -> usize {
        self.lock().unfinished.len()
    }
}

//! The loop of the engine thread.

use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use engine_types::{
    ExecutorError, FinishReason, IndexerStats, MAX_STEPS_IN_FLIGHT, OutputMode, RequestEvent,
    RequestId, SpecDecodeStats, StepExecutor, StepOutcome, StepPlan, Usage,
};
use scheduler::Scheduler;

use crate::deadlines::{Deadlines, Limit};
use crate::handle::Shared;
use crate::inbox::{Commands, Phase, Submission};
use crate::sink::{Delivery, EventSink};
use crate::stats::EngineStats;

/// A request that has not got its `Finished` yet.
struct Client {
    sink: Box<dyn EventSink>,
    /// When it has to end, and why.
    deadlines: [Option<(Instant, Limit)>; 2],
    /// What a `Finished` says that the scheduler cannot send any more.
    usage: Usage,
}

/// The engine thread's state.
pub(crate) struct Runner<X> {
    executor: X,
    scheduler: Scheduler,
    shared: Arc<Shared>,
    clients: HashMap<RequestId, Client>,
    /// The steps in flight, oldest first; those behind the first `n_in_flight` are spare.
    plans: VecDeque<StepPlan>,
    n_in_flight: usize,
    max_in_flight: usize,
    outcome: StepOutcome,
    deadlines: Deadlines,
    max_queue_wait: Option<Duration>,
    events: Vec<RequestEvent>,
    commands: Commands,
    n_steps: u64,
    n_failed_steps: u64,
    indexer: IndexerStats,
}

impl<X: StepExecutor> Runner<X> {
    pub(crate) fn new(
        executor: X,
        scheduler: Scheduler,
        shared: Arc<Shared>,
        output_mode: OutputMode,
        max_queue_wait: Option<Duration>,
    ) -> Self {
        let max_in_flight = match output_mode {
            OutputMode::Immediate => 1,
            OutputMode::Deferred => MAX_STEPS_IN_FLIGHT,
        };
        Self {
            executor,
            scheduler,
            shared,
            clients: HashMap::new(),
            plans: std::iter::repeat_n(StepPlan::default(), max_in_flight).collect(),
            n_in_flight: 0,
            max_in_flight,
            deadlines: Deadlines::default(),
            max_queue_wait,
            outcome: StepOutcome::default(),
            events: vec![],
            commands: Commands::default(),
            n_steps: 0,
            n_failed_steps: 0,
            indexer: IndexerStats::default(),
        }
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Runs until the engine is asked to stop or dies; then every request has its `Finished`.
    pub(crate) fn run(mut self) {
        let fault = match catch_unwind(AssertUnwindSafe(|| self.serve())) {
            Ok(Ok(())) => None,
            Ok(Err(fault)) => Some(fault),
            Err(panic) => Some(format!("the engine thread panicked: {}", panic_message(&*panic))),
        };
        let unseen = self.shared.inbox.stop(fault.clone());
        self.shared.kv_subscribers.stop();
        let reason = match fault {
            Some(fault) => FinishReason::Failed(fault),
            None => FinishReason::Aborted,
        };
        for submission in self.commands.submissions.drain(..).chain(unseen) {
            let ids: Vec<RequestId> = submission.ids().collect();
            for (id, sink) in ids.into_iter().zip(submission.sinks) {
                self.clients.insert(id, Client::new(&submission.request.prompt, sink));
            }
        }
        for (id, client) in self.clients.drain() {
            // First, so that who has seen the end finds nothing unfinished.
            self.shared.inbox.finished(id);
            client.finish(id, reason.clone());
        }
    }

    /// The loop; an error is why the engine cannot go on.
    fn serve(&mut self) -> Result<(), String> {
        loop {
            self.shared.kv_subscribers.serve(&mut self.scheduler);
            self.publish_stats();
            let is_idle = !self.is_busy();
            self.shared.inbox.take(is_idle, &mut self.commands);
            self.obey();
            match self.commands.phase {
                Phase::Serving => {}
                Phase::Draining | Phase::Aborting if self.is_busy() => {}
                Phase::Draining | Phase::Aborting | Phase::Stopped { .. } => return Ok(()),
            }
            if self.is_busy() {
                self.step()?;
            }
        }
    }

    /// Whether a request is unfinished, or a step of one that has ended is in flight.
    fn is_busy(&self) -> bool {
        !self.clients.is_empty() || self.n_in_flight > 0
    }

    /// Passes the commands on to the scheduler.
    fn obey(&mut self) {
        if mem::take(&mut self.commands.clears_prefix_cache) {
            self.scheduler.clear_prefix_cache();
        }
        while let Some(submission) = self.commands.submissions.pop_front() {
            self.submit(submission);
        }
        while let Some(id) = self.commands.aborts.pop() {
            self.scheduler.abort(id, &mut self.events);
        }
        if self.commands.phase == Phase::Aborting {
            for id in self.clients.keys() {
                self.scheduler.abort(*id, &mut self.events);
            }
        }
        while let Some((id, limit)) = self.deadlines.pop_due() {
            if limit == Limit::Whole || self.scheduler.has_not_started(id) {
                self.scheduler.expire(id, &mut self.events);
            }
        }
        self.deliver();
    }

    fn submit(&mut self, submission: Submission) {
        let ids: Vec<RequestId> = submission.ids().collect();
        let Submission { request, sinks, arrival, deadline } = submission;
        let wait = self.max_queue_wait.and_then(|wait| arrival.checked_add(wait));
        let deadlines = [wait.map(|at| (at, Limit::Wait)), deadline.map(|at| (at, Limit::Whole))];
        let clients: Vec<Client> = sinks
            .into_iter()
            .map(|sink| Client { deadlines, ..Client::new(&request.prompt, sink) })
            .collect();
        let result = self.scheduler.submit(request);
        for (id, client) in ids.into_iter().zip(clients) {
            match &result {
                Ok(()) => {
                    for (at, limit) in deadlines.into_iter().flatten() {
                        self.deadlines.insert(at, id, limit);
                    }
                    self.clients.insert(id, client);
                }
                Err(error) => {
                    self.shared.inbox.finished(id);
                    client.finish(id, FinishReason::Failed(error.to_string()));
                }
            }
        }
    }

    /// Plans and launches a step, and enters the outcome of the oldest one in flight unless another
    /// may be launched before that.
    fn step(&mut self) -> Result<(), String> {
        let plan = &mut self.plans[self.n_in_flight];
        let has_work = self.scheduler.plan(plan, &mut self.events);
        if has_work {
            self.executor.launch(plan);
            self.n_in_flight += 1;
            self.n_steps += 1;
        }
        let has_ended_some = !self.events.is_empty();
        self.deliver();
        if self.n_in_flight == self.max_in_flight || (!has_work && self.n_in_flight > 0) {
            return self.collect();
        }
        if !has_work && !has_ended_some {
            // Going round without progress would keep a core busy for ever.
            return Err("the scheduler found no work for its requests".to_owned());
        }
        Ok(())
    }

    /// Waits for the oldest step in flight and enters its outcome.
    fn collect(&mut self) -> Result<(), String> {
        let result = self.executor.collect(&mut self.outcome);
        self.n_in_flight -= 1;
        let plan = &self.plans[0];
        match result {
            Ok(()) => {
                self.indexer += &self.outcome.indexer;
                self.scheduler.apply(plan, &self.outcome, &mut self.events);
            }
            Err(ExecutorError::Step(message)) => {
                self.n_failed_steps += 1;
                self.scheduler.fail_step(plan, &message, &mut self.events);
            }
            Err(fatal) => return Err(fatal.to_string()),
        }
        self.plans.rotate_left(1);
        self.deliver();
        Ok(())
    }

    /// Sends the events to their sinks and aborts requests whose sinks take no more.
    fn deliver(&mut self) {
        if !self.events.is_empty() {
            // First, so that who has seen an end finds it in the statistics.
            self.publish_stats();
        }
        // An abort appends its `Finished` for the next round.
        while !self.events.is_empty() {
            let mut events = mem::take(&mut self.events);
            events.drain(..).for_each(|event| self.deliver_one(event));
            if self.events.is_empty() {
                // The buffer goes back with its room.
                self.events = events;
            }
        }
    }

    fn deliver_one(&mut self, event: RequestEvent) {
        let id = event.request_id();
        let Some(client) = self.clients.get_mut(&id) else { return };
        let is_last = matches!(event, RequestEvent::Finished { .. });
        if let RequestEvent::Tokens(tokens) = &event {
            client.usage.completion_tokens += count(tokens.tokens.len());
        }
        if is_last {
            self.shared.inbox.finished(id);
        }
        let delivery = client.sink.send(event);
        if is_last {
            let client = self.clients.remove(&id);
            for (at, limit) in client.into_iter().flat_map(|client| client.deadlines).flatten() {
                self.deadlines.remove(at, id, limit);
            }
        } else if delivery != Delivery::Ok {
            self.scheduler.abort(id, &mut self.events);
        }
    }

    fn publish_stats(&self) {
        let stats = EngineStats {
            scheduler: self.scheduler.stats(),
            n_steps: self.n_steps,
            n_failed_steps: self.n_failed_steps,
            indexer: self.indexer,
            ..EngineStats::default()
        };
        *self.shared.stats.lock().unwrap_or_else(PoisonError::into_inner) = stats;
    }
}

impl Client {
    fn new(prompt: &[u32], sink: Box<dyn EventSink>) -> Self {
        let usage = Usage { prompt_tokens: count(prompt.len()), ..Usage::default() };
        Self { sink, deadlines: [None; 2], usage }
    }

    /// Ends a request that the scheduler does not know or cannot be asked about any more.
    fn finish(mut self, request_id: RequestId, reason: FinishReason) {
        let spec_decode = Box::<SpecDecodeStats>::default();
        // Whether anyone still reads does not matter here.
        let _ = self.sink.send(RequestEvent::Finished {
            request_id,
            reason,
            usage: self.usage,
            spec_decode,
        });
    }
}

fn count(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

fn panic_message(panic: &(dyn Any + Send)) -> &str {
    panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message")
}

//! The loop of the engine thread.

use std::any::Any;
use std::collections::HashMap;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, PoisonError};

use engine_types::{
    ExecutorError, FinishReason, IndexerStats, RequestEvent, RequestId, SpecDecodeStats,
    StepExecutor, StepOutcome, StepPlan, Usage,
};
use scheduler::Scheduler;

use crate::handle::Shared;
use crate::inbox::{Commands, Phase, Submission};
use crate::sink::{Delivery, EventSink};
use crate::stats::EngineStats;

/// A request that has not got its `Finished` yet.
struct Client {
    sink: Box<dyn EventSink>,
    /// What a `Finished` says that the scheduler cannot send any more.
    usage: Usage,
}

/// The engine thread's state.
pub(crate) struct Runner<X> {
    executor: X,
    scheduler: Scheduler,
    shared: Arc<Shared>,
    clients: HashMap<RequestId, Client>,
    plan: StepPlan,
    outcome: StepOutcome,
    events: Vec<RequestEvent>,
    commands: Commands,
    n_steps: u64,
    n_failed_steps: u64,
    indexer: IndexerStats,
}

impl<X: StepExecutor> Runner<X> {
    pub(crate) fn new(executor: X, scheduler: Scheduler, shared: Arc<Shared>) -> Self {
        Self {
            executor,
            scheduler,
            shared,
            clients: HashMap::new(),
            plan: StepPlan::default(),
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
            let client = Client::new(&submission.request.prompt, submission.sink);
            self.clients.insert(submission.request.id, client);
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
            self.shared.inbox.take(self.clients.is_empty(), &mut self.commands);
            self.obey();
            match self.commands.phase {
                Phase::Serving => {}
                Phase::Draining if !self.clients.is_empty() => {}
                Phase::Draining | Phase::Aborting | Phase::Stopped { .. } => return Ok(()),
            }
            if !self.clients.is_empty() {
                self.step()?;
            }
        }
    }

    /// Passes the commands on to the scheduler.
    fn obey(&mut self) {
        if mem::take(&mut self.commands.clears_prefix_cache) {
            self.scheduler.clear_prefix_cache();
        }
        while let Some(Submission { request, sink }) = self.commands.submissions.pop_front() {
            let id = request.id;
            let client = Client::new(&request.prompt, sink);
            match self.scheduler.submit(request) {
                Ok(()) => {
                    self.clients.insert(id, client);
                }
                Err(error) => {
                    self.shared.inbox.finished(id);
                    client.finish(id, FinishReason::Failed(error.to_string()));
                }
            }
        }
        while let Some(id) = self.commands.aborts.pop() {
            self.scheduler.abort(id, &mut self.events);
        }
        if self.commands.phase == Phase::Aborting {
            for id in self.clients.keys() {
                self.scheduler.abort(*id, &mut self.events);
            }
        }
        self.deliver();
    }

    /// Plans, executes and applies one step.
    fn step(&mut self) -> Result<(), String> {
        let has_work = self.scheduler.plan(&mut self.plan, &mut self.events);
        let has_ended_some = !self.events.is_empty();
        self.deliver();
        if !has_work {
            // Going round without progress would keep a core busy for ever.
            return if has_ended_some {
                Ok(())
            } else {
                Err("the scheduler found no work for its requests".to_owned())
            };
        }
        self.n_steps += 1;
        match self.executor.execute(&self.plan, &mut self.outcome) {
            Ok(()) => {
                self.indexer += &self.outcome.indexer;
                self.scheduler.apply(&self.plan, &self.outcome, &mut self.events);
            }
            Err(ExecutorError::Step(message)) => {
                self.n_failed_steps += 1;
                self.scheduler.fail_step(&self.plan, &message, &mut self.events);
            }
            Err(fatal) => return Err(fatal.to_string()),
        }
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
            self.clients.remove(&id);
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
        Self { sink, usage }
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

//! Watching an output go by, for those who count.

use std::sync::Arc;
use std::time::{Duration, Instant};

use engine_types::{FinishReason, SpecDecodeStats, TokensEvent, Usage};
use tonic::{Code, Status};

use crate::observer::{CallObserver, ObservedOutput, ObservedStep, OutputTimes, RequestFacts};
use crate::output::{Event, Finished};

/// One output as its observer sees it. An end that was not seen is told when this is dropped.
pub(crate) struct Watch {
    observer: Arc<dyn CallObserver>,
    request: RequestFacts,
    arrival: Instant,
    usage: Usage,
    times: OutputTimes,
    is_over: bool,
}

impl Watch {
    /// Watches an output of a request that arrived at `arrival`.
    pub(crate) fn new(
        observer: Arc<dyn CallObserver>,
        request: RequestFacts,
        arrival: Instant,
    ) -> Self {
        Self {
            observer,
            request,
            arrival,
            usage: Usage { prompt_tokens: request.n_prompt, ..Usage::default() },
            times: OutputTimes::default(),
            is_over: false,
        }
    }

    pub(crate) fn times(&self) -> &OutputTimes {
        &self.times
    }

    /// Sees an event that the engine sent at `at`; its request started at `started`.
    pub(crate) fn see(&mut self, at: Instant, started: Option<Instant>, event: &Event) {
        let since_arrival = at.saturating_duration_since(self.arrival);
        self.times.started = started.map(|started| started.saturating_duration_since(self.arrival));
        match event {
            Event::Step(step) => self.step(since_arrival, step),
            Event::PromptLogprobs(_) => {}
            Event::Finished(finished) => self.finished(since_arrival, finished),
        }
    }

    fn step(&mut self, since_arrival: Duration, step: &TokensEvent) {
        let n_tokens = step.tokens.len();
        self.usage.completion_tokens += u32::try_from(n_tokens).unwrap_or(u32::MAX);
        let last = self.times.last_token.replace(since_arrival);
        self.times.first_token.get_or_insert(since_arrival);
        self.observer.step(&ObservedStep {
            n_tokens,
            since_last: since_arrival.saturating_sub(last.unwrap_or_default()),
            is_first: last.is_none(),
        });
    }

    fn finished(&mut self, since_arrival: Duration, finished: &Finished) {
        self.usage = finished.usage;
        self.over(since_arrival, Some(&finished.reason), *finished.spec_decode);
    }

    /// Sees the call fail, which ends the output unless it has ended before.
    pub(crate) fn failed(&mut self, status: &Status) {
        if self.is_over {
            return;
        }
        let reason = match status.code() {
            Code::DeadlineExceeded => FinishReason::DeadlineExceeded,
            _ => FinishReason::Failed(status.message().to_owned()),
        };
        self.over(self.arrival.elapsed(), Some(&reason), SpecDecodeStats::default());
    }

    /// Tells the end, once.
    fn over(
        &mut self,
        finished: Duration,
        reason: Option<&FinishReason>,
        spec_decode: SpecDecodeStats,
    ) {
        self.is_over = true;
        self.observer.finished(&ObservedOutput {
            reason,
            usage: self.usage,
            spec_decode,
            request: self.request,
            times: OutputTimes { finished, ..self.times },
        });
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if !self.is_over {
            self.over(self.arrival.elapsed(), None, SpecDecodeStats::default());
        }
    }
}

//! One output on its way from the engine thread to a call.

use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, ready};
use std::time::Instant;

use engine::{Delivery, EngineHandle, EventSink};
use engine_types::{
    FinishReason, RequestEvent, RequestId, SpecDecodeStats, TokenLogprobs, TokensEvent, Usage,
};
use tokio::sync::{mpsc, oneshot};
use tonic::Status;

use crate::status;

/// Log probabilities in one message: 20 tokens at each of these positions are far below the 4 MiB
/// that clients take by default.
const PROMPT_LOGPROBS_MAX: usize = 2048;

/// The content of a request's last event.
#[derive(Debug)]
pub(crate) struct Finished {
    pub(crate) reason: FinishReason,
    pub(crate) usage: Usage,
    pub(crate) spec_decode: Box<SpecDecodeStats>,
}

/// What an [`Output`] yields.
#[derive(Debug)]
pub(crate) enum Event {
    Step(TokensEvent),
    PromptLogprobs(Vec<TokenLogprobs>),
    Finished(Finished),
}

/// What both ends share.
#[derive(Debug, Default)]
struct Shared {
    overflowed: AtomicBool,
    /// When the request's first step was planned.
    started: OnceLock<Instant>,
}

/// The engine's end: bounded room for what steps add, and room of its own for the end.
pub(crate) struct Sink {
    steps: mpsc::Sender<(Instant, Event)>,
    finished: Option<oneshot::Sender<(Instant, Finished)>>,
    shared: Arc<Shared>,
}

impl Sink {
    fn send_step(&self, event: Event) -> Delivery {
        match self.steps.try_send((Instant::now(), event)) {
            Ok(()) => Delivery::Ok,
            Err(mpsc::error::TrySendError::Closed(_)) => Delivery::Closed,
            Err(mpsc::error::TrySendError::Full(_)) => {
                self.shared.overflowed.store(true, Ordering::Release);
                Delivery::Full
            }
        }
    }
}

impl EventSink for Sink {
    fn send(&mut self, event: RequestEvent) -> Delivery {
        match event {
            RequestEvent::Started { .. } => {
                // It starts once.
                let _ = self.shared.started.set(Instant::now());
                Delivery::Ok
            }
            RequestEvent::Tokens(step) => self.send_step(Event::Step(step)),
            RequestEvent::PromptLogprobs { logprobs, .. } => logprobs
                .chunks(PROMPT_LOGPROBS_MAX)
                .map(|part| self.send_step(Event::PromptLogprobs(part.to_vec())))
                .find(|delivery| *delivery != Delivery::Ok)
                .unwrap_or(Delivery::Ok),
            RequestEvent::Finished { reason, usage, spec_decode, .. } => {
                let finished = (Instant::now(), Finished { reason, usage, spec_decode });
                match self.finished.take().map(|sender| sender.send(finished)) {
                    Some(Ok(())) => Delivery::Ok,
                    _ => Delivery::Closed,
                }
            }
            _ => Delivery::Ok,
        }
    }
}

/// The call's end. Dropping it aborts the request; a finished one is past that.
pub(crate) struct Output {
    pub(crate) id: RequestId,
    engine: EngineHandle,
    steps: mpsc::Receiver<(Instant, Event)>,
    finished: oneshot::Receiver<(Instant, Finished)>,
    shared: Arc<Shared>,
}

impl Output {
    /// Both ends for the request `id`; `max_buffered_steps` may wait for the reader.
    pub(crate) fn new(
        engine: EngineHandle,
        id: RequestId,
        max_buffered_steps: usize,
    ) -> (Sink, Self) {
        let (step_sender, steps) = mpsc::channel(max_buffered_steps);
        let (finished_sender, finished) = oneshot::channel();
        let shared = Arc::<Shared>::default();
        let sink = Sink {
            steps: step_sender,
            finished: Some(finished_sender),
            shared: Arc::clone(&shared),
        };
        (sink, Self { id, engine, steps, finished, shared })
    }

    /// When the request's first step was planned, if it was.
    pub(crate) fn started(&self) -> Option<Instant> {
        self.shared.started.get().copied()
    }

    /// The next event and when the engine sent it; an error ends the call.
    pub(crate) fn poll_event(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Result<(Instant, Event), Status>> {
        if let Some(step) = ready!(self.steps.poll_recv(cx)) {
            return Poll::Ready(Ok(step));
        }
        // The engine drops the sink after the last event, so this is ready as well.
        let Ok((at, finished)) = ready!(Pin::new(&mut self.finished).poll(cx)) else {
            return Poll::Ready(Err(status::internal("the request ended without a reason")));
        };
        if self.shared.overflowed.load(Ordering::Acquire) {
            return Poll::Ready(Err(status::slow_reader(self.steps.max_capacity())));
        }
        if let FinishReason::Failed(message) = &finished.reason {
            return Poll::Ready(Err(status::failed(message, self.engine.fault())));
        }
        Poll::Ready(Ok((at, Event::Finished(finished))))
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        self.engine.abort(self.id);
    }
}

//! What a call reads: the messages of all its outputs until the last one ends.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use engine_types::{FinishReason, TokenId, TokensEvent};
use grpc_api::inference::v1 as pb;
use grpc_api::inference::v1::generate_stream_response::Event as MessageEvent;
use tokenization::OutputText;
use tokio::time::{Instant, Sleep};
use tokio_stream::Stream;
use tonic::Status;

use crate::convert;
use crate::inference_engine::CallContext;
use crate::observer::{CallObserver, RequestFacts};
use crate::output::{Event, Finished, Output};
use crate::span::{CallSpan, CallTotals};
use crate::status;
use crate::watch::Watch;

/// The messages of a call; dropping it ends the outputs that are unfinished.
pub(crate) struct Call {
    /// Empty once an error is out.
    outputs: Vec<CallOutput>,
    /// Which output is asked first, so that none is heard more than others.
    next: usize,
    deadline: Option<Pin<Box<Sleep>>>,
    /// The prompt from its second token on, without those whose log probabilities are out.
    prompt: std::vec::IntoIter<TokenId>,
    span: CallSpan,
    totals: CallTotals,
    /// See [`CallContext::hold`].
    _hold: Option<Arc<dyn Send + Sync>>,
}

/// One output and its decoder.
struct CallOutput {
    /// `None` once its last message is out.
    output: Option<Output>,
    /// `None` where the model has no tokenizer.
    text: Option<OutputText>,
    watch: Watch,
}

/// What a call shows beside the outputs themselves.
pub(crate) struct CallOptions {
    /// Decodes an output; `None` where the model has no tokenizer.
    pub(crate) text: Option<OutputText>,
    pub(crate) context: CallContext,
    /// The prompt, if its log probabilities are asked for.
    pub(crate) prompt: Vec<TokenId>,
    pub(crate) facts: RequestFacts,
    /// When the request came.
    pub(crate) arrival: std::time::Instant,
    pub(crate) observer: Arc<dyn CallObserver>,
    pub(crate) span: CallSpan,
}

impl Call {
    /// Reads `outputs`, whose places are their indices.
    pub(crate) fn new(outputs: Vec<Output>, options: CallOptions) -> Self {
        let mut prompt = options.prompt.into_iter();
        prompt.next();
        let of_call = |output| CallOutput {
            output: Some(output),
            text: options.text.clone(),
            watch: Watch::new(Arc::clone(&options.observer), options.facts, options.arrival),
        };
        let CallContext { deadline, hold, .. } = options.context;
        Self {
            outputs: outputs.into_iter().map(of_call).collect(),
            next: 0,
            deadline: deadline.map(|at| Box::pin(tokio::time::sleep_until(at))),
            prompt,
            span: options.span,
            totals: CallTotals { n_prompt: options.facts.n_prompt, ..CallTotals::default() },
            _hold: hold,
        }
    }

    /// The ids of the outputs in their order, before any has ended.
    pub(crate) fn request_ids(&self) -> Vec<u64> {
        let outputs = self.outputs.iter().filter_map(|of_call| of_call.output.as_ref());
        outputs.map(|output| output.id.0).collect()
    }

    /// The next event of any output, with its index.
    fn poll_event(&mut self, cx: &mut Context<'_>) -> Poll<Result<(usize, Event), Status>> {
        if let Some(deadline) = &mut self.deadline
            && deadline.as_mut().poll(cx).is_ready()
        {
            return Poll::Ready(Err(status::deadline_exceeded()));
        }
        for offset in 0..self.outputs.len() {
            let index = (self.next + offset) % self.outputs.len();
            let CallOutput { output: Some(output), watch, .. } = &mut self.outputs[index] else {
                continue;
            };
            if let Poll::Ready(event) = output.poll_event(cx) {
                self.next = index + 1;
                return Poll::Ready(event.map(|(at, event)| {
                    watch.see(at, output.started(), &event);
                    (index, event)
                }));
            }
        }
        Poll::Pending
    }

    fn message(
        &mut self,
        index: usize,
        event: Event,
    ) -> Result<pb::GenerateStreamResponse, Status> {
        let of_call = &mut self.outputs[index];
        let request_id = of_call.output.as_ref().map_or(0, |output| output.id.0);
        let event = match event {
            Event::Step(step) => MessageEvent::Delta(of_call.delta(step)),
            Event::PromptLogprobs(logprobs) => {
                let ids: Vec<TokenId> = self.prompt.by_ref().take(logprobs.len()).collect();
                let logprobs = convert::logprobs(&ids, &logprobs);
                MessageEvent::PromptLogprobs(pb::PromptLogprobs { logprobs })
            }
            Event::Finished(finished) => {
                if finished.reason == FinishReason::DeadlineExceeded {
                    return Err(self.time_is_over());
                }
                of_call.output = None;
                let times = of_call.watch.times();
                self.totals.add(&finished, times);
                MessageEvent::Finished(of_call.finished(finished)?)
            }
        };
        let index = u32::try_from(index).expect("few outputs");
        Ok(pb::GenerateStreamResponse { request_id, event: Some(event), index })
    }

    /// Which time was over when the engine ended an output for that.
    fn time_is_over(&self) -> Status {
        match &self.deadline {
            Some(deadline) if deadline.deadline() <= Instant::now() => status::deadline_exceeded(),
            _ => status::waited_too_long(),
        }
    }
}

impl Stream for Call {
    type Item = Result<pb::GenerateStreamResponse, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.outputs.iter().all(|of_call| of_call.output.is_none()) {
            return Poll::Ready(None);
        }
        self.poll_event(cx).map(|event| {
            let message = event.and_then(|(index, event)| self.message(index, event));
            if let Err(status) = &message {
                self.span.failed(status.code());
                self.outputs.iter_mut().for_each(|of_call| of_call.watch.failed(status));
                // Dropped here, so that the request ends even if the stream is kept.
                self.outputs.clear();
            }
            Some(message)
        })
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        self.span.ended(&self.totals);
    }
}

impl CallOutput {
    fn delta(&mut self, step: TokensEvent) -> pb::TokenDelta {
        let text_pieces = self.text.as_mut().map_or_else(Vec::new, |text| {
            let piece = |id: &TokenId| {
                let mut piece = String::new();
                text.push(*id, &mut piece);
                piece
            };
            step.tokens.iter().map(piece).collect()
        });
        pb::TokenDelta {
            token_ids: step.tokens.to_vec(),
            n_accepted: step.n_accepted,
            draft_token_ids: step.drafts.to_vec(),
            text_pieces,
            logprobs: convert::logprobs(&step.tokens, &step.logprobs),
        }
    }

    fn finished(&mut self, finished: Finished) -> Result<pb::GenerationFinished, Status> {
        let end = convert::end(finished.reason).map_err(|text| status::failed(&text, None))?;
        let mut tail_text = String::new();
        if let Some(text) = &mut self.text {
            text.finish(&mut tail_text);
        }
        Ok(pb::GenerationFinished {
            finish_reason: end.reason.into(),
            matched_token_id: end.matched_token_id,
            matched_stop_sequence: end.matched_stop_sequence,
            matched_stop_text: end.matched_stop_text,
            tail_text,
            usage: Some(convert::usage(finished.usage)),
            speculation: Some(convert::speculation(&finished.spec_decode)),
        })
    }
}

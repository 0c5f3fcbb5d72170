//! The span of a call, with the attributes of OpenTelemetry's conventions for generative AI
//! (`gen_ai.*`, status: development). No prompt and no output is ever among them.

use std::future::Future;
use std::time::Duration;

use grpc_api::inference::v1 as pb;
use tonic::Code;
use tracing::field::Empty;
use tracing::{Instrument as _, Span, field};

use crate::convert;
use crate::frontend::ModelInfo;
use crate::inference_engine::{CallContext, TraceContext};
use crate::observer::OutputTimes;
use crate::output::Finished;

/// Makes a span the child of the one that the headers name; what the program that exports spans
/// knows how to do.
pub type LinkSpan = fn(&Span, &TraceContext);

/// The span of one call, from its check to its last output's end.
#[derive(Clone, Debug)]
pub(crate) struct CallSpan(Span);

/// What a call came to, over all its outputs.
#[derive(Debug, Default)]
pub(crate) struct CallTotals {
    pub(crate) finish_reasons: Vec<&'static str>,
    pub(crate) n_prompt: u32,
    pub(crate) n_cached: u32,
    pub(crate) n_completion: u32,
    pub(crate) n_draft: u64,
    pub(crate) n_accepted: u64,
    pub(crate) in_queue: Option<Duration>,
    pub(crate) first_token: Option<Duration>,
}

impl CallTotals {
    /// Adds an output that has ended.
    pub(crate) fn add(&mut self, output: &Finished, times: &OutputTimes) {
        self.finish_reasons.push(convert::reason_name(&output.reason));
        self.n_completion += output.usage.completion_tokens;
        self.n_cached = output.usage.cached_tokens.max(self.n_cached);
        self.n_draft += output.spec_decode.n_draft_tokens;
        self.n_accepted += output.spec_decode.n_accepted_tokens;
        self.in_queue = self.in_queue.or(times.started);
        self.first_token = self.first_token.or(times.first_token);
    }
}

impl CallSpan {
    pub(crate) fn new(
        request: &pb::GenerateStreamRequest,
        model: &ModelInfo,
        context: &CallContext,
        link: Option<LinkSpan>,
    ) -> Self {
        let span = tracing::info_span!(
            target: "tandem::request",
            "generate",
            otel.kind = "server",
            gen_ai.operation.name = "text_completion",
            gen_ai.provider.name = "tandem",
            gen_ai.request.model = model.served_model_name,
            gen_ai.response.model = model.served_model_name,
            gen_ai.request.temperature = Empty,
            gen_ai.request.top_p = Empty,
            gen_ai.request.top_k = Empty,
            gen_ai.request.seed = Empty,
            gen_ai.request.max_tokens = Empty,
            gen_ai.request.choice.count = Empty,
            gen_ai.response.finish_reasons = Empty,
            gen_ai.usage.input_tokens = Empty,
            gen_ai.usage.output_tokens = Empty,
            gen_ai.usage.cache_read.input_tokens = Empty,
            tandem.draft_tokens = Empty,
            tandem.accepted_tokens = Empty,
            gen_ai.latency.time_in_queue = Empty,
            gen_ai.latency.time_to_first_token = Empty,
            error.r#type = Empty,
        );
        if let (Some(link), Some(trace)) = (link, &context.trace) {
            link(&span, trace);
        }
        // What is not given is not recorded. Only signed numbers are exported as numbers.
        let sampling = request.sampling.as_ref();
        span.record("gen_ai.request.temperature", sampling.and_then(|of| of.temperature));
        span.record("gen_ai.request.top_p", sampling.and_then(|of| of.top_p));
        span.record("gen_ai.request.top_k", sampling.and_then(|of| of.top_k).map(i64::from));
        let seed = sampling.and_then(|of| of.seed).map(|seed| i64::try_from(seed).ok());
        span.record("gen_ai.request.seed", seed.flatten());
        span.record("gen_ai.request.choice.count", sampling.and_then(|of| of.n).map(i64::from));
        let max_tokens = request.stopping.as_ref().and_then(|of| of.max_tokens).map(i64::from);
        span.record("gen_ai.request.max_tokens", max_tokens);
        Self(span)
    }

    /// Runs a part of the call inside its span.
    pub(crate) async fn run<F: Future>(&self, part: F) -> F::Output {
        part.instrument(self.0.clone()).await
    }

    pub(crate) fn failed(&self, code: Code) {
        self.0.record("error.type", field::debug(code));
    }

    /// Enters what the call came to.
    pub(crate) fn ended(&self, totals: &CallTotals) {
        let span = &self.0;
        span.record("gen_ai.response.finish_reasons", totals.finish_reasons.join(","));
        span.record("gen_ai.usage.input_tokens", i64::from(totals.n_prompt));
        span.record("gen_ai.usage.output_tokens", i64::from(totals.n_completion));
        span.record("gen_ai.usage.cache_read.input_tokens", i64::from(totals.n_cached));
        span.record("tandem.draft_tokens", totals.n_draft.cast_signed());
        span.record("tandem.accepted_tokens", totals.n_accepted.cast_signed());
        let seconds = |time: Option<Duration>| time.map(|time| time.as_secs_f64());
        span.record("gen_ai.latency.time_in_queue", seconds(totals.in_queue));
        span.record("gen_ai.latency.time_to_first_token", seconds(totals.first_token));
        tracing::debug!(
            target: "tandem::request",
            parent: span,
            finish_reasons = ?totals.finish_reasons,
            prompt_tokens = totals.n_prompt,
            cached_prompt_tokens = totals.n_cached,
            completion_tokens = totals.n_completion,
            draft_tokens = totals.n_draft,
            accepted_tokens = totals.n_accepted,
            time_to_first_token = ?totals.first_token,
            "a call has ended"
        );
    }
}

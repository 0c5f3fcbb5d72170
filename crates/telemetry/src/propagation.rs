//! Spans of calls as children of their callers'.

use opentelemetry::propagation::{Extractor, TextMapPropagator as _};
use opentelemetry_sdk::propagation::TraceContextPropagator;
use serving::TraceContext;
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

/// The headers of a trace context.
struct Headers<'a>(&'a TraceContext);

impl Extractor for Headers<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        match key {
            "traceparent" => Some(&self.0.traceparent),
            "tracestate" => self.0.tracestate.as_deref(),
            _ => None,
        }
    }

    fn keys(&self) -> Vec<&str> {
        vec!["traceparent", "tracestate"]
    }
}

/// Makes `span` a child of the span that the headers name; headers that are malformed are as good
/// as none. A [`serving::LinkSpan`].
pub fn link_span(span: &Span, trace: &TraceContext) {
    let parent = TraceContextPropagator::new().extract(&Headers(trace));
    // It fails only where nothing exports spans.
    let _ = span.set_parent(parent);
}

//! Logs to standard error and spans to an OpenTelemetry collector.
//!
//! **Owns** the program's one subscriber of `tracing`: log lines as text or JSON, and, where a
//! collector is named, the span of each call over OTLP, as a child of its caller's (W3C trace
//! context). **Must not know** what is logged. Libraries use `tracing` alone.
//!
//! Invariants:
//! * What filters log lines (`RUST_LOG`) does not filter spans: each call's is exported.
//! * No filter logs prompts: lines of libraries that spell them out are dropped.
//! * A collector that is away costs spans, never a request.
//!
//! # Example
//!
//! ```
//! telemetry::log("warn", telemetry::LogFormat::Text)?;
//! tracing::warn!(disk = "full", "something is wrong");
//! # Ok::<(), telemetry::TelemetryError>(())
//! ```

mod error;
mod propagation;

use std::io::IsTerminal as _;

use opentelemetry::trace::TracerProvider as _;
use opentelemetry_otlp::{SpanExporter, WithExportConfig as _};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::SdkTracerProvider;
use tracing_subscriber::filter::{FilterExt as _, Targets, filter_fn};
use tracing_subscriber::layer::{Filter, SubscriberExt as _};
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Layer, Registry};

pub use error::TelemetryError;
pub use propagation::link_span;

/// The spans that are exported: those of calls.
const EXPORTED: &str = "tandem::request";

/// A library whose lines of level TRACE have each character of each prompt.
const SPELLS_PROMPTS: &str = "tokenizers";

/// How log lines look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

/// Where spans go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Collector {
    /// The collector's OTLP endpoint over gRPC, such as `http://localhost:4317`.
    pub endpoint: String,
    /// `service.name` of the spans.
    pub service_name: String,
}

/// Logs to standard error. `RUST_LOG` says what, or `level` where it is not set.
///
/// # Errors
///
/// If the program has a subscriber already.
pub fn log(level: &str, format: LogFormat) -> Result<(), TelemetryError> {
    install(level, format, None)
}

/// The export of spans.
#[derive(Debug)]
#[must_use = "spans that wait are lost without `shut_down`"]
pub struct Export(SdkTracerProvider);

/// The same as [`log`], and exports the spans of calls. Needs the tokio runtime that it is called
/// in.
///
/// # Errors
///
/// If the endpoint is no address, or the program has a subscriber already.
pub fn log_and_export(
    level: &str,
    format: LogFormat,
    collector: &Collector,
) -> Result<Export, TelemetryError> {
    let exporter =
        SpanExporter::builder().with_tonic().with_endpoint(&collector.endpoint).build().map_err(
            |error| TelemetryError::Endpoint {
                endpoint: collector.endpoint.clone(),
                reason: error.to_string(),
            },
        )?;
    let service = Resource::builder().with_service_name(collector.service_name.clone());
    let spans = SdkTracerProvider::builder()
        .with_batch_exporter(exporter)
        .with_resource(service.build())
        .build();
    install(level, format, Some(&spans))?;
    Ok(Export(spans))
}

impl Export {
    /// Exports what waits; takes some seconds where the collector does not answer. Must not be
    /// called on a thread that drives the runtime.
    pub fn shut_down(self) {
        if let Err(error) = self.0.shutdown() {
            tracing::warn!(%error, "spans may be lost");
        }
    }
}

fn install(
    level: &str,
    format: LogFormat,
    spans: Option<&SdkTracerProvider>,
) -> Result<(), TelemetryError> {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(level));
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    let lines: Box<dyn Layer<Registry> + Send + Sync> = match format {
        LogFormat::Text => lines.with_ansi(std::io::stderr().is_terminal()).boxed(),
        LogFormat::Json => lines.json().flatten_event(true).boxed(),
    };
    let export = spans.map(|spans| {
        tracing_opentelemetry::layer()
            .with_tracer(spans.tracer("tandem"))
            .with_filter(Targets::new().with_target(EXPORTED, tracing::Level::INFO))
    });
    Registry::default()
        .with(lines.with_filter(without_prompts(filter)))
        .with(export)
        .try_init()
        .map_err(|_| TelemetryError::AlreadyInstalled)
}

/// Takes from `filter` the lines that would have prompts in them.
fn without_prompts(filter: EnvFilter) -> impl Filter<Registry> {
    filter.and(filter_fn(|line| {
        *line.level() <= tracing::Level::INFO || !line.target().starts_with(SPELLS_PROMPTS)
    }))
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use tracing::{Event, Subscriber};
    use tracing_subscriber::layer::Context;

    use super::*;

    /// Keeps the target of each line.
    struct Lines(Arc<Mutex<Vec<String>>>);

    impl<S: Subscriber> Layer<S> for Lines {
        fn on_event(&self, line: &Event<'_>, _: Context<'_, S>) {
            self.0.lock().expect("not poisoned").push(line.metadata().target().to_owned());
        }
    }

    #[test]
    fn no_filter_logs_the_characters_of_prompts() {
        for everything in ["trace", "tokenizers=trace,other=trace"] {
            let lines = Arc::new(Mutex::new(vec![]));
            let filter = without_prompts(EnvFilter::new(everything));
            let log = Registry::default().with(Lines(Arc::clone(&lines)).with_filter(filter));
            tracing::subscriber::with_default(log, || {
                tracing::trace!(target: "tokenizers::tokenizer::normalizer", "'d'");
                tracing::warn!(target: "tokenizers", "a token is missing");
                tracing::trace!(target: "other", "something");
            });
            assert_eq!(*lines.lock().unwrap(), ["tokenizers", "other"]);
        }
    }
}

//! What Prometheus scrapes.

mod calls;
mod engine;
mod sample;
mod vllm;

use engine_types::FinishReason;
use prometheus_client::encoding::{prometheus_text, text};
use prometheus_client::registry::Registry;
use serving::{CallObserver, InferenceEngine, ObservedOutput, ObservedStep};
use tonic::Code;

use self::calls::CallMetrics;
use crate::code_name;

/// Under which names metrics are shown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Names {
    /// `tandem_` alone.
    #[default]
    Own,
    /// Those and vLLM's, with its labels and buckets, for gateways and dashboards made for it.
    Vllm,
}

/// A format of metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Prometheus' text format 0.0.4.
    Prometheus,
    /// OpenMetrics 1.0 text.
    OpenMetrics,
}

impl Format {
    /// Its `Content-Type`.
    #[must_use]
    pub fn content_type(self) -> &'static str {
        match self {
            Self::Prometheus => prometheus_text::CONTENT_TYPE,
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }
}

/// Counts calls as their observer, and shows them beside what an engine tells of itself.
///
/// A step of an output costs a lock and a search through at most 22 buckets for each of its tokens.
#[derive(Debug)]
pub struct Metrics {
    own: CallMetrics,
    vllm: Option<CallMetrics>,
}

impl Metrics {
    /// Metrics of no call yet.
    #[must_use]
    pub fn new(names: Names) -> Self {
        let vllm = (names == Names::Vllm).then(|| CallMetrics::new(calls::Scale::Vllm));
        Self { own: CallMetrics::new(calls::Scale::Own), vllm }
    }

    /// All metrics as text. Those of an engine that still loads are its state and those of calls.
    #[must_use]
    pub fn render(&self, engine: &dyn InferenceEngine, format: Format) -> String {
        let mut registry = Registry::default();
        self.own.register(&mut registry);
        engine::register(&mut registry, engine);
        if let Some(calls) = &self.vllm
            && let (Ok(model), Ok(server), Ok(stats)) =
                (engine.model_info(), engine.server_info(), engine.stats())
        {
            let labels =
                [("model_name", model.served_model_name.clone()), ("engine", "0".to_owned())];
            let labels = labels.map(|(key, value)| (key.into(), value.into()));
            let registry = registry.sub_registry_with_labels(labels.into_iter());
            calls.register(registry);
            vllm::register(registry, &model, &server, &stats);
        }
        let mut text = String::new();
        let encoded = match format {
            Format::Prometheus => prometheus_text::encode(&mut text, &registry),
            Format::OpenMetrics => text::encode(&mut text, &registry),
        };
        encoded.expect("a string takes every text");
        text
    }

    fn all(&self) -> impl Iterator<Item = &CallMetrics> {
        std::iter::once(&self.own).chain(&self.vllm)
    }
}

impl CallObserver for Metrics {
    fn step(&self, step: &ObservedStep) {
        self.all().for_each(|calls| calls.step(step));
    }

    fn finished(&self, output: &ObservedOutput<'_>) {
        let is_fault = matches!(output.reason, None | Some(FinishReason::Failed(_)));
        self.all().for_each(|calls| calls.finished(output, is_fault));
    }

    fn refused(&self, code: Code) {
        self.own.refused(code_name(code));
    }
}

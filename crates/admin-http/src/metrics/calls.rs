//! What is measured of calls as they go.

use std::time::Duration;

use engine_types::FinishReason;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use serving::{ObservedOutput, ObservedStep, reason_name};

use super::sample::Label;

/// Whose names and buckets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scale {
    Own,
    Vllm,
}

/// A histogram under each of its names.
struct Spec {
    own: &'static str,
    /// Empty where vLLM has no such metric.
    vllm: &'static str,
    help: &'static str,
    own_buckets: &'static [f64],
    vllm_buckets: &'static [f64],
}

/// Seconds between tokens or until them, up to those of a slow request.
const SECONDS: &[f64] = &[
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0,
    50.0, 100.0, 250.0, 500.0, 1000.0,
];
/// The part of them that one token can take.
const TOKEN_SECONDS: &[f64] = SECONDS.split_at(14).0;
const COUNTS: &[f64] = &[
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5,
    5e5, 1e6,
];
/// Outputs of a request, of which there are 128 at most.
const OUTPUTS: &[f64] = &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0];

/// vLLM's buckets, as of its `rust/src/metrics`.
const VLLM_FIRST_TOKEN: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
];
const VLLM_TOKEN: &[f64] = &[
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
];
const VLLM_REQUEST: &[f64] = &[
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
];
const VLLM_OUTPUTS: &[f64] = &[1.0, 2.0, 5.0, 10.0, 20.0];

const FIRST_TOKEN: usize = 0;
const INTER_TOKEN: usize = 1;
const INTER_MESSAGE: usize = 2;
const PER_OUTPUT_TOKEN: usize = 3;
const E2E: usize = 4;
const QUEUE: usize = 5;
const PREFILL: usize = 6;
const DECODE: usize = 7;
const INFERENCE: usize = 8;
const PROMPT_TOKENS: usize = 9;
const GENERATION_TOKENS: usize = 10;
const MAX_TOKENS: usize = 11;
const N: usize = 12;

/// The histograms by the constants above.
const HISTOGRAMS: [Spec; 13] = [
    Spec {
        own: "tandem_time_to_first_token_seconds",
        vllm: "vllm:time_to_first_token_seconds",
        help: "From a request's arrival to the first token of each output",
        own_buckets: SECONDS,
        vllm_buckets: VLLM_FIRST_TOKEN,
    },
    Spec {
        own: "tandem_inter_token_latency_seconds",
        vllm: "vllm:inter_token_latency_seconds",
        help: "Time of a step divided by the tokens that it added, once for each of them, without \
               an output's first step",
        own_buckets: TOKEN_SECONDS,
        vllm_buckets: VLLM_TOKEN,
    },
    Spec {
        own: "tandem_inter_message_latency_seconds",
        vllm: "",
        help: "Time between steps of an output, whatever they added",
        own_buckets: TOKEN_SECONDS,
        vllm_buckets: &[],
    },
    Spec {
        own: "tandem_request_time_per_output_token_seconds",
        vllm: "vllm:request_time_per_output_token_seconds",
        help: "Mean time of an output's tokens after the first",
        own_buckets: TOKEN_SECONDS,
        vllm_buckets: VLLM_TOKEN,
    },
    Spec {
        own: "tandem_request_duration_seconds",
        vllm: "vllm:e2e_request_latency_seconds",
        help: "From a request's arrival to the end of each output",
        own_buckets: SECONDS,
        vllm_buckets: VLLM_REQUEST,
    },
    Spec {
        own: "tandem_request_queue_seconds",
        vllm: "vllm:request_queue_time_seconds",
        help: "From a request's arrival to the plan of its first step",
        own_buckets: SECONDS,
        vllm_buckets: VLLM_REQUEST,
    },
    Spec {
        own: "tandem_request_prefill_seconds",
        vllm: "vllm:request_prefill_time_seconds",
        help: "From the plan of its first step to an output's first token",
        own_buckets: SECONDS,
        vllm_buckets: VLLM_REQUEST,
    },
    Spec {
        own: "tandem_request_decode_seconds",
        vllm: "vllm:request_decode_time_seconds",
        help: "From an output's first token to its last one",
        own_buckets: SECONDS,
        vllm_buckets: VLLM_REQUEST,
    },
    Spec {
        own: "tandem_request_inference_seconds",
        vllm: "vllm:request_inference_time_seconds",
        help: "From the plan of its first step to an output's last token",
        own_buckets: SECONDS,
        vllm_buckets: VLLM_REQUEST,
    },
    Spec {
        own: "tandem_request_prompt_tokens",
        vllm: "vllm:request_prompt_tokens",
        help: "Prompt tokens, once for each output",
        own_buckets: COUNTS,
        vllm_buckets: COUNTS,
    },
    Spec {
        own: "tandem_request_generation_tokens",
        vllm: "vllm:request_generation_tokens",
        help: "Generated tokens of an output",
        own_buckets: COUNTS,
        vllm_buckets: COUNTS,
    },
    Spec {
        own: "tandem_request_max_tokens",
        vllm: "vllm:request_params_max_tokens",
        help: "Largest number of tokens that was asked for, or the model's, once for each output",
        own_buckets: COUNTS,
        vllm_buckets: COUNTS,
    },
    Spec {
        own: "tandem_request_outputs",
        vllm: "vllm:request_params_n",
        help: "Outputs that a request asked for, once for each of them",
        own_buckets: OUTPUTS,
        vllm_buckets: VLLM_OUTPUTS,
    },
];

/// Metrics of calls under one set of names.
#[derive(Debug)]
pub(crate) struct CallMetrics {
    scale: Scale,
    histograms: [Histogram; HISTOGRAMS.len()],
    finished: Family<Label, Counter>,
    refused: Family<Label, Counter>,
}

impl CallMetrics {
    pub(crate) fn new(scale: Scale) -> Self {
        let of_spec = |spec: Spec| {
            let buckets = if scale == Scale::Own { spec.own_buckets } else { spec.vllm_buckets };
            Histogram::new(buckets.iter().copied())
        };
        let calls = Self {
            scale,
            histograms: HISTOGRAMS.map(of_spec),
            finished: Family::default(),
            refused: Family::default(),
        };
        // A series that begins at 0 shows its first increase.
        let reasons: &[_] = match scale {
            Scale::Own => &["stop", "length", "abort", "deadline", "error", "cancelled"],
            Scale::Vllm => &["stop", "length", "abort", "error"],
        };
        reasons.iter().for_each(|reason| drop(calls.of_reason(reason)));
        calls
    }

    fn of_reason(&self, reason: &str) -> Counter {
        let label = if self.scale == Scale::Own { "reason" } else { "finished_reason" };
        self.finished.get_or_create_owned(&[(label, reason.to_owned())])
    }

    pub(crate) fn register(&self, registry: &mut Registry) {
        for (spec, histogram) in HISTOGRAMS.iter().zip(&self.histograms) {
            let name = if self.scale == Scale::Own { spec.own } else { spec.vllm };
            if !name.is_empty() {
                registry.register(name, spec.help, histogram.clone());
            }
        }
        let (finished, help) = match self.scale {
            Scale::Own => (
                "tandem_outputs_finished",
                "Outputs that ended; cancelled where the client left first",
            ),
            Scale::Vllm => ("vllm:request_success", "Outputs that ended"),
        };
        registry.register(finished, help, self.finished.clone());
        if self.scale == Scale::Own {
            let help = "Requests that were not taken, by status code";
            registry.register("tandem_requests_refused", help, self.refused.clone());
        }
    }

    pub(crate) fn step(&self, step: &ObservedStep) {
        let seconds = step.since_last.as_secs_f64();
        if step.is_first {
            self.histograms[FIRST_TOKEN].observe(seconds);
            return;
        }
        self.histograms[INTER_MESSAGE].observe(seconds);
        let of_token = seconds / step.n_tokens as f64;
        for _ in 0..step.n_tokens {
            self.histograms[INTER_TOKEN].observe(of_token);
        }
    }

    /// Counts the end of an output, and its times and sizes unless it `is_fault`.
    pub(crate) fn finished(&self, output: &ObservedOutput<'_>, is_fault: bool) {
        self.of_reason(self.reason(output.reason)).inc();
        if is_fault {
            return;
        }
        let observe = |at: usize, value: f64| self.histograms[at].observe(value);
        let times = &output.times;
        let span = |at: usize, from: Option<Duration>, to: Option<Duration>| {
            if let (Some(from), Some(to)) = (from, to) {
                observe(at, to.saturating_sub(from).as_secs_f64());
            }
        };
        let arrival = Some(Duration::ZERO);
        span(E2E, arrival, Some(times.finished));
        span(QUEUE, arrival, times.started);
        span(PREFILL, times.started, times.first_token);
        span(DECODE, times.first_token, times.last_token);
        span(INFERENCE, times.started, times.last_token);
        let n_generated = output.usage.completion_tokens;
        if let (Some(first), Some(last), 2..) = (times.first_token, times.last_token, n_generated) {
            let decode = last.saturating_sub(first).as_secs_f64();
            observe(PER_OUTPUT_TOKEN, decode / f64::from(n_generated - 1));
        }
        observe(PROMPT_TOKENS, output.usage.prompt_tokens.into());
        observe(GENERATION_TOKENS, n_generated.into());
        observe(MAX_TOKENS, output.request.max_tokens.into());
        observe(N, output.request.n.into());
    }

    pub(crate) fn refused(&self, code: String) {
        self.refused.get_or_create(&[("code", code)]).inc();
    }

    fn reason(&self, reason: Option<&FinishReason>) -> &'static str {
        match (reason.map_or("cancelled", reason_name), self.scale) {
            ("deadline" | "cancelled", Scale::Vllm) => "abort",
            (reason, _) => reason,
        }
    }
}
